"""Triton model repositories as files: what is written for an engine, and what the checker finds in damaged ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trtllm_workshop.deploy import triton_server
from trtllm_workshop.deploy.engine_limits import EngineLimits
from trtllm_workshop.deploy.model_files import RepositoryProblem
from trtllm_workshop.deploy.triton import PYTHON_MODEL, write_python_model, write_repository
from trtllm_workshop.deploy.triton_metrics import NOT_REPORTED, latency_table, read_metrics, reported, shown
from trtllm_workshop.toolchain import reference_toolchain

pytest.importorskip("tritonclient.grpc", reason="the message type of config.pbtxt comes from tritonclient")
from trtllm_workshop.deploy.triton_check import check_repository, read_config_pbtxt
from trtllm_workshop.deploy.triton_launch import launch_command

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
BUILD = {
    "max_batch_size": 16, "max_input_len": 1024, "max_seq_len": 2000, "max_num_tokens": 4096, "max_beam_width": 1,
    "plugin_config": {"tokens_per_block": 32, "use_paged_context_fmha": True},
}  # fmt: skip
MODEL = {
    "architecture": "LlamaForCausalLM", "dtype": "float16", "vocab_size": 32000, "hidden_size": 2048, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "intermediate_size": 5632, "head_size": 64, "hidden_act": "silu",
    "norm_epsilon": 1e-5, "position_embedding_type": "rope_gpt_neox", "max_position_embeddings": 2048, "rotary_base": 10000.0,
    "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1}, "quantization": {"quant_algo": None},
}  # fmt: skip


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    return make_engine(tmp_path / "engine")


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def repository(tmp_path: Path, engine: Path, tokenizer: Path) -> Path:
    return write_repository(tmp_path / "models", engine, tokenizer)


def make_engine(folder: Path, **build: Any) -> Path:
    """A folder that looks like an engine: its config.json alone."""
    folder.mkdir()
    config = {"version": "1.2.1", "pretrained_config": MODEL, "build_config": {**BUILD, **build}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parsed(repository: Path, model: str) -> Any:
    config, problems = read_config_pbtxt(repository / model / "config.pbtxt")
    assert not problems
    return config


def value(config: Any, key: str) -> str:
    return config.parameters[key].string_value


def change(repository: Path, model: str, old: str, new: str) -> Path:
    """Replace a pattern in a model's file, which must hold it."""
    file = repository / model / "config.pbtxt"
    text, count = re.subn(old, new, file.read_text())
    assert count
    file.write_text(text)
    return file


# What is written -------------------------------------------------------------------------------------------------------


def test_the_five_models_are_written_without_a_problem(repository: Path) -> None:
    assert sorted(path.name for path in repository.iterdir()) == sorted(MODELS)
    assert all((repository / model / "1").is_dir() for model in MODELS)
    assert check_repository(repository) == []


@pytest.mark.parametrize("backend", ["tensorrtllm", "python"])
def test_values_follow_the_engine(tmp_path: Path, engine: Path, tokenizer: Path, backend: str) -> None:
    repository = write_repository(tmp_path / "models", engine, tokenizer, backend=backend)
    assert {parsed(repository, model).max_batch_size for model in MODELS} == {16}
    config = parsed(repository, "tensorrt_llm")
    assert config.backend == backend and value(config, "gpt_model_path") == str(engine.resolve())
    assert value(config, "max_tokens_in_paged_kv_cache") == str(16 * 2016)  # 2000 tokens fill 63 blocks of 32
    assert value(config, "kv_cache_free_gpu_mem_fraction") == "0.9" and value(config, "enable_kv_cache_reuse") == "true"
    queue = config.dynamic_batching
    assert queue.max_queue_delay_microseconds == 0 and queue.default_queue_policy.max_queue_size == 128
    assert (repository / "tensorrt_llm" / "1" / "model.py").exists() == (backend == "python")
    assert not check_repository(repository)


def test_every_parameter_is_explained(tmp_path: Path, repository: Path, engine: Path, tokenizer: Path) -> None:
    write_python_model(repository, engine, tokenizer)
    for file in repository.glob("*/config.pbtxt"):
        lines = file.read_text().splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("parameters", "instance_group", "model_transaction_policy", "max_batch_size")):
                assert lines[number - 1].startswith("# "), f"{file.parent.name}: {line}"


def test_the_planner_bounds_the_cache_on_a_small_gpu(tmp_path: Path, tokenizer: Path) -> None:
    from trtllm_workshop.planner_gpus import find_gpu, load_gpus

    gpus = load_gpus()
    big = make_engine(tmp_path / "big", max_batch_size=2048)
    wanted = EngineLimits.of(big).most_cache_tokens
    repository = write_repository(tmp_path / "models", big, tokenizer, gpu=find_gpu("RTX 4090", gpus))
    tokens = int(value(parsed(repository, "tensorrt_llm"), "max_tokens_in_paged_kv_cache"))
    assert 2000 <= tokens < wanted and tokens % 32 == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch_size": 17}, ["17", "1 to 16"]),
        ({"kv_cache_free_gpu_mem_fraction": 90}, ["90", "above 0 and at most 1"]),
        ({"max_tokens_in_paged_kv_cache": 100}, ["100", "max_seq_len (2000)"]),
        ({"max_queue_delay_microseconds": -1}, ["-1"]),
        ({"max_queue_size": -1}, ["-1", "0 for no limit"]),
        ({"backend": "vllm"}, ["'vllm'", "tensorrtllm, python"]),
    ],
)
def test_values_that_cannot_work_are_refused_and_nothing_is_written(
    tmp_path: Path, engine: Path, tokenizer: Path, options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RepositoryProblem) as refused:
        write_repository(tmp_path / "models", engine, tokenizer, **options)
    assert all(word in str(refused.value) for word in words)
    assert not (tmp_path / "models").exists()


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path, engine: Path, tokenizer: Path) -> None:
    with pytest.raises(RepositoryProblem, match="something else"):
        write_repository(tokenizer, engine, tokenizer)
    with pytest.raises(ValueError, match="engine"):
        write_repository(tmp_path / "models", tokenizer, tokenizer)
    with pytest.raises(RepositoryProblem, match=r"tokenizer\.json"):
        write_repository(tmp_path / "models", engine, engine)
    assert (tokenizer / "tokenizer.json").exists()


def test_writing_again_replaces_all_and_leaves_nothing_beside(repository: Path, engine: Path, tokenizer: Path) -> None:
    (repository / "preprocessing" / "left_over.txt").write_text("")
    write_repository(repository, engine, tokenizer, max_batch_size=4)
    assert not (repository / "preprocessing" / "left_over.txt").exists()
    assert parsed(repository, "ensemble").max_batch_size == 4
    assert {path.name for path in repository.parent.iterdir()} == {"models", "engine", "hf"}


def test_paths_with_quotes_and_blanks_are_written_as_they_are(tmp_path: Path, tokenizer: Path) -> None:
    odd = make_engine(tmp_path / 'an "odd" engine')
    folder = write_python_model(tmp_path / "models", odd, tokenizer)
    assert value(parsed(folder.parent, PYTHON_MODEL), "gpt_model_path") == str(odd.resolve())
    assert check_repository(folder.parent) == []


# What the checker finds ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls", "ensemble"])
@pytest.mark.parametrize(("text", "said"), [("", "absent"), ("model_transaction_policy { decoupled: false }", "false")])
def test_P102_a_model_of_the_chain_that_is_not_decoupled_is_named(repository, model, text, said) -> None:
    file = change(repository, model, r"model_transaction_policy \{.*\}", text)
    (problem,) = check_repository(repository)
    assert str(file) in problem.message and f"decoupled is {said}" in problem.message
    assert "decoupled: true" in problem.fix
    # The server takes an ensemble's mode from its models (seen with Triton 2.51), so only a reader is misled there.
    assert problem.severity == ("warning" if model == "ensemble" else "error")


@pytest.mark.parametrize("spelling", ["True", "true", "t", "1"])
def test_P102_every_spelling_of_true_is_accepted(repository, spelling) -> None:
    for model in ("tensorrt_llm", "tensorrt_llm_bls", "ensemble"):
        change(repository, model, r"decoupled: true", f"decoupled: {spelling}")
    assert check_repository(repository) == []


def test_P102_without_streams_both_models_must_say_the_same(tmp_path, engine, tokenizer) -> None:
    repository = write_repository(tmp_path / "models", engine, tokenizer, streaming=False)
    assert check_repository(repository, streaming=False) == []
    assert {problem.severity for problem in check_repository(repository)} == {"error", "warning"}
    change(repository, "tensorrt_llm", "decoupled: false", "decoupled: true")
    (problem,) = check_repository(repository, streaming=False)
    assert "tensorrt_llm_bls" in problem.message and "same value" in problem.fix


def test_P102_tokenizing_models_answer_once(repository) -> None:
    file = change(repository, "postprocessing", "\\Z", "model_transaction_policy { decoupled: true }\n")
    (problem,) = check_repository(repository)
    assert str(file) in problem.message


DAMAGES = [
    ("tensorrt_llm", r"max_batch_size: 16", "max_batch_size: 64", ["64", "built for 16", "--max_batch_size 64"]),
    ("tensorrt_llm", r"max_batch_size: 16", "max_batch_size: 8", ["ensemble", "is 16", "tensorrt_llm is 8"]),
    ("tensorrt_llm", r"max_batch_size: 16", "max_batch_size: ${triton_max_batch_size}",
     ["line", "${triton_max_batch_size}", "triton_max_batch_size:VALUE"]),
    ("tensorrt_llm", r'backend: "tensorrtllm"', 'backend: "${triton_backend}"', ["${triton_backend}", "fill_template"]),
    ("tensorrt_llm", r'name: "tensorrt_llm"', 'name: "trtllm"', ["'trtllm'", "'tensorrt_llm'"]),
    ("tensorrt_llm", r'"gpt_model_path" value: \{ string_value: ".*?"', '"gpt_model_path" value: { string_value: "/none"',
     ["/none", "no folder"]),
    ("tensorrt_llm", r'"gpt_model_path" value: \{ string_value: ".*?"', '"gpt_model_path" value: { string_value: "${engine_dir}"',
     ["gpt_model_path", "empty"]),
    ("tensorrt_llm", r'string_value: "0.9"', 'string_value: "90"', ["90", "at most 1"]),
    ("tensorrt_llm", r'string_value: "32256"', 'string_value: "512"', ["512", "2000"]),
    ("tensorrt_llm", r"inflight_fused_batching", "V1", ["V1", "inflight_fused_batching"]),
    ("tensorrt_llm", r"decoupled: true", "decoupled: TRUE", ["line", "TRUE"]),
    ("tensorrt_llm", r"dynamic_batching", "dynamic_batchin", ["line", "dynamic_batchin"]),
    ("ensemble", r'model_name: "tensorrt_llm"', 'model_name: "tensorrtllm"', ["'tensorrtllm'", "did you mean 'tensorrt_llm'"]),
    ("ensemble", r'key: "runtime_top_k"', 'key: "top_k"', ["'top_k'", "runtime_top_k"]),
    ("ensemble", r'key: "input_ids" value: "_INPUT_ID"', 'key: "input_ids" value: "_INPUT_IDS"', ["'_INPUT_IDS'", "'_INPUT_ID'"]),
    ("ensemble", r'    output_map \{ key: "OUTPUT".*\n', "", ["text_output"]),
    ("tensorrt_llm_bls", r'string_value: "tensorrt_llm"', 'string_value: "llm"', ["'llm'", "no model"]),
]  # fmt: skip


@pytest.mark.parametrize(("model", "old", "new", "words"), DAMAGES)
def test_a_damage_is_named_with_its_value_and_a_next_step(repository, model, old, new, words) -> None:
    change(repository, model, old, new.replace("\\", "\\\\"))
    problems = check_repository(repository)
    text = "\n".join(map(str, problems))
    assert problems and all(word in text for word in words), text
    assert all(problem.fix for problem in problems)


def test_missing_files_are_named(repository) -> None:
    (repository / "preprocessing" / "1" / "model.py").unlink()
    shutil.rmtree(repository / "postprocessing" / "1")
    (repository / "tensorrt_llm_bls" / "config.pbtxt").unlink()
    text = "\n".join(map(str, check_repository(repository)))
    assert "model.py is missing" in text and "mkdir" in text and "config.pbtxt is missing" in text
    assert "no folder" in str(check_repository(repository / "nothing")[0])
    (repository.parent / "empty").mkdir()
    assert "no model" in str(check_repository(repository.parent / "empty")[0])


def test_an_engine_without_paged_context_gets_no_reuse(tmp_path, tokenizer) -> None:
    plain = make_engine(tmp_path / "plain", plugin_config={"tokens_per_block": 64, "use_paged_context_fmha": False})
    repository = write_repository(tmp_path / "models", plain, tokenizer)
    assert check_repository(repository) == []
    change(repository, "tensorrt_llm", r'"enable_kv_cache_reuse" value: \{ string_value: "false"',
           '"enable_kv_cache_reuse" value: { string_value: "true"')  # fmt: skip
    (problem,) = check_repository(repository)
    assert "use_paged_context_fmha" in problem.message


def test_P64_the_world_size_is_the_engines_and_another_one_is_refused(tmp_path, tokenizer) -> None:
    split = tmp_path / "split"
    make_engine(split)
    config = json.loads((split / "config.json").read_text())
    config["pretrained_config"]["mapping"] = {"world_size": 4, "tp_size": 2, "pp_size": 2}
    (split / "config.json").write_text(json.dumps(config))
    repository = write_repository(tmp_path / "models", split, tokenizer)
    assert f"--world_size=4 --model_repo={repository.resolve()}" in launch_command(repository)
    assert launch_command(repository, world_size=4) == launch_command(repository)
    with pytest.raises(RepositoryProblem, match=r"world_size is 1, the engine was built for 4"):
        launch_command(repository, world_size=1)
    change(repository, "tensorrt_llm", "gpt_model_path", "other")
    with pytest.raises(RepositoryProblem, match="gpt_model_path"):
        launch_command(repository)


# Finding and starting a server, without one ----------------------------------------------------------------------------


def fake_wheel(folder: Path, *versions: str) -> Path:
    """The files of nvidia-pytriton's wheel that are looked for."""
    inside = folder / "pytriton" / "tritonserver"
    files = [
        "bin/tritonserver",
        "backends/python/libtriton_python.so",
        "backends/python/triton_python_backend_utils.py",
    ]
    for name in files + [f"python_backend_stubs/{version}/triton_python_backend_stub" for version in versions]:
        (inside / name).parent.mkdir(parents=True, exist_ok=True)
        (inside / name).write_text(name)
    return folder / "pytriton"


@pytest.fixture
def about(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What the toolchain's Python says about itself; no container here."""
    says = {"version": "3.11", "packages": [str(tmp_path)], "library": "/python/lib", "wheel": None}
    monkeypatch.setattr(triton_server, "ask_python", lambda toolchain: says)
    monkeypatch.setattr(triton_server, "CONTAINER", tmp_path / "no-container")
    return says


def test_a_missing_server_or_stub_is_told_with_what_to_install(about, tmp_path) -> None:
    toolchain = reference_toolchain("a test")
    with pytest.raises(triton_server.TritonMissing, match="pip install nvidia-pytriton"):
        triton_server.find_tritonserver(toolchain)
    about["wheel"] = str(fake_wheel(tmp_path, "3.10", "3.12"))
    with pytest.raises(
        triton_server.TritonMissing, match=r"models of Python 3\.10, 3\.12, and the toolchain's is 3\.11"
    ):
        triton_server.find_tritonserver(toolchain)


def test_the_backend_folder_holds_the_stub_and_the_paths_reach_it(about, tmp_path) -> None:
    about["wheel"] = str(fake_wheel(tmp_path, "3.11"))
    toolchain = reference_toolchain("a test")
    install = triton_server.find_tritonserver(toolchain)
    backends = triton_server.prepare_backends(install, tmp_path / "made")
    assert backends == triton_server.prepare_backends(install, tmp_path / "made")
    names = {"libtriton_python.so", "triton_python_backend_utils.py", "triton_python_backend_stub"}
    assert {path.name for path in (backends / "python").iterdir()} == names
    assert os.access(backends / "python" / "triton_python_backend_stub", os.X_OK)
    assert [path.name for path in (tmp_path / "made").iterdir()] == [backends.name]
    env = triton_server.server_environment(toolchain, install, {"LD_LIBRARY_PATH": "/mine", "A": "1"})
    assert env["LD_LIBRARY_PATH"] == os.pathsep.join([str(tmp_path / "nvidia_pytriton.libs"), "/python/lib", "/mine"])
    assert env["A"] == "1" and env["PYTHONPATH"].split(os.pathsep)[-1] == str(tmp_path)


def test_reasons_are_taken_from_the_log() -> None:
    log = "I1 a.cc:1] \"loading: m:1\"\nE1 b.cc:2] \"failed to load 'm' version 1: Internal: No module named 'x'\\n\\nAt:\\n\"\n"
    assert triton_server.failed_models(log) == ["model m did not load: Internal: No module named 'x'"]
    assert triton_server.failed_models("") == []


def test_shared_memory_of_dead_programs_is_swept(tmp_path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    dead, alive, other = (
        f"trtllm_workshop_{ended.stdout.strip()}_a",
        f"trtllm_workshop_{os.getpid()}_b",
        "somebody_1_c",
    )
    for name in (dead, alive, other):
        (tmp_path / name).write_text("")
    assert triton_server.sweep_shared_memory(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {alive, other}


# Metrics ---------------------------------------------------------------------------------------------------------------

PAGE = """# HELP nv_inference_request_success Number of successful inference requests
# TYPE nv_inference_request_success counter
nv_inference_request_success{model="tensorrt_llm",version="1"} %d
nv_inference_request_duration_us{model="tensorrt_llm",version="1"} %d
nv_inference_queue_duration_us{model="tensorrt_llm",version="1"} 0
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 0
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} NaN
"""


def test_P104_a_figure_that_nobody_measured_is_not_reported() -> None:
    rows = {row["quantity"]: row["value"] for row in latency_table(PAGE % (2, 1000), PAGE % (6, 9000), "tensorrt_llm")}
    assert rows["requests"] == "4" and rows["whole request"] == "2 ms"
    left = ("waiting in Triton", "in the model", "KV-cache blocks in use", "KV-cache blocks free")
    assert {rows[name] for name in left} == {NOT_REPORTED}
    assert not any("first token" in name.lower() or "ttft" in name.lower() for name in rows)
    assert all(not text.startswith(("0 ", "nan", "0.0")) for text in rows.values())


@pytest.mark.parametrize("page", ["", "nonsense", PAGE % (0, 0), "nv_inference_request_success NaN\n"])
def test_P104_an_idle_or_broken_page_reports_nothing(page) -> None:
    assert {row["value"] for row in latency_table(page, page, "tensorrt_llm")} == {NOT_REPORTED}
    assert {shown(None), shown(0.0), shown(float("nan")), shown(float("inf"))} == {NOT_REPORTED}


def test_P104_labels_are_told_apart() -> None:
    page = 'a{x="1"} 2\na{x="2",y="a \\"b\\", c"} 3 1700000000\na 1e3\n'
    samples = read_metrics(page)
    assert reported(samples, "a", x="1") == 2 and reported(samples, "a", x="2") == 3 and reported(samples, "a") == 1005
    assert samples[1].labels["y"] == 'a \\"b\\", c' and reported(samples, "b") is None
