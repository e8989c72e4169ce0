"""How close does the engine come to what this GPU allows, and how far is it from Hugging Face `generate`?

Random weights in the shapes of real models: they take the same time as trained ones. Phases, each with an engine of its own:

* `tinyllama`: bfloat16; generation steps at batch 1 and 64, both loads beside Hugging Face, 64 requests of 1,000 tokens in and out.
* `bf16`: Llama 3 8B in bfloat16; generation steps at batch 1 and 64.
* `headline`: Llama 3.1 8B, FP8 weights and FP8 KV cache; the same steps, then 1,000 tokens in and out, all requests queued at once,
  beside the figure that NVIDIA published for TensorRT-LLM on one H200.

The memory-bandwidth limit of a generation step is the time to read every weight that multiplies and every cached key and value
once, at the rate of a large copy measured in the same run. `share` is that limit over the measured time. Whole-engine loads go
through scheduler, model, sampling and detokenizer; time outside the model is wall time without the steps' time on the device.

    python benchmarks/engine_gpu.py [--only tinyllama,bf16,headline] [--record FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from fp8_gpu import git_revision, surroundings
from gpu_load import bandwidth, generation_steps, hugging_face, kernel_shares, random_llm, whole_engine

PHASES = ("tinyllama", "bf16", "headline")
# NVIDIA's TensorRT-LLM performance overview, version 0.17: Llama 3.1 8B FP8, one H200, 1,000 tokens in and out.
PUBLISHED = 17_538
GOALS = {
    "tinyllama_batch1_share": 0.40,
    "tinyllama_batch64_over_hugging_face": 12.0,
    "tinyllama_total_tokens_per_second": 30_000,
    "tinyllama_share_outside_the_model": 0.15,  # at most
    "bf16_batch1_share": 0.72,
    "bf16_batch64_share": 0.75,
    "fp8_over_bf16_batch1": 1.35,
    "fp8_over_bf16_batch64": 1.25,
    "headline_over_published": 0.7,
}
AT_MOST = ("tinyllama_share_outside_the_model",)


class Bench:
    """The phases; what they measured is in `rows`."""

    def __init__(self, args: argparse.Namespace, limit: float) -> None:
        self.args, self.limit = args, limit
        self.rows: list[dict[str, Any]] = []
        self.unprofiled: list[tuple[dict[str, Any], Callable[[], object]]] = []
        smoke = args.smoke
        self.long = (24, 16) if smoke else (1000, 1000)  # prompt and new tokens of the whole-engine loads
        self.short = (12, 6) if smoke else (128, 128)  # of those beside Hugging Face
        self.batches = (1, 4) if smoke else (1, 64)

    def llm(self, shape: str, precision: str, most: int, root: Path) -> Any:
        started = time.perf_counter()
        limits = {"max_batch_size": most, "max_seq_len": sum(self.long) + 48, "max_num_tokens": 8192}
        llm = random_llm(
            "smoke" if self.args.smoke else shape, self.args.layers, precision, limits, root, self.args.seed
        )
        print(f"{shape} {precision}: engine built and loaded in {time.perf_counter() - started:.1f} s", flush=True)
        return llm

    def add(self, shape: str, precision: str, what: str, row: dict[str, Any]) -> None:
        if "bytes" in row:
            row |= {"limit_milliseconds": round(row["bytes"] / self.limit * 1e3, 4)}
            row |= {"share": round(row["limit_milliseconds"] / row["milliseconds"], 4)}
        self.rows.append({"shape": shape, "precision": precision, "what": what, **row})
        print(json.dumps({key: value for key, value in self.rows[-1].items() if key != "milliseconds_all"}), flush=True)

    def step(self, llm: Any, shape: str, precision: str, batch: int, context: int, **more: int) -> None:
        row, run = generation_steps(llm, batch, context, **more)
        self.add(shape, precision, "generation step", row)
        self.unprofiled.append((self.rows[-1], run))

    def steps(self, llm: Any, shape: str, precision: str) -> None:
        for batch in self.batches:
            self.step(llm, shape, precision, batch, self.long[0])

    def profile(self) -> None:
        """The parts of every step that was timed; at a phase's end, see `kernel_shares`."""
        while self.unprofiled:
            row, run = self.unprofiled.pop()
            with torch.inference_mode():
                row["milliseconds_by_kind"] = kernel_shares(run)

    def hugging_face(self, shape: str) -> None:
        loads = [(batch, *self.short) for batch in self.batches]
        for row in hugging_face("smoke" if self.args.smoke else shape, self.args.layers, loads, self.args.seed):
            self.add(shape, "bf16", "Hugging Face generate", row)

    def tinyllama(self, root: Path) -> None:
        most = self.batches[-1]
        self.hugging_face("tinyllama")
        with self.llm("tinyllama", "bf16", most, root) as llm:
            self.steps(llm, "tinyllama", "bf16")
            for batch in self.batches:
                row = whole_engine(llm, batch, *self.short, self.args.seed)
                self.add("tinyllama", "bf16", "whole engine, beside Hugging Face", row)
            self.add("tinyllama", "bf16", "whole engine", whole_engine(llm, most, *self.long, self.args.seed))
            self.profile()

    def bf16(self, root: Path) -> None:
        with self.llm("llama-3-8b", "bf16", self.batches[-1], root) as llm:
            self.steps(llm, "llama-3-8b", "bf16")
            self.profile()

    def headline(self, root: Path) -> None:
        most = 8 if self.args.smoke else 1024
        with self.llm("llama-3-8b", "fp8-kv8", most, root) as llm:
            self.steps(llm, "llama-3-8b", "fp8-kv8")
            fits = llm._executor.kv_cache.num_blocks // llm._executor.kv_cache.blocks_for(sum(self.long))
            batch = min(fits, most)
            requests = self.args.requests or (12 if self.args.smoke else 2 * batch)
            self.step(llm, "llama-3-8b", "fp8-kv8", batch, sum(self.long) - self.long[1] // 2, rounds=3)
            self.add("llama-3-8b", "fp8-kv8", "whole engine", whole_engine(llm, requests, *self.long, self.args.seed))
            self.profile()


def figures(rows: list[dict[str, Any]], batches: tuple[int, int]) -> dict[str, float]:
    """The figures of GOALS that these rows give; batches: the small one and the large one."""
    found: dict[str, float | None] = {}
    few, many = batches

    def of(shape: str, precision: str, what: str, key: str, batch: int) -> float | None:
        for row in rows:
            size = row.get("batch", row.get("requests"))
            if (row["shape"], row["precision"], row["what"], size) == (shape, precision, what, batch):
                return float(row[key])
        return None

    step, hf, beside = "generation step", "Hugging Face generate", "whole engine, beside Hugging Face"
    tiny, large = "tinyllama", "llama-3-8b"
    rate = "output_tokens_per_second"
    found["tinyllama_batch1_share"] = of(tiny, "bf16", step, "share", few)
    found["tinyllama_batch64_over_hugging_face"] = ratio(
        of(tiny, "bf16", beside, rate, many), of(tiny, "bf16", hf, rate, many)
    )
    found["tinyllama_batch1_over_hugging_face"] = ratio(
        of(tiny, "bf16", beside, rate, few), of(tiny, "bf16", hf, rate, few)
    )
    found["tinyllama_total_tokens_per_second"] = of(tiny, "bf16", "whole engine", "total_tokens_per_second", many)
    found["tinyllama_share_outside_the_model"] = of(tiny, "bf16", "whole engine", "share_outside_the_model", many)
    for name, batch in (("batch1", few), ("batch64", many)):
        slow = of(large, "bf16", step, "milliseconds", batch)
        found[f"bf16_{name}_share"] = of(large, "bf16", step, "share", batch)
        found[f"fp8_over_bf16_{name}"] = ratio(slow, of(large, "fp8-kv8", step, "milliseconds", batch))
    for row in rows:
        if (row["shape"], row["what"]) == (large, "whole engine"):
            found["headline_output_tokens_per_second"] = row[rate]
            found["headline_over_published"] = row[rate] / PUBLISHED
    return {name: round(value, 4) for name, value in found.items() if value is not None}


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


def print_table(rows: list[dict[str, Any]], figures: dict[str, float]) -> None:
    form = "{:<11} {:<8} {:<34} {:>5} {:>9} {:>10} {:>6}  {}"
    print(
        form.format(
            "shape", "type", "what", "batch", "ms/step", "tokens/s", "share", "attention + products + other (ms)"
        )
    )
    for row in rows:
        kinds = row.get("milliseconds_by_kind") or {}
        per_second = row.get("tokens_per_second", row.get("output_tokens_per_second", 0))
        size, share = row.get("batch", row.get("requests")), row.get("share", "")
        parts = " + ".join(f"{value:.3f}" for value in kinds.values())
        shown = (row["shape"], row["precision"], row["what"], size, row.get("milliseconds", ""), f"{per_second:.0f}")
        print(form.format(*shown, share, parts))
    for name, value in figures.items():
        goal = GOALS.get(name)
        if goal is None:
            print(f"{name}: {value}")
            continue
        met = value <= goal if name in AT_MOST else value >= goal
        print(
            f"{name}: {value} (goal {'at most' if name in AT_MOST else 'at least'} {goal}: {'met' if met else 'MISSED'})"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PHASES), help="phases, separated by commas")
    parser.add_argument("--requests", type=int, help="of the headline; by default twice as many as fit into the pool")
    parser.add_argument("--layers", type=int, help="fewer layers than the shapes have")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to try the script without a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where checkpoints and engines lie for a while (up to 33 GB)")
    parser.add_argument("--record", type=Path, help="write the result here as well, after every phase")
    parser.add_argument("--commit", default=git_revision(), help="recorded; by default what git says")
    args = parser.parse_args(arguments)
    phases = args.only.split(",")
    if unknown := set(phases) - set(PHASES):
        parser.error(f"unknown phase {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    if not torch.cuda.is_available() and not args.smoke:
        print("no CUDA device (--smoke tries the script)")
        return 2
    if len(phases) > 1:
        record, failed = in_processes(phases, args, sys.argv[1:] if arguments is None else arguments)
    else:
        record, failed = run_phase(phases[0], args, sys.argv[1:] if arguments is None else arguments)
    if args.record:
        args.record.write_text(json.dumps(record, indent=2) + "\n")
    print_table(record["rows"], record["figures"])
    print(
        json.dumps(
            {"figures": record["figures"], "goals": GOALS, "failed_phases": failed, "machine": record["machine"]}
        )
    )
    return 1 if failed else 0


def run_phase(phase: str, args: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Measure one phase in this process. Returns the record, and the phase's name in a list if it failed."""
    rates = bandwidth()
    print(f"memory bandwidth: copy {rates['copy'] / 1e12:.3f} TB/s, read {rates['read'] / 1e12:.3f} TB/s", flush=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.empty_cache()
    bench, failed = Bench(args, rates["copy"]), []
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(dir=args.work) as scratch:
            getattr(bench, phase)(Path(scratch))
    except Exception:  # what was measured before it still counts
        traceback.print_exc()
        failed.append(phase)
    print(f"phase {phase}: {time.perf_counter() - started:.1f} s", flush=True)
    machine, versions = surroundings(device)
    record = {
        "what": "generation and whole-engine throughput of the reference engine, random weights",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": args.commit,
        "command": "python benchmarks/engine_gpu.py " + " ".join(arguments),
        "seed": args.seed,
        "bytes_per_second": {phase: {name: round(rate) for name, rate in rates.items()}},
        "published_output_tokens_per_second": PUBLISHED,
        "machine": machine,
        "versions": versions,
        "figures": figures(bench.rows, bench.batches),
        "rows": bench.rows,
    }
    return record, failed


def in_processes(phases: list[str], args: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Each phase in a process of its own: none inherits the memory, the profiler or the crash of another. Their records joined."""
    whole: dict[str, Any] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for phase in phases:
            part = Path(folder) / f"{phase}.json"
            # Of options that are given twice the last one counts.
            command = [sys.executable, __file__, *arguments, "--only", phase, "--record", str(part)]
            failed += [phase] if subprocess.run(command, check=False).returncode else []
            if not part.is_file():
                continue
            record = json.loads(part.read_text())
            if not whole:
                whole = record
                continue
            whole["rows"] += record["rows"]
            whole["bytes_per_second"] |= record["bytes_per_second"]
    if not whole:
        raise SystemExit(f"no phase of {', '.join(phases)} gave a record")
    whole["command"] = "python benchmarks/engine_gpu.py " + " ".join(arguments)
    whole["figures"] = figures(whole["rows"], (1, 4) if args.smoke else (1, 64))
    return whole, failed


if __name__ == "__main__":
    sys.exit(main())
