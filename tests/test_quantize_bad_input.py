"""quantize.py with wrong input: every fault is named before the first batch, and no folder is left behind."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import trtllm_workshop.reference
from quantized_models import calibration_set, hf_tensors, ranks, refused, run
from safetensors.torch import save_file
from tiny_models import edit_config, tiny_model
from trtllm_workshop.reference import quantize as module
from trtllm_workshop.reference import quantize_checks as checks
from trtllm_workshop.reference.quantize_cli import main, make_parser
from trtllm_workshop.reference.quantize_output import verify_quantized

pytest.importorskip("modelopt")
SCRIPT = Path(trtllm_workshop.reference.__file__).parent / "examples" / "quantization" / "quantize.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return calibration_set(tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("source") / "hf", "llama-gqa", dtype="bfloat16")


# Formats and sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qformat", ["int8_sq", "w4a8_awq", "fp8_pc_pt", "nvfp4"])
def test_formats_that_the_engine_does_not_run(source, data, tmp_path, qformat):
    refused(source, tmp_path / "out", data, f"--qformat {qformat} is refused", "take ", qformat=qformat)


def test_tp_that_does_not_fit_names_both_numbers(data, tmp_path):
    tied = tiny_model(tmp_path / "hf", "llama-tied", dtype="bfloat16")
    refused(tied, tmp_path / "out", data, "--tp_size 2", "9 attention heads", "Possible are 1, 3", tp_size=2)


def test_pp_must_divide_the_layers(source, data, tmp_path):
    refused(source, tmp_path / "out", data, "--pp_size 2", "3 layers", pp_size=2)


def test_awq_block_size_for_the_widths_of_smollm2(data, tmp_path):
    wide = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 1}
    model = tiny_model(tmp_path / "hf", "llama-tied", dtype="bfloat16", **wide)
    words = "--awq_block_size 128", "576", "64 or 32"
    refused(model, tmp_path / "out", data, *words, qformat="int4_awq")
    refused(model, tmp_path / "out", data, "per rank 512", "64", qformat="int4_awq", awq_block_size=96, tp_size=3)
    result, _ = run(model, tmp_path / "out", data, "int4_awq", awq_block_size=64, calib_size=2)
    assert result.config["quantization"]["group_size"] == 64


def test_awq_caps_the_texts_and_says_so(source, tmp_path):
    many = calibration_set(tmp_path / "many", ["on"] * 40)
    result, said = run(source, tmp_path / "out", many, "int4_awq", awq_block_size=16)
    assert len(result.data.samples) == 32 and "32 texts instead of --calib_size 512" in said


def test_lm_head_switch_only_with_fp8(source, data, tmp_path):
    refused(source, tmp_path / "out", data, "--quantize_lm_head", qformat="int4_awq", quantize_lm_head=True)


def test_float32_is_not_exported_and_that_is_said(source, tmp_path):
    result, said = run(source, tmp_path / "out", None, "full_prec", dtype="float32")
    assert result.config["dtype"] == "float16" and "float16 is written instead" in said


def test_values_beyond_float16(data, tmp_path):
    big = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    state = {name: tensor.bfloat16() for name, tensor in hf_tensors(big).items()}
    state["model.layers.1.mlp.up_proj.weight"] *= 1e6
    save_file(state, big / "model.safetensors", metadata={"format": "pt"})
    refused(big, tmp_path / "out", data, "layers.1.mlp.up_proj", "--dtype bfloat16", dtype="float16")


# Before the first batch ----------------------------------------------------------------------------------------------


def test_P77_a_model_that_does_not_fit_stops_at_once(source, data, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "free_memory", lambda device: 1_000_000)
    refused(source, tmp_path / "out", data, "does not fit", "0.0 GB are free", "larger machine")


def test_P77_free_memory_is_a_number_of_bytes_or_unknown(monkeypatch):
    free = checks.free_memory("cpu")
    assert free is None or 0 < free < 1 << 50
    monkeypatch.setattr(checks, "_MEMINFO", Path("/nowhere"))
    assert checks.free_memory("cpu") is None


def test_P77_a_container_has_its_own_limit(tmp_path, monkeypatch):
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    (tmp_path / "memory.max").write_text("4096000\n")
    (tmp_path / "memory.current").write_text("1024000\n")
    monkeypatch.setattr(checks, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(checks, "_CGROUP", tmp_path)
    assert checks.free_memory("cpu") == 3072000
    (tmp_path / "memory.max").write_text("max\n")
    assert checks.free_memory("cpu") == 8000 * 1024


def test_P77_an_architecture_that_cannot_be_exported(data, tmp_path):
    model = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    edit_config(model, architectures=["FalconForCausalLM"], model_type="falcon")
    refused(model, tmp_path / "out", data, "FalconForCausalLM")


def test_P77_output_folders_that_cannot_be_written(source, data, tmp_path, capsys):
    refused(source, source, data, "--output_dir", "Hugging Face model")
    (tmp_path / "file").write_text("x")
    arguments = ["--model_dir", str(source), "--device", "cpu", "--qformat", "fp8", "--calib_dataset", str(data)]
    assert main([*arguments, "--output_dir", str(tmp_path / "file" / "out")]) == 1
    captured = capsys.readouterr()
    assert "--output_dir" in captured.err and "cannot be written" in captured.err and "calibrating" not in captured.out


def test_P77_modelopt_missing_or_of_another_release(source, data, tmp_path, monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", absent)
        refused(source, tmp_path / "out", data, "ModelOpt is not installed", "nvidia-modelopt==0.37")
    said = []
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.41.0")
    assert checks.check_modelopt(said.append) == "0.41.0" and "0.41.0" in said[0] and "0.37" in said[0]


def test_P77_weights_that_are_missing(data, tmp_path):
    model = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    state = {name: tensor.bfloat16() for name, tensor in hf_tensors(model).items()}
    del state["model.layers.2.mlp.down_proj.weight"]
    save_file(state, model / "model.safetensors", metadata={"format": "pt"})
    refused(model, tmp_path / "out", data, "model.layers.2.mlp.down_proj.weight", "download")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a CUDA GPU")
def test_cuda_without_a_gpu_says_what_to_add(source, data, tmp_path, capsys):
    arguments = ["--model_dir", str(source), "--output_dir", str(tmp_path / "out"), "--calib_dataset", str(data)]
    assert main([*arguments, "--qformat", "fp8"]) == 1
    assert "add --device cpu" in capsys.readouterr().err


def test_a_tokenizer_that_cannot_be_read(data, tmp_path):
    model = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    (model / "tokenizer.json").write_text("{")
    refused(model, tmp_path / "out", data, "tokenizer cannot be loaded")


def test_a_folder_without_a_tokenizer(data, tmp_path):
    model = tiny_model(tmp_path / "hf", "llama-gqa", dtype="bfloat16")
    for file in [*model.glob("tokenizer*"), *model.glob("vocab*")]:
        if file.name != "tokenizer_config.json":
            file.unlink()
    refused(model, tmp_path / "out", data, f"{model} has no tokenizer (tokenizer.json or tokenizer.model)")


def test_a_name_of_the_hub_is_no_folder(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = "org/some-model is not there", "Hub is not enough", "nothing is downloaded", "lesson 01"
    refused(Path("org/some-model"), tmp_path / "out", data, *words)


def test_an_output_that_no_folder_can_be_made_at(source, data, tmp_path, monkeypatch, capsys):
    def mkdir(self, *_, **__):
        raise FileNotFoundError(2, "No such file or directory", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    target = tmp_path / "out"
    arguments = ["--model_dir", source, "--output_dir", target, "--device", "cpu", "--calib_dataset", data]
    assert main([*map(str, arguments), "--qformat", "fp8"]) == 1
    said = capsys.readouterr().err
    assert f"--output_dir {target} cannot be written: no such file or directory; choose another" in said
    assert "probe" not in said


def test_an_error_that_is_not_about_the_output_stays(tmp_path):
    from trtllm_workshop.reference.output_errors import output_error

    error = FileNotFoundError(2, "No such file or directory", str(tmp_path / "input"))
    assert output_error(error, "--output_dir", tmp_path / "out") == str(error)


# Flags ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nemo_ckpt_path", "x"], "--nemo_ckpt_path x is an official flag"),
        (["--autoq_format", "fp8"], "--autoq_format fp8 is an official flag"),
        (["--num_medusa_heads", "2"], "--num_medusa_heads 2 is an official flag"),
        (["--calib_tp_size", "2"], "--calib_tp_size 2 is an official flag"),
        (["--cp_size", "2"], "--cp_size 2 is an official flag"),
        (["--qformat", "fp4"], "invalid choice: 'fp4'"),
        (["--kv_cache_dtype", "int4"], "invalid choice: 'int4'"),
        (["--quantise"], "unrecognized arguments: --quantise"),
    ],
)
def test_flags_are_refused_by_name(source, tmp_path, capsys, flags, said):
    with pytest.raises(SystemExit) as stop:
        main(["--model_dir", str(source), "--output_dir", str(tmp_path / "out"), *flags])
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_help_says_what_every_flag_does(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "writes a quantized TensorRT-LLM checkpoint" in text
    for said in (
        "checkpoint (default: exported_model)",
        "full_prec here",
        "(default: cnn_dailymail)",
        "(default: 512)",
    ):
        assert said in text
    assert all(action.help for action in make_parser()._actions)


def test_official_defaults_of_flags_without_meaning_pass(source, tmp_path):
    arguments = ["--model_dir", str(source), "--output_dir", str(tmp_path / "out"), "--device", "cpu"]
    assert main([*arguments, "--num_medusa_heads", "4", "--cp_size", "1", "--decoder_type", "gptnext"]) == 0


def test_a_caller_keeps_its_signal_handler(source, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    assert main(["--model_dir", str(source / "nothing"), "--output_dir", str(tmp_path / "out")]) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_without_a_model(capsys):
    assert main(["--qformat", "fp8"]) == 1 and "--model_dir is missing" in capsys.readouterr().err


# During and after calibration ----------------------------------------------------------------------------------------


def test_a_loop_that_never_ran_is_an_error(source, data, tmp_path, monkeypatch):
    import modelopt.torch.quantization as mtq

    monkeypatch.setattr(mtq, "quantize", lambda model, config, loop: model)
    refused(source, tmp_path / "out", data, "never ran (0 batches)")


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_are_no_scales_are_found(source, data, tmp_path, value):
    from trtllm_workshop.model_spec import ModelSpec

    folder = run(source, tmp_path / "out", data, kv_cache_dtype="fp8")[0].folder
    spec = ModelSpec.from_hf(source)
    assert verify_quantized(folder, spec) == []
    (tensors,) = ranks(folder)
    tensors["transformer.layers.1.mlp.proj.activation_scaling_factor"][0] = value
    save_file(tensors, folder / "rank0.safetensors")
    (problem,) = verify_quantized(folder, spec)
    assert (
        "transformer.layers.1.mlp.proj.activation_scaling_factor" in problem
        and "zero, negative or not finite" in problem
    )


def test_an_older_checkpoint_survives_a_failed_run(source, data, tmp_path, monkeypatch):
    folder = run(source, tmp_path / "out", data)[0].folder
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.setattr(module, "verify_quantized", lambda *_: ["something is wrong"])
    with pytest.raises(ValueError, match="something is wrong"):
        run(source, folder, data, kv_cache_dtype="fp8")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_interrupted_calibration_leaves_nothing(source, tmp_path, number):
    many = calibration_set(tmp_path / "many", ["the " * 120] * 5000)
    arguments = [
        "--model_dir",
        source,
        "--output_dir",
        tmp_path / "out",
        "--calib_dataset",
        many,
        "--calib_size",
        "5000",
    ]
    command = [sys.executable, SCRIPT, *arguments, "--device", "cpu", "--qformat", "fp8"]
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if line.startswith("calibrating: batch 3 of 5000, "):
                    break
            assert process.poll() is None, "it ended before it was interrupted"
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert f"terminated; {tmp_path / 'out'} is as" in errors or f"interrupted; {tmp_path / 'out'} is as" in errors
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["many"]


def test_the_toolchains_own_tensorrt_llm_is_not_asked(source, tmp_path):
    """It is importable in every command of the toolchain, has no model classes, and greets whoever imports it."""
    python = SCRIPT.parents[2] / "python"
    path = os.pathsep.join([str(python), os.environ.get("PYTHONPATH", "")])
    arguments = ["--model_dir", source, "--output_dir", tmp_path / "out", "--device", "cpu"]
    done = subprocess.run(
        list(map(str, [sys.executable, SCRIPT, *arguments])),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.count("TensorRT-LLM version") == 1 and "tensorrt_llm" not in done.stderr


def test_killed_runs_leave_a_hidden_folder_that_the_next_run_removes(source, data, tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    import socket

    rest = tmp_path / f".out.converting-{socket.gethostname()}-{dead.pid}"
    rest.mkdir()
    (rest / "rank0.safetensors").write_bytes(b"half")
    _, said = run(source, tmp_path / "out", data)
    assert "interrupted" in said and not rest.exists()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization"]["quant_algo"] == "FP8"
