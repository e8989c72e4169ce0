"""`workshop plan`: what it prints, what it refuses and with which words, and that nothing heavy is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from trtllm_workshop.cli import main
from trtllm_workshop.planner_gpus import TABLE, PlanProblem, find_gpu, load_gpus
from trtllm_workshop.planner_measure import Measured, measure
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_plan import first_token, make_plan, next_token
from trtllm_workshop.planner_published import llama
from trtllm_workshop.planner_speed import MEASURED_RATES
from trtllm_workshop.planner_throughput import Load
from trtllm_workshop.planner_work import Engine

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "llama-8b"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


def planned(capsys, *words):
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *words):
    assert main(["plan", *map(str, words)]) == 1
    return capsys.readouterr().err


def test_a_plan_in_json_has_the_exact_bytes_and_prices(model, capsys):
    plan = planned(capsys, model, "--gpu", "h100", "--dtype", "fp8", "--kv-dtype", "fp8", "--price", 3.6)
    assert plan["weights_of_stages"] == [32 * 218_103_808 + 2 * (2 * 128256 * 4096 + 65 * 4096) + 32 * 5 * 8]
    assert plan["kv_bytes_per_token"] == 65536
    assert plan["pool_tokens"] == plan["pool_bytes"] // 65536
    assert plan["largest_batch_by_length"]["8192"] == plan["pool_tokens"] // 8192
    assert plan["cost_per_million_tokens"] == pytest.approx(3.6 / 3600 / plan["tokens_per_second"] * 1e6)
    assert sum(plan["shares"].values()) == pytest.approx(1)
    assert plan["batch_limit"] == "memory"
    assert plan["limit"] == "bandwidth"


def test_what_limits_follows_the_load(model, capsys):
    reading = planned(capsys, model, "--gpu", "L40S", "--dtype", "fp8", "--input", 8000, "--output", 10)
    assert reading["limit"] == "compute"
    split = planned(capsys, model, "--gpu", "L40S", "--dtype", "fp8", "--input", 8000, "--output", 10, "--tp", 8)
    assert split["limit"] == "link" and split["communication_share"] == split["shares"]["link"] > 0.5
    few = planned(capsys, model, "--gpu", "H200", "--requests", 4)
    assert (few["batch"], few["batch_limit"]) == (4, "requests")


def test_words_for_people_name_memory_time_money_and_the_limit(model, capsys):
    assert main(["plan", str(model), "--gpu", "H200", "--tp", "2"]) == 0
    said = capsys.readouterr().out
    for words in (
        "llama-8b in bfloat16", "2 x H200 (tp 2, pp 1)", "65536 bytes per token and rank (4 KV heads)", "first token, alone",
        "limited by", "communication:", "8.00 dollars an hour", "example price",
    ):  # fmt: skip
        assert words in said


def test_P52_what_does_not_fit_is_said_with_the_weights(model, capsys):
    assert "weights take 16.1 GB of 16.1 GB" in refused(capsys, model, "--gpu", "T4", "--dtype", "float16")


def test_P120_memory_that_is_held_already_is_warned_of(model, capsys):
    free = planned(capsys, model, "--gpu", "H100")
    held = planned(capsys, model, "--gpu", "H100", "--used-gb", 30)
    assert free["warnings"] == []
    assert free["pool_bytes"] - held["pool_bytes"] == pytest.approx(0.9 * 30e9, abs=1)
    assert "30.0 GB of this GPU are held by another process" in held["warnings"][0]


def test_copied_kv_heads_are_told(model, capsys):
    plan = planned(capsys, model, "--gpu", "H100", "--tp", 16)
    assert (plan["kv_heads_per_rank"], plan["kv_heads_copied"]) == (1, True)
    assert any("8 KV heads on 16 ranks" in warning and "2 times" in warning for warning in plan["warnings"])


def test_four_bit_floats_are_planned_with_a_warning(model, capsys):
    plan = planned(capsys, model, "--gpu", "B200", "--dtype", "nvfp4", "--kv-dtype", "fp8")
    assert "FP4 is predicted too fast" in plan["warnings"][0]
    assert "no fp4 rate" in refused(capsys, model, "--gpu", "H100", "--dtype", "nvfp4")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpu", "H10"], ["'H10' is not in the table", "H100", "--gpus"]),
        (["--gpu", "A100"], ["A100 40GB or A100 80GB"]),
        (["--gpu", "H100", "--tp", "3"], ["--tp 3", "32 attention heads", "1, 2, 4, 8, 16, 32"]),
        (["--gpu", "H100", "--tp", "0"], ["--tp 0", "at least 1"]),
        (["--gpu", "A100 80GB", "--dtype", "fp8"], ["no fp8 rate", "it has fp16"]),
        (["--gpu", "H100", "--kv-fraction", "1.5"], ["1.5", "at most 1"]),
        (["--gpu", "H100", "--used-gb", "-1"], ["--used-gb -1"]),
        (["--gpu", "H100", "--gpus", "/nowhere/gpus.yml"], ["/nowhere/gpus.yml cannot be read"]),
        (["--measure", "--gpus", "mine.yml"], ["--gpus mine.yml is for --gpu", "leave one of them out"]),
        (["--gpu", "H100", "--used-gb", "100"], ["other processes 100.0 GB", "take a GPU that nobody else uses"]),
        (["--gpu", "H100", "--max-batch-size", "1000000"], ["buffers 51", "a smaller --max-batch-size (1000000)"]),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_next_step(model, capsys, words, expected):
    said = refused(capsys, model, *words)
    assert all(part in said for part in expected), said
    assert "Traceback" not in said


@pytest.mark.parametrize("value", ["x", "1.5", "0", "-3", "nan"])
def test_lengths_are_whole_numbers(model, capsys, value):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", str(model), "--gpu", "H100", f"--input={value}"])
    assert f"--input: '{value}' is not a whole number of at least 1" in capsys.readouterr().err


def test_files_that_cannot_be_read_are_named(tmp_path, model, capsys, monkeypatch):
    table = tmp_path / "gpus.yml"
    table.write_text("[" * 5000)
    assert "gpus.yml is not YAML" in refused(capsys, model, "--gpu", "H100", "--gpus", table)
    (tmp_path / "config.json").mkdir()
    assert "config.json is not a file" in refused(capsys, tmp_path, "--gpu", "H100")

    def closed(self, **_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.read_text", closed)
    assert "config.json cannot be read (Permission denied)" in refused(capsys, model, "--gpu", "H100")


def test_a_folder_without_a_model_is_named(tmp_path, capsys):
    assert "config.json does not exist: download the model first" in refused(capsys, tmp_path, "--gpu", "H100")
    (tmp_path / "config.json").write_text("[1]")
    assert "expected an object" in refused(capsys, tmp_path, "--gpu", "H100")


def test_a_split_and_quantized_checkpoint_says_its_own_settings(tmp_path, capsys):
    config = LLAMA | {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        "mapping": {"world_size": 4, "tp_size": 2, "pp_size": 2},
    }
    for document in (config, {"pretrained_config": config, "build_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(document))
        plan = planned(capsys, tmp_path, "--gpu", "H100")
        assert (plan["dtype"], plan["kv_dtype"], plan["tp"], plan["pp"]) == ("fp8", "fp8", 2, 2)
        assert planned(capsys, tmp_path, "--gpu", "H100", "--tp", 1, "--pp", 1)["tp"] == 1


@pytest.mark.parametrize("broken", [{"mapping": [1]}, {"mapping": {"tp_size": "two"}}, {"quantization": 3}])
def test_a_damaged_checkpoint_config_is_refused_with_its_name(tmp_path, capsys, broken):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architecture": "LlamaForCausalLM"} | broken))
    said = refused(capsys, tmp_path, "--gpu", "H100")
    assert "config.json" in said and next(iter(broken)) in said and "Traceback" not in said


def test_the_table_can_be_edited(tmp_path, model, capsys):
    table = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    table["gpus"] = {"Mine": table["gpus"]["H100"] | {"bandwidth": "1e12", "price": 1}}
    file = tmp_path / "mine.yml"
    file.write_text(yaml.safe_dump(table))
    assert planned(capsys, model, "--gpu", "mine", "--gpus", file)["price_per_hour"] == 1
    for field, value in (
        ("memory_gib", 0),
        ("bandwidth", "fast"),
        ("kind", "string"),
        ("flops", {"fp12": 1}),
        ("link", True),
    ):
        broken = {"gpus": {"Mine": table["gpus"]["Mine"] | {field: value}}}
        file.write_text(yaml.safe_dump(broken))
        with pytest.raises(PlanProblem, match=f"Mine: {field}"):
            load_gpus(file)


def test_the_table_names_every_gpu_once_and_its_rates_are_dense():
    gpus = load_gpus()
    assert set(gpus) >= {
        "T4", "A10G", "L4", "L40S", "RTX 4090", "RTX 5090", "A100 40GB", "A100 80GB", "H100", "H200", "GH200", "B200",
    }  # fmt: skip
    assert find_gpu("NVIDIA GeForce RTX-4090", gpus) is gpus["RTX 4090"]
    for gpu in gpus.values():
        assert gpu.source and gpu.price
        if "fp8" in gpu.flops:  # the sparse rate beside a dense one would make this four
            assert gpu.flops["fp8"] == pytest.approx(2 * gpu.flops["fp16"], rel=0.02)


def test_a_long_prompt_is_read_in_parts_and_stages_add_up():
    engine = Engine(llama("8B"), load_gpus()["H100"], "fp8", "fp8")
    whole, parts = first_token(engine, 16000, 16384), first_token(engine, 16000, 8192)
    assert parts.matrices == pytest.approx(whole.matrices) and parts.scores == pytest.approx(whole.scores)
    assert (whole.layers, parts.layers) == (32, 64)
    staged = replace(engine, split=Split(pp=2))
    assert next_token(staged, 64, 1000).layers == next_token(engine, 64, 1000).layers
    assert next_token(staged, 64, 1000).cache == pytest.approx(next_token(engine, 64, 1000).cache / 2)


def test_more_ranks_answer_sooner_and_give_less_per_gpu():
    one, four = (
        make_plan(Engine(llama("70B"), load_gpus()["H200"], "fp8", "fp8", Split(tp)), Load(1000, 1000, 200))
        for tp in (2, 8)
    )
    assert four.time_per_token_alone < one.time_per_token_alone
    assert four.time_to_first_token < one.time_to_first_token
    assert four.tokens_per_second_per_gpu < one.tokens_per_second_per_gpu


@pytest.mark.parametrize("backend", ["torch", "numpy"])
def test_this_machine_is_measured_with_plausible_rates(backend, monkeypatch):
    monkeypatch.setattr("trtllm_workshop.planner_measure.COPY_BYTES", 2**22)
    monkeypatch.setattr("trtllm_workshop.planner_measure.WIDTH", {"cuda": 256, "cpu": 256})
    found = measure(threads=1, backend=backend)
    assert 1e8 < found.gpu.bandwidth < 1e14
    assert 1e8 < found.gpu.flops["fp32"] < 1e16
    assert found.gpu.memory > 2**28 and found.used_by_others >= 0
    assert 0 < found.constants.layer_seconds < 0.1
    assert f"reading weights for one token {found.gpu.bandwidth / 1e9:.1f} GB/s" in found.words


def test_measuring_gives_back_the_threads_of_torch():
    import torch

    before = torch.get_num_threads()
    measure(threads=1)
    assert torch.get_num_threads() == before


def test_a_plan_of_this_machine_uses_what_was_measured(model, capsys, monkeypatch):
    slow = replace(load_gpus()["L4"], name="slow", bandwidth=1e9, memory=64e9)
    here = Measured(slow, 1e9, MEASURED_RATES, "Measured here: slow.")
    monkeypatch.setattr("trtllm_workshop.planner_measure.measure", lambda dtype, threads: here)
    plan = planned(capsys, model, "--measure")
    assert plan["gpu"] == "slow" and plan["note"] == "Measured here: slow."
    assert plan["rates"]["memory"] == 1e9
    assert plan["time_per_token_alone"] > (plan["weights_of_stages"][0] - 2 * 128256 * 4096) / 1e9
    assert "1.0 GB of this GPU are held" in plan["warnings"][0]


def test_planning_imports_neither_torch_nor_numpy(model):
    code = (
        "import sys; from trtllm_workshop.cli import main; "
        f"assert main(['plan', {str(model)!r}, '--gpu', 'H100']) == 0; "
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
