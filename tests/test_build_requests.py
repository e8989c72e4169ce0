"""FP8 by GPU, and flags of trtllm-build that are asked for and will have no effect."""

import itertools
import json

import pytest
from trtllm_workshop.advice import advise
from trtllm_workshop.build_requests import explain_requests, requested_but_ignored
from trtllm_workshop.commands import check_command
from trtllm_workshop.precision import capability_of, fp8_support
from trtllm_workshop.quant_mode import KV_CACHE_QUANT_ALGOS, QUANT_ALGOS, QuantMode

PAGED, FP8 = "--use_paged_context_fmha", "--use_fp8_context_fmha"


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("A100-SXM4-40GB", "8.0"),
        ("NVIDIA A100 80GB PCIe", "8.0"),
        ("NVIDIA RTX A6000", "8.6"),
        ("NVIDIA A10G", "8.6"),
        ("NVIDIA GeForce RTX 3090", "8.6"),
        ("Tesla T4", "7.5"),
        ("Tesla V100-SXM2-32GB", "7.0"),
    ],
)
def test_P67_cards_without_fp8_are_refused(name, capability):
    for verdict in (fp8_support(capability, name), fp8_support(None, name)):
        assert verdict.supported is False and capability in verdict.reason
        # The older two have no kernels in this release at all, so other weights would not help.
        assert ("int8_wo" in verdict.reason and "int4_awq" in verdict.reason) == (float(capability) >= 8)


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA L4", "8.9"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA GeForce RTX 4090", "8.9"),
        ("NVIDIA RTX 6000 Ada Generation", "8.9"),
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA H100L-2-24C", "9.0"),
        ("NVIDIA H200", "9.0"),
    ],
)
def test_P67_cards_with_fp8_are_accepted(name, capability):
    assert fp8_support(capability, name).supported is True
    assert fp8_support(None, name).supported is True and capability_of(name) == capability


def test_P67_the_name_trap_is_explained():
    assert "Ampere card" in fp8_support("8.6", "NVIDIA RTX A6000").reason
    assert "Ampere card" not in fp8_support("8.0", "NVIDIA A100").reason


@pytest.mark.parametrize("name", ["", "NVIDIA Graphics Device", "Radeon RX 7900", "NVIDIA L400", "A1000X"])
def test_P67_unknown_names_are_not_decided(name):
    assert capability_of(name) is None and fp8_support(None, name).supported is None


def test_P67_what_the_driver_reports_wins_over_the_name():
    assert fp8_support("8.9", "NVIDIA A100").supported is True


def only(args, mode, capability=None):
    (problem,) = requested_but_ignored(args, mode, capability)
    return problem


def test_P69_fp8_attention_on_an_a100_is_ignored():
    found = requested_but_ignored({FP8: "enable"}, QuantMode("FP8", "FP8"), "8.0")
    assert [problem.severity for problem in found] == ["error", "warning"]
    assert "FP8 weights do not run" in found[0].message and "8.0" in found[1].message and FP8 in found[1].message
    assert requested_but_ignored({FP8: "enable"}, QuantMode("FP8", "FP8"), "8.9") == []


def test_P69_fp8_attention_needs_fp8_weights():
    problem = only({FP8: "enable", PAGED: "disable"}, QuantMode("W8A16"))
    assert problem.severity == "warning" and "W8A16" in problem.message and "--qformat fp8" in problem.fix


def test_P69_fp8_paged_attention_without_an_fp8_cache():
    problem = only({FP8: "enable"}, QuantMode("FP8"), "9.0")
    assert problem.severity == "warning" and "16-bit" in problem.message and "--kv_cache_dtype fp8" in problem.fix
    assert requested_but_ignored({FP8: "enable", PAGED: "disable"}, QuantMode("FP8"), "9.0") == []


def test_P69_fp8_attention_cannot_be_switched_off_alone():
    """builder.py: 'FP8 Context FMHA is enabled to support FP8 Paged Context FMHA.'"""
    problem = only({FP8: "disable"}, QuantMode("FP8", "FP8"), "9.0")
    assert problem.severity == "warning" and f"{FP8} disable is ignored" in problem.message and PAGED in problem.fix
    assert requested_but_ignored({FP8: "disable", PAGED: "disable"}, QuantMode("FP8", "FP8"), "9.0") == []
    assert requested_but_ignored({FP8: "disable"}, QuantMode("FP8"), "9.0") == []
    assert requested_but_ignored({FP8: "disable"}, QuantMode("W8A16", "FP8")) == []


@pytest.mark.parametrize("mode", [QuantMode("W8A16", "INT8"), QuantMode("W8A16", "FP8"), QuantMode(None, "FP8")])
def test_P69_paged_attention_is_switched_off_with_caches_that_it_cannot_read(mode):
    problem = only({PAGED: "enable"}, mode)
    assert problem.severity == "warning" and f"{PAGED} enable is ignored" in problem.message
    assert requested_but_ignored({}, mode) == requested_but_ignored({PAGED: "disable"}, mode) == []


@pytest.mark.parametrize("mode", [QuantMode("W8A16"), QuantMode("W4A16_AWQ", "FP8"), QuantMode("FP8", "INT8")])
def test_integer_formats_stop_the_build_on_10_x(mode):
    problem = only({}, mode, "10.0")
    assert problem.severity == "error" and mode.name in problem.message and "--qformat fp8" in problem.fix
    assert requested_but_ignored({}, mode, "12.0") == requested_but_ignored({}, mode, "9.0") == []


def test_P69_attention_that_is_off_takes_its_switches_along():
    found = requested_but_ignored(
        {"--context_fmha": "disable", PAGED: "enable", FP8: "enable"}, QuantMode("FP8", "FP8")
    )
    assert len(found) == 2 and all("--context_fmha is disable" in problem.message for problem in found)


def test_P69_defaults_that_have_no_effect_are_not_reported():
    assert explain_requests({}, QuantMode()) == "every flag that was asked for has its effect"
    assert requested_but_ignored({}, QuantMode("FP8", "FP8"), "9.0") == []


def test_errors_and_warnings_are_exactly_what_the_build_refuses_and_switches_off():
    """Every combination against the reference build's own check."""
    pytest.importorskip("torch")
    from trtllm_workshop.reference.build_output import BuildError
    from trtllm_workshop.reference.build_precision import check_precision
    from trtllm_workshop.reference.configs import PluginConfig

    gpus, tried = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "12.0"), 0
    for weights, cache, paged, gpu in itertools.product(
        (None, *QUANT_ALGOS), (None, *KV_CACHE_QUANT_ALGOS), (True, False), gpus
    ):
        mode = QuantMode(weights, cache)
        found = requested_but_ignored({PAGED: "enable" if paged else "disable"}, mode, gpu)
        major, minor = map(int, gpu.split("."))
        try:
            plugins = PluginConfig(use_paged_context_fmha=paged)
            built, refused = check_precision(mode, plugins, (major, minor), lambda _: None), False
        except BuildError:
            built, refused = plugins, True
        assert refused == any(problem.severity == "error" for problem in found), (weights, cache, paged, gpu)
        dropped = paged and not built.use_paged_context_fmha
        if not refused:
            assert dropped == any(f"{PAGED} enable is ignored" in problem.message for problem in found), (mode, paged)
        tried += 1
    assert tried == 210


@pytest.fixture
def checkpoint(tmp_path):
    def make(**quantization):
        (tmp_path / "c").mkdir(exist_ok=True)
        config = {"architecture": "LlamaForCausalLM", "quantization": quantization}
        (tmp_path / "c" / "config.json").write_text(json.dumps(config))
        return f"trtllm-build --checkpoint_dir {tmp_path / 'c'} --output_dir e"

    return make


def test_P69_a_command_is_checked_against_its_checkpoint(checkpoint):
    line = checkpoint(quant_algo="W8A16", kv_cache_quant_algo="INT8")
    (problem,) = check_command(f"{line} {PAGED} enable")
    assert problem.severity == "warning" and "INT8 KV cache" in problem.message
    assert check_command(line) == check_command(f"{line} {PAGED} disable") == []
    assert check_command(f"{line} {PAGED} {{paged}}") == [], "an unknown value decides nothing"
    line = checkpoint(quant_algo="FP8", kv_cache_quant_algo=None)
    (problem,) = check_command(f"{line} {FP8} enable")
    assert problem.severity == "warning" and "is ignored" in problem.message
    assert check_command(checkpoint(quant_algo="FP9")) == [] and check_command(checkpoint()) == []


QUANTIZE = "python examples/quantization/quantize.py --model_dir m"


@pytest.mark.parametrize(
    ("flags", "severity", "said"),
    [
        ("--qformat fp8 --awq_block_size 64", "warning", "no effect with --qformat fp8"),
        ("--qformat int8_wo --calib_size 16", "warning", "measures nothing"),
        ("--calib_dataset d", "warning", "full_prec without --kv_cache_dtype"),
        ("--qformat int4_awq --quantize_lm_head", "error", "--qformat fp8 only"),
    ],
)
def test_flags_of_quantize_that_have_no_effect(flags, severity, said):
    (problem,) = check_command(f"{QUANTIZE} {flags}")
    assert problem.severity == severity and said in problem.message


@pytest.mark.parametrize(
    "flags",
    [
        "--qformat fp8 --kv_cache_dtype fp8 --calib_size 8",
        "--qformat int8_wo --kv_cache_dtype fp8 --calib_size 8",
        "--qformat {form} --awq_block_size 64",
        "--qformat int4_awq --awq_block_size 64",
    ],
)
def test_good_lines_of_quantize(flags):
    assert check_command(f"{QUANTIZE} {flags}") == []


@pytest.mark.parametrize(
    ("text", "row", "fix"),
    [
        ("[TRT] [E] Networks with FP8 precision require hardware with FP8 support", "P67", "int8_wo"),
        ("RuntimeError: INT8/INT4 quantization is not supported on SM>=100.", "P67", "--qformat fp8"),
        ("Paged Context FMHA doesn't work with int8 kv cache currently.", "P69", "--use_paged_context_fmha disable"),
        ("FP8 Paged Context FMHA only works with fp8 quantization workflow currently.", "P69", "--qformat fp8"),
        ("HfUriError: Repository id must be 'namespace/name', got 'cnn_dailymail'", "P70", "--calib_dataset FOLDER"),
    ],
)
def test_advice(text, row, fix):
    found = advise(text, 1)
    assert any(advice.row == row and fix in advice.fix for advice in found), found


def test_a_switch_that_the_build_turned_off_is_not_taken_for_a_failure():
    said = "[TRT-LLM] [W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.\n"
    assert advise(said, 1) == []
