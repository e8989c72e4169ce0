"""convert_checkpoint.py as a command: an output folder appears whole or not at all, and flags are refused by name."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections import namedtuple
from pathlib import Path

import pytest
import trtllm_workshop.reference
from test_convert import convert
from test_convert_bad_input import refused
from tiny_models import tiny_model
from trtllm_workshop.checkpoint import verify_checkpoint
from trtllm_workshop.reference import convert_cli
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.convert_source import ConversionError

EXAMPLES = Path(trtllm_workshop.reference.__file__).parent / "examples" / "models" / "core"


@pytest.fixture
def source(tmp_path):
    return tiny_model(tmp_path / "hf", "llama-gqa", max_shard_size="300KB")


def test_full_disk_is_refused_before_writing(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 1000, 1000))
    refused(source, tmp_path / "out", "not enough disk space", str(tmp_path), "0.00 GB are free")


def test_error_while_writing_leaves_the_old_checkpoint(source, tmp_path, monkeypatch):
    import errno

    target = convert(source, tmp_path / "out").folder
    before = {path.name: path.read_bytes() for path in target.iterdir()}

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(
            ConversionError, match=rf"disk of {re.escape(str(tmp_path))} is full \(No space.* needs .* GB"
        ):
            convert(source, target, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]
    assert convert(source, target, tp=2, dtype="bfloat16").config["dtype"] == "bfloat16"
    assert sorted(path.name for path in target.iterdir()) == ["config.json", "rank0.safetensors", "rank1.safetensors"]


def test_a_disk_that_is_full_while_writing(source, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    run = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    arguments = command("llama", "--model_dir", source, "--output_dir", tmp_path / "out")[1:]
    done = subprocess.run([sys.executable, "-c", limit + run, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert f"the disk of {tmp_path} is full" in done.stderr and f"{tmp_path / 'out'} needs 0.000" in done.stderr
    assert "Traceback" not in done.stderr and os.listdir(tmp_path) == ["hf"]


def test_output_folders_that_are_not_overwritten(source, tmp_path):
    refused(source, source, "--output_dir", "Hugging Face model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.txt").write_text("years of work")
    refused(source, tmp_path / "notes", "already holds files, which are not overwritten", "empty this one")
    target = convert(source, tmp_path / "out").folder
    (target / "thesis.txt").write_text("years of work")
    refused(source, target, "thesis.txt", "did not make")
    assert (target / "thesis.txt").read_text() == "years of work"


def test_links_to_the_output_folder_stay(source, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    convert(source, tmp_path / "link")
    convert(source, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and verify_checkpoint(tmp_path / "disk") == []


def command(family, *flags):
    return [sys.executable, str(EXAMPLES / family / "convert_checkpoint.py"), *map(str, flags)]


def test_killed_half_way_and_run_again(tmp_path):
    source = tiny_model(tmp_path / "hf", "llama-gqa", num_hidden_layers=60, hidden_size=512)
    arguments = command("llama", "--model_dir", source, "--output_dir", tmp_path / "out")
    work = re.compile(r"\.out\.converting-.*")

    def leftovers():
        return [path for path in tmp_path.iterdir() if work.fullmatch(path.name)]

    for number in (signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not any(path.stat().st_size for f in leftovers() for path in f.iterdir()):
            time.sleep(0.001)
        process.send_signal(number)
        process.wait()
        if process.returncode == 0:
            pytest.skip("the conversion was faster than the signal")
        assert not (tmp_path / "out").exists()
        assert bool(leftovers()) == (number == signal.SIGKILL)
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "the rest of an interrupted conversion" in done.stdout
    assert not leftovers() and verify_checkpoint(tmp_path / "out") == []


def test_a_checkpoint_moved_aside_by_a_killed_conversion_is_put_back(source, tmp_path):
    import socket

    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    convert(source, tmp_path / "out").folder.rename(tmp_path / f".out.replaced-{socket.gethostname()}-{dead.pid}")
    lines = []
    with pytest.raises(ValueError, match="--pp_size"):
        convert_checkpoint(source, tmp_path / "out", sharding=Sharding(pp_size=9), say=lines.append)
    convert_checkpoint(source, tmp_path / "out", say=lines.append)
    assert any("put back" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_the_command_says_what_it_is_and_what_it_did(source, tmp_path):
    done = subprocess.run(
        command("llama", "--model_dir", source, "--output_dir", tmp_path / "out", "--dtype", "bfloat16"),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert "1.2.1+reference" in lines[0] and "Total time of converting checkpoints: 00:00:" in lines[-1]
    assert verify_checkpoint(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--use_nvfp4"],
            "--use_nvfp4 is an official flag that the reference toolchain does not implement",
        ),
        (["--smoothquant", "0.5"], "--smoothquant 0.5 is an official flag"),
        (["--tp_sizes", "2"], "--tp_size"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--log_level", "loud"], "--log_level loud"),
    ],
)
def test_flags_are_refused_by_name(source, tmp_path, capsys, flags, said):
    arguments = ["--model_dir", str(source), "--output_dir", str(tmp_path / "out"), *flags]
    try:
        code = convert_cli.main(convert_cli.LLAMA, arguments)
    except SystemExit as stop:
        code = stop.code
    assert code != 0 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_script_of_the_other_family_is_named(source, tmp_path, capsys):
    assert convert_cli.main(convert_cli.QWEN, ["--model_dir", str(source), "--output_dir", str(tmp_path / "out")]) == 1
    assert "LlamaForCausalLM: convert it with examples/models/core/llama" in capsys.readouterr().err
    qwen = tiny_model(tmp_path / "qwen", "qwen2")
    assert convert_cli.main(convert_cli.QWEN, ["--model_dir", str(qwen), "--output_dir", str(tmp_path / "out")]) == 0
    assert convert_cli.main(convert_cli.LLAMA, ["--output_dir", str(tmp_path / "out")]) == 1
    assert "--model_dir is missing" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_does_not_grow_with_the_model(tmp_path, dtype):
    source = tiny_model(tmp_path / "hf", "llama-gqa", num_hidden_layers=6, hidden_size=512, intermediate_size=4096)
    size = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    tracemalloc.start()
    try:
        convert(source, tmp_path / "out", tp=2, dtype=dtype)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    threads = min(4, os.cpu_count() or 1)
    assert size > 150e6 and peak < threads * 12e6 + 10e6, f"{peak / 1e6:.0f} MB for {size / 1e6:.0f} MB"
