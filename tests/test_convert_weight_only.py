"""convert_checkpoint.py with weight-only flags: what it writes, and what needs calibration is sent to quantize.py."""

import json

import pytest
from safetensors.torch import load_file
from tiny_models import tiny_model
from trtllm_workshop.reference import convert_cli
from trtllm_workshop.reference.convert_cli import LLAMA, QWEN, main


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("source") / "hf", "llama-gqa", dtype="bfloat16")


def run(script, source, target, *flags):
    return main(script, ["--model_dir", str(source), "--output_dir", str(target), *flags])


@pytest.mark.parametrize(("flags", "algorithm"), [((), "W8A16"), (("--weight_only_precision", "int4"), "W4A16")])
def test_tensors_stay_as_they_are_and_the_config_asks_the_build(source, tmp_path, capsys, flags, algorithm):
    assert run(LLAMA, source, tmp_path / "plain") == 0
    assert run(LLAMA, source, tmp_path / "wo", "--use_weight_only", *flags) == 0
    said = capsys.readouterr().out
    assert f"({algorithm})" in said and "trtllm-build quantizes" in said
    plain, wo = (load_file(tmp_path / name / "rank0.safetensors") for name in ("plain", "wo"))
    assert plain.keys() == wo.keys() and all(plain[name].equal(wo[name]) for name in plain)
    config = json.loads((tmp_path / "wo" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == algorithm
    config["quantization"]["quant_algo"] = None
    assert config == json.loads((tmp_path / "plain" / "config.json").read_text())


def test_two_ranks_too(source, tmp_path):
    assert run(LLAMA, source, tmp_path / "wo", "--use_weight_only", "--tp_size", "2") == 0
    config = json.loads((tmp_path / "wo" / "config.json").read_text())
    assert config["quantization"]["quant_algo"] == "W8A16" and config["mapping"]["tp_size"] == 2


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--use_fp8", "quantize.py --qformat fp8"),
        ("--fp8_kv_cache", "quantize.py --kv_cache_dtype fp8"),
        ("--int8_kv_cache", "quantize.py --kv_cache_dtype int8"),
    ],
)
def test_what_needs_measuring_is_sent_to_quantize(source, tmp_path, capsys, flag, words):
    assert run(LLAMA, source, tmp_path / "out", flag) == 1
    error = capsys.readouterr().err
    assert flag in error and words in error and not (tmp_path / "out").exists()


def test_precision_without_the_switch_is_warned_about(source, tmp_path, capsys):
    assert run(LLAMA, source, tmp_path / "out", "--weight_only_precision", "int4") == 0
    assert "no effect without --use_weight_only" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["quant_algo"] is None


def test_gptq_is_refused_by_name(source, tmp_path, capsys):
    assert run(LLAMA, source, tmp_path / "out", "--weight_only_precision", "int4_gptq") == 1
    assert "int4_gptq" in capsys.readouterr().err


def test_qwen_has_the_weight_only_flags_and_no_fp8_flag(tmp_path, capsys):
    source = tiny_model(tmp_path / "hf", "qwen2", dtype="bfloat16")
    assert run(QWEN, source, tmp_path / "wo", "--use_weight_only", "--weight_only_precision", "int4") == 0
    assert json.loads((tmp_path / "wo" / "config.json").read_text())["quantization"]["quant_algo"] == "W4A16"
    assert "--use_fp8" not in convert_cli._FLAGS[QWEN]
    with pytest.raises(SystemExit):
        run(QWEN, source, tmp_path / "wo", "--use_fp8")
    assert "--use_fp8" in capsys.readouterr().err
