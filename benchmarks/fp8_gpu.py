"""How much faster is the context phase in FP8 than in bfloat16 on this GPU?

Random weights of a model's shape, a checkpoint in each precision, trtllm-build and load_engine of the reference toolchain;
then one step of 8 requests with 1,000 prompt tokens each, all engines in one run. FP8's activation scales come from the
bfloat16 engine's own activations on the same prompts. `plain` is the graph as it was built, `fused` the one that
`reference/cuda_kernels.py` makes of it, which gets the same fusions in both precisions. Logits of all engines are compared,
so that nothing fast and wrong is reported.

Two ways to time, both medians over the repeats. `milliseconds`: one engine for a while, then the next, in several rounds, the
first half second of each uncounted; so a server runs. `alternating_milliseconds`: another engine at every step. There a step
runs at the clocks that the one before it left: a GPU at its power limit is slowed by bfloat16 products more than by anything
else, and an engine that follows a light step looks faster than it can stay.

    python benchmarks/fp8_gpu.py [--shapes llama-3-8b tinyllama] [--repeats 20] [--work FOLDER] [--record FILE]
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import SHAPES, Amax, checkpoint_config, write_checkpoint
from torch.fx import GraphModule, Interpreter, Node
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.cuda_kernels import optimize
from trtllm_workshop.reference.engine import GRAPH, Engine, bind, default_device, load_engine
from trtllm_workshop.reference.version import VERSION

PRECISIONS, GRAPHS = ("bf16", "fp8"), ("plain", "fused")
ROUNDS, SETTLE_S = 4, 0.5
Inputs = tuple[torch.Tensor, ...]
Runs = dict[tuple[str, str], Callable[[], torch.Tensor]]
Times = dict[tuple[str, str], list[float]]


@dataclass
class Side:
    """A loaded engine of one precision: the graph as built and rewritten, over the same weights."""

    engine: Engine
    plain: GraphModule
    fused: GraphModule
    checkpoint_bytes: int
    engine_bytes: int
    build_s: float
    load_s: float


def make_side(
    root: Path, config: dict[str, Any], seed: int, device: torch.device, amax: Amax, batch: int, prompt: int
) -> Side:
    """Checkpoint, engine folder, loaded engine; the folders are deleted again, for they are large."""
    from safetensors import safe_open

    checkpoint, folder = root / "checkpoint", root / "engine"
    write_checkpoint(checkpoint, config, seed, device, amax)
    limits = BuildConfig(max_batch_size=batch, max_seq_len=prompt + 24, max_num_tokens=max(8192, batch * prompt))
    started = time.perf_counter()
    build_engine(checkpoint, limits, folder, log=lambda *_: None)
    built = time.perf_counter()
    size = (checkpoint / "rank0.safetensors").stat().st_size
    shutil.rmtree(checkpoint)
    engine = load_engine(folder, device)
    loaded = time.perf_counter()
    file = folder / "rank0.engine"
    with safe_open(file, framework="pt") as tensors:
        program = torch.export.load(io.BytesIO(tensors.get_tensor(GRAPH).numpy().tobytes()))
        if device.type == "cuda" and isinstance(engine.run, GraphModule):  # a processor's has its weights packed
            weights = dict(engine.run.state_dict())
        else:
            weights = {name: tensors.get_tensor(name) for name in tensors.keys() if name != GRAPH}  # noqa: SIM118
    plain, fused = bind(program, weights), optimize(bind(program, dict(weights)))
    side = Side(engine, plain, fused, size, file.stat().st_size, built - started, loaded - built)
    shutil.rmtree(folder)
    return side


def context_step(side: Side, batch: int, prompt: int, seed: int) -> Inputs:
    """The packed inputs of one context step, as the executor makes them, with a KV-cache pool of their own."""
    config, device = side.engine.pretrained_config, side.engine.device
    per_block = side.engine.build_config["plugin_config"]["tokens_per_block"]
    blocks = -(-prompt // per_block)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, config["vocab_size"], (batch * prompt,), generator=generator)
    table = torch.arange(batch * blocks).view(batch, blocks)
    within = torch.arange(prompt)
    slots = table[:, within // per_block] * per_block + within % per_block
    shape = (config["num_hidden_layers"], batch * blocks, per_block, 2, config["num_key_value_heads"])
    pool = torch.zeros(*shape, config["head_size"], dtype=side.engine.kv_cache_dtype, device=device)
    last, lengths = torch.arange(1, batch + 1) * prompt - 1, torch.full((batch,), prompt)
    on_device = [t.to(device) for t in (ids, within.repeat(batch), last, slots.flatten(), table, lengths)]
    host = [t.to(torch.int32) for t in (torch.zeros(batch), lengths, lengths)]
    return (*on_device[:3], pool, *on_device[3:], *host)


class _Amax(Interpreter):
    """Runs a graph and keeps the largest magnitude of every linear layer's input."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: Amax = {}

    def run_node(self, n: Node) -> Any:
        if n.target is torch.ops.aten.linear.default:
            x = self.env[n.args[0]]  # type: ignore[index]
            self.found[str(n.args[1].target).removesuffix(".weight")] = float(x.abs().amax())  # type: ignore[union-attr]
        return super().run_node(n)


def milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """One run: between two events on the device's own clock, or by the wall clock on a processor."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def time_alternating(runs: Runs, repeats: int, device: torch.device) -> Times:
    """Milliseconds of each run's steps, another run at every step."""
    times: Times = {key: [] for key in runs}
    for _ in range(repeats):
        for key, run in runs.items():
            times[key].append(milliseconds(run, device))
    return times


def time_settled(runs: Runs, repeats: int, device: torch.device) -> Times:
    """Milliseconds of each run's steps, in blocks that begin when the device's clocks have settled for this run."""
    times: Times = {key: [] for key in runs}
    for number in range(min(ROUNDS, repeats)):
        for key, run in runs.items():
            started = time.perf_counter()
            while time.perf_counter() - started < SETTLE_S:
                milliseconds(run, device)
            steps = repeats // ROUNDS + (number < repeats % ROUNDS)
            times[key] += [milliseconds(run, device) for _ in range(steps)]
    return times


def kernel_shares(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Milliseconds on the device by kind of kernel, from one profiled step; empty where it cannot be profiled."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    found = {"matrix_products": 0.0, "attention": 0.0, "other": 0.0}
    for event in profiler.key_averages():
        name, spent = event.key.lower(), event.self_device_time_total / 1e3
        if any(part in name for part in ("flash", "sdpa", "fmha")):
            found["attention"] += spent
        elif any(part in name for part in ("gemm", "nvjet", "cutlass", "xmma", "splitk")):
            found["matrix_products"] += spent
        else:
            found["other"] += spent
    return {kind: round(spent, 3) for kind, spent in found.items()} if sum(found.values()) else {}


def linear_operations(config: dict[str, Any], tokens: int, rows: int) -> float:
    """Additions and multiplications of the linear layers for so many tokens, and of the head for its rows."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    layer = hidden * (2 * heads + 2 * kv_heads) * size + 3 * hidden * inner
    return 2.0 * (tokens * config["num_hidden_layers"] * layer + rows * hidden * config["vocab_size"])


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """‖a - b‖ / ‖b‖."""
    return float((a.float() - b.float()).norm() / b.float().norm())


@torch.inference_mode()
def measure(shape: str, args: argparse.Namespace, root: Path, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per precision and graph of a shape."""
    batch, prompt = args.batch, args.prompt_tokens
    sides: dict[str, Side] = {}
    inputs: dict[str, Inputs] = {}
    amax: Amax = {}
    for precision in PRECISIONS:
        config = checkpoint_config(shape, args.layers, precision)
        sides[precision] = make_side(root / precision, config, args.seed, device, amax, batch, prompt)
        inputs[precision] = context_step(sides[precision], batch, prompt, args.seed)
        if not amax:
            finder = _Amax(sides[precision].plain)
            finder.run(*inputs[precision])
            amax = finder.found
    runs: Runs = {
        (precision, graph): functools.partial(getattr(sides[precision], graph), *inputs[precision])
        for graph in GRAPHS
        for precision in PRECISIONS
    }
    logits = {key: run() for key, run in runs.items()}
    if not all(bool(values.isfinite().all()) for values in logits.values()):
        raise SystemExit(f"{shape}: logits are not finite; nothing is measured")
    for _ in range(args.warm_up):
        for run in runs.values():
            run()
    times, mixed = (way(runs, args.repeats, device) for way in (time_settled, time_alternating))
    median, mixed_median = ({key: statistics.median(t) for key, t in found.items()} for found in (times, mixed))
    for (precision, graph), run in runs.items():
        side, spent, tokens = sides[precision], median[precision, graph], batch * prompt
        operations = linear_operations(side.engine.pretrained_config, tokens, batch)
        yield {
            "shape": shape,
            "layers": side.engine.pretrained_config["num_hidden_layers"],
            "precision": precision,
            "graph": graph,
            "batch": batch,
            "prompt_tokens": prompt,
            "tokens": tokens,
            "milliseconds": round(spent, 3),
            "milliseconds_all": [round(value, 3) for value in times[precision, graph]],
            "tokens_per_second": round(tokens / spent * 1e3),
            "ratio": round(median["bf16", graph] / spent, 3),
            "alternating_milliseconds": round(mixed_median[precision, graph], 3),
            "alternating_milliseconds_all": [round(value, 3) for value in mixed[precision, graph]],
            "alternating_ratio": round(mixed_median["bf16", graph] / mixed_median[precision, graph], 3),
            "linear_tflops": round(operations / spent / 1e9, 1),
            "milliseconds_by_kind": kernel_shares(run, device),
            "logits_distance_to_plain": round(distance(logits[precision, graph], logits[precision, "plain"]), 5),
            "logits_distance_to_bf16": round(distance(logits[precision, graph], logits["bf16", graph]), 5),
            "checkpoint_bytes": side.checkpoint_bytes,
            "engine_bytes": side.engine_bytes,
            "build_seconds": round(side.build_s, 1),
            "load_seconds": round(side.load_s, 1),
        }


def print_table(rows: list[dict[str, Any]]) -> None:
    heads = (
        "shape",
        "precision",
        "graph",
        "ms",
        "tokens/s",
        "ratio",
        "alternating",
        "TFLOP/s",
        "products",
        "engine GB",
    )
    print(("{:<11} {:<9} {:<6}" + " {:>9}" * 3 + " {:>11}" + " {:>9}" * 3).format(*heads))
    for row in rows:
        kinds = row["milliseconds_by_kind"]
        share = f"{kinds['matrix_products'] / sum(kinds.values()):.0%}" if kinds else "-"
        print(
            f"{row['shape']:<11} {row['precision']:<9} {row['graph']:<6} {row['milliseconds']:>9.2f} "
            f"{row['tokens_per_second']:>9} {row['ratio']:>9.2f} {row['alternating_ratio']:>11.2f} {row['linear_tflops']:>9.0f} {share:>9} "
            f"{row['engine_bytes'] / 1e9:>9.2f}"
        )


def surroundings(device: torch.device) -> tuple[dict[str, Any], dict[str, str]]:
    """The machine and the versions, for the record."""
    machine: dict[str, Any] = {"processor": platform.processor() or platform.machine()}
    versions = {"python": platform.python_version(), "torch": torch.__version__, "toolchain": VERSION}
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        machine |= {"gpu": facts.name, "gpu_memory_mib": facts.total_memory >> 20}
        machine["compute_capability"] = f"{facts.major}.{facts.minor}"
        try:
            import triton

            versions["triton"] = triton.__version__
        except ImportError:
            versions["triton"] = "none: plain operators"
    return machine, versions


def git_revision() -> str:
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["llama-3-8b", "tinyllama"])
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--batch", type=int, default=8, help="requests in the step")
    parser.add_argument("--prompt-tokens", type=int, default=1000)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where checkpoints and engines lie for a while (up to 45 GB)")
    parser.add_argument("--record", type=Path, help="write the result here as well")
    parser.add_argument("--commit", default=git_revision(), help="recorded; by default what git says")
    args = parser.parse_args(arguments)
    device = default_device()
    if device.type != "cuda" and args.shapes != ["smoke"]:
        print(
            "no CUDA device: FP8 matrix products need one of compute capability 8.9 or later (--shapes smoke tries the script)"
        )
        return 2
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(dir=args.work) as scratch:
            rows += measure(shape, args, Path(scratch), device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print_table(rows)
    machine, versions = surroundings(device)
    record = {
        "what": "context phase of the reference engine in FP8 and bfloat16, random weights",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": args.commit,
        "command": "python benchmarks/fp8_gpu.py " + " ".join(arguments or sys.argv[1:]),
        "seed": args.seed,
        "warm_up": args.warm_up,
        "repeats": args.repeats,
        "rounds": ROUNDS,
        "settle_seconds": SETTLE_S,
        "machine": machine,
        "versions": versions,
        "rows": rows,
    }
    if args.record:
        args.record.write_text(json.dumps(record, indent=2) + "\n")
    ratios = {f"{row['shape']}_{row['graph']}": row["ratio"] for row in rows if row["precision"] == "fp8"}
    mixed = {f"{row['shape']}_{row['graph']}": row["alternating_ratio"] for row in rows if row["precision"] == "fp8"}
    print(
        json.dumps(
            {"ratios": ratios, "alternating_ratios": mixed, "machine": machine, "versions": versions, "seed": args.seed}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
