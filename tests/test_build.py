"""trtllm-build: where an engine's limits come from, what the command prints, and what it refuses."""

from __future__ import annotations

import json
import logging

import pytest
from engines import free_running, load_hf, logits_of, prompt_of, quiet
from tiny_models import edit_config, tiny_model
from trtllm_workshop.checkpoint import tensor_index
from trtllm_workshop.limits import effective_limits
from trtllm_workshop.reference.build import build_engine, export_network, resolve_limits
from trtllm_workshop.reference.build_output import BuildError
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.trtllm_build import main


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ({"max_position_embeddings": 4096}, None, 4096),
        ({"max_position_embeddings": 4096}, 512, 512),
        ({}, None, 2048),
        ({"max_position_embeddings": 2048, "rotary_scaling": {"type": "linear", "factor": 4.0}}, None, 8192),
        ({"max_position_embeddings": 2048, "rotary_scaling": {"rope_type": "llama3", "factor": 8.0}}, None, 2048),
        ({"max_position_embeddings": 2048, "rotary_scaling": {"rope_type": "default"}}, None, 2048),
    ],
)
def test_P49_max_seq_len_says_where_it_came_from(model, given, expected):
    limits, notes = resolve_limits(BuildConfig(max_seq_len=given), model)
    origin = "given" if given else "max_position_embeddings" if model else "trtllm-build's default"
    assert limits.max_seq_len == expected and f"max_seq_len {expected} ({origin}" in notes[0]
    planned = effective_limits(model, {"max_seq_len": given})
    assert {limit.name: limit.value for limit in planned}["max_seq_len"] == expected, "the planner predicts the same"


def test_P51_the_longest_prompt_depends_on_the_build():
    model = {"max_position_embeddings": 300}
    assert resolve_limits(BuildConfig(max_input_len=10), model)[0].max_input_len == 299
    assert resolve_limits(BuildConfig(max_num_tokens=64), model)[0].max_input_len == 64
    plain = PluginConfig(context_fmha=False)
    assert resolve_limits(BuildConfig(max_input_len=10, plugin_config=plain), model)[0].max_input_len == 10
    assert resolve_limits(BuildConfig(max_input_len=900, plugin_config=plain), model)[0].max_input_len == 300
    with pytest.raises(BuildError, match=r"--remove_input_padding disable: .* always packs tokens"):
        resolve_limits(BuildConfig(plugin_config=PluginConfig(remove_input_padding=False)), model)


def command(engines, tmp_path, *flags):
    return main([str(f) for f in ("--checkpoint_dir", engines.checkpoint(), "--output_dir", tmp_path / "out", *flags)])


def test_the_command_records_its_limits(engines, tmp_path, capsys):
    flags = ("--max_batch_size", 3, "--max_seq_len", 48, "--max_num_tokens", 40, "--gather_all_token_logits")
    assert command(engines, tmp_path, *flags, "--context_fmha", "disable", "--max_input_len", 20) == 0
    build = json.loads((tmp_path / "out" / "config.json").read_text())["build_config"]
    assert (build["max_batch_size"], build["max_seq_len"], build["max_num_tokens"]) == (3, 48, 40)
    assert build["max_input_len"] == 20 and build["plugin_config"]["context_fmha"] is False
    assert build["gather_context_logits"] and build["gather_generation_logits"] and build["kv_cache_type"] == "PAGED"
    out = capsys.readouterr().out
    assert "reference toolchain, trtllm-build" in out.splitlines()[0]
    assert "max_seq_len 48 (given)" in out and "longest prompt 20 (--max_input_len)" in out
    assert "Total time of building all engines" in out


def test_limits_of_one_are_built_without_complaints_of_torch(engines, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("torch"), "propagate", True)  # pytest listens at the root
    with caplog.at_level(logging.WARNING, "torch.export"):
        assert command(engines, tmp_path, "--max_batch_size", 1, "--max_seq_len", 32) == 0
    assert not [record.getMessage() for record in caplog.records if record.name.startswith("torch")]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--max_seq_len", "0"), "max_seq_len=0 must be at least 1"),
        (("--max_beam_width", "2"), "no beam search"),
        (("--remove_input_padding", "disable"), "always packs tokens"),
        (("--kv_cache_type", "disabled"), "always paged"),
    ],
)
def test_the_command_refuses_in_one_line(engines, tmp_path, capsys, flags, said):
    assert command(engines, tmp_path, *flags) == 1
    err = capsys.readouterr().err
    assert said in err and err.startswith("[TRT-LLM] [E] ") and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_command_without_a_checkpoint(capsys):
    assert main([]) == 2 and "--checkpoint_dir is missing" in capsys.readouterr().err


def test_the_engine_file_holds_the_checkpoint_and_the_graph(engines):
    engine, checkpoint = (
        tensor_index(engines.engine() / "rank0.engine"),
        tensor_index(engines.checkpoint() / "rank0.safetensors"),
    )
    fused = {name for name in engine if name.endswith("mlp.fused_fc.weight")}
    assert set(engine) - set(checkpoint) == fused | {"graph", "transformer.rotary_table"}
    assert {name.replace("fused_fc", part) for name in fused for part in ("fc", "gate")} == set(checkpoint) - set(
        engine
    )
    assert engine["transformer.rotary_table"].shape[0] == 160, "one row per position up to max_seq_len"


def test_capturing_the_graph_takes_no_memory_for_weights(engines):
    import torch
    from trtllm_workshop.checkpoint import read_config
    from trtllm_workshop.model_spec import ModelSpec
    from trtllm_workshop.quant_mode import QuantMode
    from trtllm_workshop.reference.network import NetworkConfig

    config = read_config(engines.checkpoint())
    limits, _ = resolve_limits(BuildConfig(max_batch_size=2, max_seq_len=32), config)
    network = NetworkConfig(ModelSpec.from_checkpoint_config(config), torch.float32, 32, QuantMode())
    program = export_network(network, limits, 8)
    assert {value.device.type for value in program.state_dict.values()} == {"meta"}


@pytest.mark.parametrize("scaling", [{"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 2.0}])
def test_P35_linear_rope_scaling_as_in_hugging_face(tmp_path, scaling):
    folder = tiny_model(tmp_path / "hf", rope_scaling=scaling)
    checkpoint = convert_checkpoint(folder, tmp_path / "checkpoint", dtype="float32", say=quiet).folder
    build_engine(checkpoint, BuildConfig(max_batch_size=1, max_seq_len=64), tmp_path / "engine", log=quiet)
    made = LLM(tmp_path / "engine", skip_tokenizer_init=True).generate(prompt_of(30), free_running(16)).outputs[0]
    expected = logits_of(load_hf(folder, "float32"), prompt_of(30) + made.token_ids)
    assert made.token_ids == expected[29:-1].argmax(-1).tolist()


def test_P35_rope_scaling_that_the_engine_does_not_compute_is_refused(tmp_path):
    folder = tiny_model(tmp_path / "hf")
    edit_config(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    checkpoint = convert_checkpoint(folder, tmp_path / "checkpoint", dtype="float32", say=quiet).folder
    with pytest.raises(ValueError, match="'yarn' is not supported; supported: default, linear, llama3"):
        build_engine(checkpoint, BuildConfig(max_batch_size=1, max_seq_len=64), tmp_path / "engine", log=quiet)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "hf"]
