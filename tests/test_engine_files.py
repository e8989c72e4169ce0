"""Engine folders: what is refused when an engine is built or loaded, and that nothing half-written stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engines import quiet
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import edit_config
from trtllm_workshop.artifacts import describe
from trtllm_workshop.checkpoint import WrongFolderKind, classify
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.build_output import BuildError
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.engine import EngineError, load_engine
from trtllm_workshop.reference.leftovers import alive

SMALL = BuildConfig(max_batch_size=2, max_seq_len=32)


@pytest.fixture
def checkpoint(engines, tmp_path):
    """A copy of a checkpoint that a test may damage."""
    return shutil.copytree(engines.checkpoint(), tmp_path / "checkpoint")


@pytest.fixture
def engine(engines, tmp_path):
    """A copy of an engine that a test may damage."""
    return shutil.copytree(engines.engine(), tmp_path / "engine")


def listing(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def build(checkpoint, output, config=SMALL, log=quiet):
    return build_engine(checkpoint, config, output, log=log)


def refused(checkpoint, output, *parts, error=(BuildError, ValueError), config=SMALL):
    """Builds, expects an error with all the parts in it, and that everything around is as before."""
    before = listing(output.parent)
    with pytest.raises(error) as caught:
        build(checkpoint, output, config)
    assert all(part in str(caught.value) for part in parts), str(caught.value)
    assert listing(output.parent) == before


# Building from a checkpoint that is not right -------------------------------------------------------------------------


def test_a_missing_truncated_or_pointer_rank_file(checkpoint, tmp_path):
    rank = checkpoint / "rank0.safetensors"
    whole = rank.read_bytes()
    rank.write_bytes(whole[:-1000])
    refused(checkpoint, tmp_path / "out", "rank0.safetensors is truncated", "1000 are missing")
    rank.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 123456\n")
    refused(checkpoint, tmp_path / "out", "Git LFS pointer", "123456 bytes")
    rank.write_bytes(b"")
    refused(checkpoint, tmp_path / "out", "rank0.safetensors", "0 bytes")
    rank.unlink()
    refused(checkpoint, tmp_path / "out", "rank0.safetensors does not exist")


def test_an_unknown_architecture(checkpoint, tmp_path):
    edit_config(checkpoint, architecture="PhiForCausalLM")
    refused(checkpoint, tmp_path / "out", "PhiForCausalLM", "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM")


def test_P39_tensors_that_are_missing_are_summarised(checkpoint, tmp_path):
    rank = checkpoint / "rank0.safetensors"
    save_file({name: tensor for name, tensor in load_file(rank).items() if "mlp.gate" not in name}, rank)
    refused(
        checkpoint, tmp_path / "out", "Required but not provided", "transformer.layers.*.mlp.gate.weight", "x 3 layers"
    )


def test_config_and_weights_that_disagree(checkpoint, tmp_path):
    edit_config(checkpoint, intermediate_size=96)
    refused(checkpoint, tmp_path / "out", "mlp.", "invalid shape", "96", "convert the model again")
    edit_config(checkpoint, intermediate_size=160, dtype="float16")
    refused(checkpoint, tmp_path / "out", "is float32", "says dtype float16", "convert the model again")


def test_a_mapping_that_is_not_that_of_the_files(checkpoint, tmp_path):
    mapping = json.loads((checkpoint / "config.json").read_text())["mapping"]

    def says(tp, pp):
        edit_config(checkpoint, mapping={**mapping, "world_size": tp * pp, "tp_size": tp, "pp_size": pp})

    says(2, 1)
    refused(checkpoint, tmp_path / "out", "rank1.safetensors does not exist", "tp_size 2 and pp_size 1", "again")
    shutil.copy(checkpoint / "rank0.safetensors", checkpoint / "rank1.safetensors")
    refused(checkpoint, tmp_path / "out", "attention.qkv.weight has invalid shape (128, 64)", "(64, 64)", "again")
    says(3, 1)
    refused(checkpoint, tmp_path / "out", "4 attention heads cannot be shared by 3 ranks", "Possible are 1, 2, 4")
    says(1, 4)
    refused(checkpoint, tmp_path / "out", "4 is more than the 3 layers")
    says(1, 1)
    refused(checkpoint, tmp_path / "out", "tp_size 1 and pp_size 1", "1 rank", "rank1.safetensors", "mixes two")
    edit_config(checkpoint, mapping={**mapping, "world_size": 3})
    refused(checkpoint, tmp_path / "out", "world_size 3 is not tp_size 1 * pp_size 1")


def test_quantized_weights_that_are_not_there(checkpoint, tmp_path):
    edit_config(checkpoint, quantization={"quant_algo": "FP8"})
    refused(checkpoint, tmp_path / "out", "Required but not provided tensors", "weights_scaling_factor")
    edit_config(checkpoint, quantization={"quant_algo": "W8A8_SQ_PER_CHANNEL_PLUGIN"})
    refused(checkpoint, tmp_path / "out", "quant_algo 'W8A8_SQ_PER_CHANNEL_PLUGIN'", "FP8, W8A16, W4A16, W4A16_AWQ")


def test_P66_a_folder_of_another_kind(engines, tmp_path):
    refused(engines.hf(), tmp_path / "out", "Hugging Face", "run conversion first", error=WrongFolderKind)
    refused(engines.engine(), tmp_path / "out", "built already", error=WrongFolderKind)
    refused(tmp_path / "nowhere", tmp_path / "out", "not there", "convert_checkpoint.py", error=WrongFolderKind)


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({"max_batch_size": 0}, ("max_batch_size=0", "at least 1")),
        ({"max_beam_width": 4}, ("max_beam_width=4", "no beam search")),
        ({"kv_cache_type": "continuous"}, ("kv_cache_type='continuous'", "always paged")),
        ({"max_batchsize": 4}, ("max_batchsize", "did you mean 'max_batch_size'")),
        ({"max_seq_len": "long"}, ("max_seq_len='long'", "integer")),
        ({"use_refit": True}, ("use_refit=True", "does not implement")),
    ],
)
def test_limits_out_of_range_are_refused_in_one_line(limits, parts):
    with pytest.raises(ValueError) as caught:
        BuildConfig(**limits)
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_a_sliding_window_is_not_ignored(checkpoint, tmp_path):
    edit_config(checkpoint, sliding_window=16)
    refused(checkpoint, tmp_path / "out", "max_seq_len 32", "sliding window (16)", "--max_seq_len 16")


# Output ---------------------------------------------------------------------------------------------------------------


def test_P54_a_build_leaves_both_files_and_nothing_else(engines, tmp_path):
    build(engines.checkpoint(), tmp_path / "new" / "engine")
    assert listing(tmp_path) == ["new", "new/engine", "new/engine/config.json", "new/engine/rank0.engine"]
    entry = describe(tmp_path / "new" / "engine", tmp_path, "engine")
    assert entry["problem"] == "" and entry["bytes"] > 100_000
    (tmp_path / "new" / "engine" / "rank0.engine").write_bytes(b"")
    with pytest.raises(EngineError, match="not a complete engine"):
        load_engine(tmp_path / "new" / "engine")


def test_folders_of_others_are_not_touched(engines, tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "thesis.txt").write_text("years of work")
    refused(engines.checkpoint(), notes, str(notes), "already holds something else")
    refused(engines.checkpoint(), engines.hf(), "already holds something else (hf)")
    (tmp_path / "file").write_text("text")
    refused(engines.checkpoint(), tmp_path / "file", "already holds something else")


def test_an_older_engine_is_replaced_and_other_files_in_it_stay(engines, engine):
    (engine / "thesis.txt").write_text("years of work")
    build(engines.checkpoint(), engine)
    assert listing(engine) == ["config.json", "rank0.engine", "thesis.txt"]
    assert load_engine(engine).build_config["max_seq_len"] == 32


def test_a_failed_build_leaves_the_older_engine(engines, engine, monkeypatch):
    before = {path.name: path.read_bytes() for path in engine.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        refused(engines.checkpoint(), engine, str(engine), "is full", "MB")
    assert {path.name: path.read_bytes() for path in engine.iterdir()} == before


def test_a_network_picture_beside_the_engine(engines, tmp_path):
    config = SMALL.model_copy(update={"visualize_network": str(tmp_path / "out")})
    for _ in range(2):
        build(engines.checkpoint(), tmp_path / "out", config)
        assert listing(tmp_path / "out") == ["config.json", "rank0.engine", "rank0.onnx"]


def test_a_dry_run_writes_nothing(engines, tmp_path):
    build(engines.checkpoint(), tmp_path / "out", SMALL.model_copy(update={"dry_run": True}))
    assert listing(tmp_path) == []


# A full disk and a killed build, in real processes --------------------------------------------------------------------


def child(code, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, env=environment, check=False)


BUILD = "from trtllm_workshop.reference.trtllm_build import main; import sys; sys.exit(main(sys.argv[1:]))"
FLAGS = ("--max_batch_size", 2, "--max_seq_len", 32)


def test_a_full_disk_is_refused_before_writing(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 10**6 - 1000, 1000))
    refused(engines.checkpoint(), tmp_path / "deep" / "out", "the engine needs", "MB", str(tmp_path), "0.0 MB free")


def test_a_disk_that_is_full_while_writing(engines, tmp_path):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000)); "
    done = child(limit + BUILD, "--checkpoint_dir", engines.checkpoint(), "--output_dir", tmp_path / "out", *FLAGS)
    assert done.returncode == 1, done.stderr
    assert f"the disk of {tmp_path} is full" in done.stderr and "another --output_dir" in done.stderr
    assert "Traceback" not in done.stderr and listing(tmp_path) == []


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="a small file system needs root")
def test_a_real_file_system_that_is_full(engines, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this container may not mount")
    try:
        refused(engines.checkpoint(), place / "out", "MB free", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)


# Kills itself between the two files, which is where most has been written and nothing is in place.
KILL = """
import os, signal
from pathlib import Path
plain = Path.write_text
def killed(self, *rest, **more):
    if self.name == "config.json":
        os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *rest, **more)
Path.write_text = killed
"""


def test_a_build_killed_half_way_can_be_run_again(engines, tmp_path):
    arguments = ("--checkpoint_dir", engines.checkpoint(), "--output_dir", tmp_path / "out", *FLAGS)
    done = child(KILL + BUILD, *arguments)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists(), "a half-written engine has not got the name of an engine"
    (left,) = listing(tmp_path)[:1]
    assert left.startswith(".out.building-") and classify(tmp_path / left) == "engine"
    host, gone = socket.gethostname(), int(left.rpartition("-")[2])
    others = {
        f".out.building-elsewhere-{gone}": "another host may be at work",
        f".out.building-{host}-{os.getppid()}": "that process lives",
        f".out.building-{host}-notes": "no name that a build gives",
        f".output.building-{host}-{gone}": "the leftovers of another output",
    }
    for name in others:
        (tmp_path / name).mkdir()
    own = tmp_path / f".out.building-{host}-{gone - 1 if not alive(gone - 1) else gone + 1}"
    own.mkdir()
    (own / "thesis.txt").write_text("years of work")
    lines = []
    build(engines.checkpoint(), tmp_path / "out", log=lines.append)
    assert any(f"removed {tmp_path / left}" in line for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, own.name, "out"])
    assert (own / "thesis.txt").exists() and load_engine(tmp_path / "out")


def test_a_terminated_build_cleans_up(engines, tmp_path):
    slow = KILL.replace(
        "os.kill(os.getpid(), signal.SIGKILL)", "print('writing', flush=True); import time; time.sleep(60)"
    )
    arguments = ("--checkpoint_dir", engines.checkpoint(), "--output_dir", tmp_path / "out", *FLAGS)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", slow + BUILD, *map(str, arguments)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert any("writing" in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    assert listing(tmp_path) == []


# Loading --------------------------------------------------------------------------------------------------------------


def change_fingerprint(engine: Path, **changes):
    path = engine / "rank0.engine"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    mark = {**json.loads(metadata["fingerprint"]), **changes}
    save_file(load_file(path), path, metadata={**metadata, "fingerprint": json.dumps(mark)})


def load_refused(engine, *parts, error=EngineError):
    with pytest.raises(error) as caught:
        load_engine(engine)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_P59_an_engine_of_another_version(engine):
    change_fingerprint(engine, toolchain="1.3.0")
    load_refused(
        engine, "Version tag does not match", "Current Version: 1.2.1+reference", "Engine Version: 1.3.0", "again"
    )
    change_fingerprint(engine, toolchain="1.2.1+reference", torch="1.0.0")
    load_refused(engine, "Version tag does not match", "torch 1.0.0", f"torch {torch.__version__.split('+')[0]}")


def test_P59_the_version_in_config_json(engine):
    edit_config(engine, version="0.9.0")
    load_refused(engine, "Version tag does not match", "Serialized Engine Version: 0.9.0", "config.json")


def test_P61_an_engine_of_another_device(engine):
    here = "9.0" if torch.cuda.is_available() else "cpu-"
    change_fingerprint(engine, compute="8.9")
    load_refused(engine, "expecting compute " + here, "got compute 8.9, please rebuild", "trtllm-build")


def test_an_engine_of_another_world_size(engine):
    change_fingerprint(engine, world_size=2)
    load_refused(engine, "Engine world size (2) != Runtime world size (1)", "mpirun -n 2", "--tp_size 1")


def test_engine_and_config_that_do_not_belong_together(engines, engine):
    text = (engine / "config.json").read_text()
    config = json.loads(text)
    edit_config(engine, build_config={**config["build_config"], "max_seq_len": 4096})
    load_refused(engine, "do not belong together", "trtllm-build again")
    edit_config(engine, pretrained_config={**config["pretrained_config"], "dtype": "float16"})
    load_refused(engine, "built for float32", "says float16", "do not belong together")
    (engine / "config.json").write_text(text)
    assert load_engine(engine).build_config["max_seq_len"] == 160


def test_damaged_engine_files(engine):
    path = engine / "rank0.engine"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5000])
    load_refused(engine, str(path), "not a complete engine", "trtllm-build again")
    path.write_bytes(b"not an engine at all")
    load_refused(engine, str(path), "not a complete engine", "TensorRT-LLM")
    path.write_bytes(whole)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file({**tensors, "graph": torch.zeros_like(tensors["graph"])}, path, metadata=metadata)
    load_refused(engine, str(path), "is damaged", "trtllm-build again")
    save_file({n: t for n, t in tensors.items() if "ln_f" not in n}, path, metadata=metadata)
    load_refused(engine, str(path), "is damaged", "trtllm-build again")
    save_file(tensors, path, metadata={**metadata, "fingerprint": "[]"})
    load_refused(engine, str(path), "not a complete engine")
    path.unlink()
    load_refused(engine, "is missing" if classify(engine) == "engine" else "engine", "trtllm-build")


def test_an_engine_folder_without_its_config(engine):
    (engine / "config.json").unlink()
    load_refused(engine, "config.json does not exist", error=WrongFolderKind)
    (engine / "config.json").write_text('{"architecture": "LlamaForCausalLM"}')
    load_refused(engine, "config.json is not an engine's", "build_config")


def test_P66_a_checkpoint_or_model_folder_as_engine(engines, tmp_path):
    load_refused(
        engines.checkpoint(), "a TensorRT-LLM checkpoint", "build it first: trtllm-build", error=WrongFolderKind
    )
    load_refused(engines.hf(), "a Hugging Face model folder", "run conversion first", error=WrongFolderKind)
    load_refused(tmp_path, "an empty folder", "make it with trtllm-build", error=WrongFolderKind)


def test_the_file_may_be_replaced_while_its_engine_is_in_use(engines, engine):
    from trtllm_workshop.reference.llm import LLM

    llm = LLM(engine, skip_tokenizer_init=True)
    before = llm.generate([5, 6, 7]).outputs[0].token_ids
    (engine / "rank0.engine").write_bytes(b"")
    assert llm.generate([5, 6, 7]).outputs[0].token_ids == before
