"""How fast and how lean is the conversion, against a plain copy of the same bytes?

A random Llama checkpoint is written once (kept out of the timing and in the page cache). Then, alternating in one run,
its weight files are copied with shutil and synced, and convert_checkpoint.py converts it in a process of its own, start
of the interpreter included and synced as well. The last line is one JSON object:

    throughput_ratio_to_copy   median copy seconds / median conversion seconds, same type in and out
    peak_anon_mb               peak anonymous memory (RssAnon) of the conversion over an idle interpreter's

The same figures with `_cast` are for float32 source and float16 checkpoint, per byte of source.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import trtllm_workshop.reference
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_plan import source_tensors
from trtllm_workshop.safetensors_file import ITEM_SIZE, write_header

SCRIPT = Path(trtllm_workshop.reference.__file__).parent / "examples/models/core/llama/convert_checkpoint.py"
SHARD_BYTES = 1 << 30
GOALS = {"throughput_ratio_to_copy": 0.5, "peak_anon_mb": 300}


def make_model(folder: Path, megabytes: int, dtype: str) -> ModelSpec:
    """A Llama of TinyLlama's shape with as many layers as fill `megabytes`, in shards of at most 1 GB."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "torch_dtype": dtype,
    }
    one, two = (
        ModelSpec.from_hf({**config, "num_hidden_layers": layers}).parameter_count() * ITEM_SIZE[dtype]
        for layers in (1, 2)
    )
    config["num_hidden_layers"] = max(1, round((megabytes * 1e6 - one) / (two - one)) + 1)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_hf(folder)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    size = 0
    for name, shape in source_tensors(spec).items():
        nbytes = ITEM_SIZE[dtype] * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        if size + nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, shape))
        size += nbytes
    weight_map = {}
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map.update({name: file for name, _ in tensors})
        _write_random(folder / file, tensors, dtype, seed=number)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return spec


def _write_random(path: Path, tensors: list[tuple[str, tuple[int, ...]]], dtype: str, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with path.open("wb+") as file:
        offsets = write_header(file.fileno(), [(name, dtype, shape) for name, shape in tensors])
        for name, shape in tensors:
            values = (torch.randn(shape, generator=generator) * 0.02).to(getattr(torch, dtype))
            os.pwrite(file.fileno(), memoryview(values.reshape(-1).view(torch.uint8).numpy()), offsets[name])
        os.fsync(file.fileno())


def copy_synced(source: Path, target: Path) -> float:
    """Seconds to copy the weight files one after the other, each synced."""
    target.mkdir()
    started = time.perf_counter()
    for file in sorted(source.glob("*.safetensors")):
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb+") as copied:
            os.fsync(copied.fileno())
    seconds = time.perf_counter() - started
    shutil.rmtree(target)
    return seconds


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process in bytes, 0 when it has gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("RssAnon")), 0)


def idle_interpreter_bytes() -> int:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(0.5)
        found = anonymous_bytes(process.pid)
        process.communicate(b"\n")
    return found


def convert(source: Path, target: Path, *flags: str) -> tuple[float, int]:
    """(seconds, peak RssAnon in bytes) of one conversion in its own process, sampled every 2 ms."""
    started = time.perf_counter()
    command = [sys.executable, str(SCRIPT), "--model_dir", str(source), "--output_dir", str(target), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, anonymous_bytes(process.pid))
        time.sleep(0.002)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"conversion failed with exit code {process.returncode}: {' '.join(command)}")
    shutil.rmtree(target)
    return seconds, peak


def measure(folder: Path, dtype: str, megabytes: int, repeats: int, idle: int, *flags: str) -> tuple[float, float]:
    """Prints one table and returns (copy seconds / conversion seconds, peak anonymous MB over an idle interpreter)."""
    source = folder / "model"
    spec = make_model(source, megabytes, dtype)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    for file in source.glob("*.safetensors"):  # warm the cache for both sides
        with file.open("rb") as stream:
            while stream.read(1 << 24):
                pass
    print(f"\n{spec.num_hidden_layers} layers, {size / 1e9:.2f} GB in {dtype} {' '.join(flags)}")
    print(f"{'round':>5} {'copy s':>8} {'convert s':>10} {'anon MB':>8}")
    copies, conversions, peaks = [], [], []
    for number in range(1, repeats + 1):
        copies.append(copy_synced(source, folder / "copy"))
        seconds, peak = convert(source, folder / "checkpoint", *flags)
        conversions.append(seconds)
        peaks.append((peak - idle) / 1e6)
        print(f"{number:>5} {copies[-1]:>8.2f} {seconds:>10.2f} {peaks[-1]:>8.0f}", flush=True)
    shutil.rmtree(source)
    return statistics.median(copies) / statistics.median(conversions), max(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size-mb", type=int, default=2000, help="size of the random checkpoint in 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=3, help="rounds of copy and conversion")
    parser.add_argument("--dir", default=None, help="folder to work in (default: the system's temporary folder)")
    options = parser.parse_args()
    idle = idle_interpreter_bytes()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="convert-benchmark-") as name:
        folder = Path(name)
        ratio, anon = measure(folder, "bfloat16", options.size_mb, options.repeats, idle)
        cast_ratio, cast_anon = measure(folder, "float32", options.size_mb, options.repeats, idle, "--dtype", "float16")
    figures = {
        "throughput_ratio_to_copy": round(ratio, 3),
        "peak_anon_mb": round(anon, 1),
        "throughput_ratio_to_copy_cast": round(cast_ratio, 3),
        "peak_anon_mb_cast": round(cast_anon, 1),
        "size_mb": options.size_mb,
        "idle_anon_mb": round(idle / 1e6, 1),
        "goals": GOALS,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
