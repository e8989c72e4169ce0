"""What does splitting a model over the GPUs of this machine give, and does it still say the same?

Random weights in the shapes of real models, the same weights for every number of ranks. For 1, 2, 4, … ranks, each on a GPU of
its own over NCCL: an engine is built, its tokens are compared with those of one rank (see `same_tokens.py`), then measured:

* `generation step`, batch 1 and 64: `milliseconds` is wall time between two tokens, from answers of two lengths;
  `device_milliseconds` what the step takes on rank 0's device. `communication_share` is the time of the step's all-reduces
  and gather by themselves (see `collective_times.py`) over the wall time.
* `load`: 64 requests queued at once.

Beside each stands what `workshop plan` predicts for this GPU (`predicted_…`; the GPU table of the library, or --gpu NAME).

With one GPU, or --one-gpu, two ranks share it over gloo: tokens are checked, and no time is measured, for none would say
anything of real ranks. Every phase runs in a process of its own and is ended when its time is over; what it had measured counts.

    python benchmarks/tensor_parallel_gpu.py [--only tinyllama,llama-3-8b,llama-3-8b-fp8] [--one-gpu] [--record FILE]
    python benchmarks/tensor_parallel_gpu.py --tiny      (tries the script on a processor)
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from collective_times import collective_milliseconds, exchange_of
from fp8_gpu import git_revision, surroundings
from gpu_load import ACTIVATIONS, random_prompts, step_clock
from parallel_prediction import predicted, table_gpu
from random_checkpoint import checkpoint_config
from same_tokens import Told, compare, float32_logits, forced_logits, free_answers, greedy, tell
from split_checkpoint import write_split_checkpoint
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner_gpus import PlanProblem
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig
from trtllm_workshop.reference.llm import LLM

# name: (shape, precision)
PHASES = {
    "tinyllama": ("tinyllama", "bf16"),
    "llama-3-8b": ("llama-3-8b", "bf16"),
    "llama-3-8b-fp8": ("llama-3-8b", "fp8-kv8"),
}
COLLECTIVES_LIMIT_S = 90.0


class Phase:
    """One shape and precision over all numbers of ranks; what was found is in `rows`."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.args, self.name, self.started = args, name, time.monotonic()
        shape, self.precision = PHASES[name]
        self.config = checkpoint_config("smoke" if args.tiny else shape, args.layers, self.precision)
        self.spec = ModelSpec.from_checkpoint_config(self.config)
        self.kind = "cpu" if args.tiny or not torch.cuda.is_available() else "cuda"
        self.timed = not args.one_gpu
        self.gpu = table_gpu(args.gpu or (torch.cuda.get_device_name(0) if self.kind == "cuda" else ""))
        self.rows: list[dict[str, Any]] = []
        self.prompt, self.new = args.lengths
        self.batches = (1, min(args.requests, 64))
        # Words of the check: short, for it runs many prompts; shared GPUs exchange over the host, so little at once.
        self.check_prompts, self.check_length, self.check_new = (4, 24, 8) if args.tiny else (4, 64, 24)

    def say(self, text: str) -> None:
        print(f"[{self.name} {time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def limits(self) -> BuildConfig:
        if not self.timed:
            return BuildConfig(max_batch_size=8, max_seq_len=128, max_num_tokens=512)
        longest = max(self.prompt + self.new, self.check_length + self.check_new) + 48
        return BuildConfig(max_batch_size=max(self.batches[1], 8), max_seq_len=longest, max_num_tokens=8192)

    def load(self, tp: int, root: Path) -> LLM:
        checkpoint, engine = root / "checkpoint", root / "engine"
        device = torch.device(self.kind)
        try:
            write_split_checkpoint(
                checkpoint, self.config, tp, self.args.seed, device, defaultdict(lambda: ACTIVATIONS)
            )
            self.say(f"tp {tp}: checkpoint written")
            build_engine(checkpoint, self.limits(), engine, log=lambda *_: None)
            shutil.rmtree(checkpoint)
            self.say(f"tp {tp}: engine built")
            # No prompt may be reused: prompts of the check begin alike, and a load is to be read whole.
            pool = KvCacheConfig(enable_block_reuse=False)
            llm = LLM(
                engine,
                skip_tokenizer_init=True,
                gather_generation_logits=True,
                kv_cache_config=pool,
                iter_stats_max_iterations=0,
            )
        finally:
            for folder in (checkpoint, engine):
                shutil.rmtree(folder, ignore_errors=True)
        self.say(f"tp {tp}: {tp} rank(s) up")
        return llm

    def add(self, tp: int, what: str, row: dict[str, Any]) -> None:
        self.rows.append({"phase": self.name, "precision": self.precision, "tp": tp, "what": what, **row})
        self.say(json.dumps(self.rows[-1]))

    def run(self, tps: list[int], root: Path, save: Any) -> None:
        """Every number of ranks, as long as there is time; `save` is called after each row."""
        one: Told | None = None
        longest = 0.0
        for tp in tps:
            begun = time.monotonic()
            left = self.args.budget - (begun - self.started)
            if left < 1.2 * longest:
                self.add(tp, "left out", {"why": f"{left:.0f} s left, the one before took {longest:.0f} s"})
                save()
                continue
            with self.load(tp, root) as llm:
                one = self.check(llm, tp, one)
                save()
                if self.timed:
                    self.measure(llm, tp, save)
            if self.timed and tp > 1:
                self.communication(tp)
                save()
            longest = max(longest, time.monotonic() - begun)

    def check(self, llm: LLM, tp: int, one: Told | None) -> Told:
        if one is None:
            exact = functools.partial(float32_logits, self.config, self.args.seed, torch.device(self.kind))
            prompts = random_prompts(llm, self.check_prompts, self.check_length, self.args.seed)
            one = tell(llm, prompts, self.check_new, exact if self.precision == "bf16" else None)
            self.say(f"tp {tp}: logit noise {one.noise:.4g}")
            return one
        found = compare(
            one, free_answers(llm, one.prompts, self.check_new), forced_logits(llm, one.prompts, one.answers)
        )
        self.add(tp, "tokens", found)
        return one

    def measure(self, llm: LLM, tp: int, save: Any) -> None:
        for batch in self.batches:
            self.add(tp, "generation step", self.step_time(llm, tp, batch))
            save()
        requests, seed = self.args.requests, self.args.seed + 2
        prompts = random_prompts(llm, requests, self.prompt, seed)
        llm.generate(random_prompts(llm, min(requests, 16), self.prompt, seed + 1), greedy(3))
        seconds = wall(llm, prompts, self.new)
        row: dict[str, Any] = {"requests": requests, "prompt_tokens": self.prompt, "new_tokens": self.new}
        row |= {"seconds": round(seconds, 3), "output_tokens_per_second": round(requests * self.new / seconds, 1)}
        row["output_tokens_per_second_per_gpu"] = round(requests * self.new / seconds / tp, 1)
        if self.gpu is not None:
            row |= predicted(self.spec, self.gpu, self.precision, tp).load(requests, self.prompt, self.new)
        self.add(tp, "load", row)
        save()

    def step_time(self, llm: LLM, tp: int, batch: int) -> dict[str, Any]:
        """Between two tokens of `batch` requests: answers of two lengths, whose prompts cost the same."""
        few, many = (2, min(self.new, 10)) if self.args.tiny else (8, min(self.new, 72))
        prompts = random_prompts(llm, batch, self.prompt, self.args.seed + 3)
        wall(llm, prompts, few)
        walls = []
        with step_clock(llm) as steps:
            for _ in range(3):
                walls.append((wall(llm, prompts, many) - wall(llm, prompts, few)) / (many - few) * 1e3)
        device = statistics.median(spent() for had_prompts, spent in steps if not had_prompts)
        row: dict[str, Any] = {
            "batch": batch,
            "context": self.prompt,
            "milliseconds": round(statistics.median(walls), 4),
        }
        row |= {"milliseconds_all": [round(value, 4) for value in walls], "device_milliseconds": round(device, 4)}
        if self.gpu is not None:
            row |= predicted(self.spec, self.gpu, self.precision, tp).step(batch, self.prompt + many / 2)
        return row

    def communication(self, tp: int) -> None:
        """Adds to the steps of these ranks what their collectives take by themselves."""
        rows = [row for row in self.rows if row["tp"] == tp and row["what"] == "generation step"]
        exchanges = [exchange_of(self.spec, tp, row["batch"]) for row in rows]
        try:
            times = collective_milliseconds(tp, exchanges, self.kind, COLLECTIVES_LIMIT_S)
        except RuntimeError as error:  # the rest counts without it
            self.say(str(error))
            return
        for row, spent in zip(rows, times, strict=True):
            row["communication_milliseconds"] = round(spent, 4)
            row["communication_share"] = round(spent / row["milliseconds"], 4)
            said = row.get("predicted_communication_share", "none")
            share = row["communication_share"]
            self.say(f"tp {tp}, batch {row['batch']}: communication {spent:.3f} ms, share {share} (predicted {said})")


def wall(llm: LLM, prompts: list[list[int]], new: int) -> float:
    """Seconds for all prompts at once, exactly `new` tokens each."""
    begin = time.perf_counter()
    answers = free_answers(llm, prompts, new)
    seconds = time.perf_counter() - begin
    if any(len(answer) != new for answer in answers):
        raise RuntimeError(f"an answer has not the {new} tokens that were asked for; nothing is measured")
    return seconds


def rank_counts(spec: ModelSpec, gpus: int) -> list[int]:
    """1, 2, 4, … as many as there are GPUs and the model can be split by."""
    found, tp = [], 1
    while tp <= gpus:
        try:
            Split(tp).check(spec)
            found.append(tp)
        except PlanProblem as problem:
            print(f"tp {tp} is left out: {problem}", flush=True)
        tp *= 2
    return found


def speedups(rows: list[dict[str, Any]]) -> dict[str, float | bool]:
    """What the rows say in one number each: whether all tokens are equal, and by how much ranks are faster than one."""
    found: dict[str, float | bool] = {}
    for row in rows:
        name = f"{row['phase']}_tp{row['tp']}"
        if row["what"] == "tokens":
            found[f"{name}_tokens_equal"] = row["tokens_equal"]
        key = {"generation step": "milliseconds", "load": "output_tokens_per_second"}.get(row["what"])
        size = row.get("batch", row.get("requests"))
        for base in rows:
            same = (base["phase"], base["what"], base.get("batch", base.get("requests"))) == (
                row["phase"],
                row["what"],
                size,
            )
            if key and same and base["tp"] == 1 and row["tp"] > 1:
                ratio = base[key] / row[key] if row["what"] == "generation step" else row[key] / base[key]
                what = f"batch{size}_step" if row["what"] == "generation step" else "load"
                found[f"{name}_{what}_speedup"] = round(ratio, 3)
    return found


def run_phase(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the phase `args.only` in this process; the record is written after every row when `args.record` is given."""
    phase = Phase(args.only, args)
    gpus = 2 if phase.kind == "cpu" or args.one_gpu else torch.cuda.device_count()
    tps = rank_counts(phase.spec, gpus) if args.tp is None else args.tp
    machine, versions = surroundings(torch.device(phase.kind))
    machine |= {"gpus": torch.cuda.device_count() if phase.kind == "cuda" else 0}
    if phase.kind == "cuda" and not args.one_gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    record: dict[str, Any] = {
        "what": "tensor parallelism of the reference engine beside the planner's prediction, random weights",
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": args.commit,
        "command": f"python benchmarks/tensor_parallel_gpu.py {args.line}",
        "seed": args.seed,
        "ranks": "two share one GPU over gloo: tokens are checked, no time is measured" if args.one_gpu else phase.kind,
        "predicted_for": None if phase.gpu is None else phase.gpu.name,
        "machine": machine,
        "versions": versions,
        "rows": phase.rows,
        "done": False,
    }

    def save() -> None:
        record["figures"] = speedups(phase.rows)
        if args.record:
            args.record.write_text(json.dumps(record, indent=2) + "\n")

    save()
    with tempfile.TemporaryDirectory(dir=args.work) as scratch:
        phase.run(tps, Path(scratch), save)
    record["done"] = True
    save()
    phase.say("done")
    return record


def in_processes(phases: list[str], args: argparse.Namespace, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Each phase in a process of its own, ended when its time is over. Returns the joined record and the failed phases."""
    whole: dict[str, Any] = {}
    failed: list[str] = []
    environment = dict(os.environ)
    if args.one_gpu and not args.tiny:
        shown = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = shown[0]
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        for name in phases:
            part = Path(folder) / f"{name}.json"
            # Of options that are given twice the last one counts.
            own = ["--only", name, "--record", str(part), "--work", folder, "--child", f"--line={' '.join(arguments)}"]
            own += ["--one-gpu"] if args.one_gpu else []
            child = subprocess.Popen([sys.executable, __file__, *arguments, *own], env=environment)
            try:
                child.wait(args.budget)
            except subprocess.TimeoutExpired:
                print(f"phase {name}: ended after its {args.budget:g} s (--budget)", flush=True)
            finally:
                child.kill()  # its ranks end with it
                child.wait()
            record = json.loads(part.read_text()) if part.is_file() else {"rows": [], "figures": {}, "done": False}
            failed += [] if child.returncode == 0 and record.pop("done") else [name]
            if not whole:
                whole = record
            else:
                whole["rows"] += record["rows"]
                whole["figures"] |= record["figures"]
    whole.pop("done", None)
    return whole, failed


def print_table(rows: list[dict[str, Any]]) -> None:
    form = "{:<15} {:>3} {:<16} {:>5} {:>10} {:>10} {:>9} {:>9}"
    print(form.format("phase", "tp", "what", "size", "measured", "predicted", "comm", "predicted"))
    for row in rows:
        measured = row.get("milliseconds", row.get("output_tokens_per_second", row.get("tokens_equal", "")))
        said = row.get("predicted_milliseconds", row.get("predicted_output_tokens_per_second", ""))
        shares = (row.get("communication_share", ""), row.get("predicted_communication_share", ""))
        size = row.get("batch", row.get("requests", row.get("positions", "")))
        print(form.format(row["phase"], row["tp"], row["what"], size, str(measured), said, *shares))


def numbers(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers from 1 on, with commas between")
    return found


def main(arguments: list[str] | None = None) -> int:
    given = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"phases, separated by commas: {', '.join(PHASES)}; with one GPU tinyllama")
    parser.add_argument("--tp", type=numbers, help="numbers of ranks, 1 first; by default 1, 2, 4, … GPUs")
    parser.add_argument("--one-gpu", action="store_true", help="two ranks share one GPU; for correctness only")
    parser.add_argument("--tiny", action="store_true", help="a tiny shape, to try the script without a GPU")
    parser.add_argument("--gpu", help="the GPU's name in the planner's table; by default what the driver says")
    parser.add_argument("--layers", type=int, help="fewer layers than the shapes have")
    parser.add_argument("--requests", type=int, default=64, help="of the load")
    parser.add_argument("--lengths", type=numbers, help="prompt and new tokens of a request; by default 1000,1000")
    parser.add_argument("--budget", type=float, help="seconds of a phase; 600, with one GPU 240")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where checkpoints and engines lie for a while (up to 33 GB)")
    parser.add_argument("--record", type=Path, help="write the result here as well")
    parser.add_argument("--commit", default=git_revision(), help="recorded; by default what git says")
    for hidden in ("--child", "--line"):  # how this script calls itself
        parser.add_argument(hidden, help=argparse.SUPPRESS, **({"action": "store_true"} if hidden == "--child" else {}))
    args = parser.parse_args(given)
    args.lengths = args.lengths or ([24, 12] if args.tiny else [1000, 1000])
    if len(args.lengths) != 2:
        parser.error(f"--lengths {args.lengths}: expected two numbers, prompt and new tokens")
    if args.tp is not None and args.tp[0] != 1:
        parser.error(f"--tp {args.tp}: begin with 1, which the others are compared with")
    if not args.tiny and not torch.cuda.is_available():
        print("no CUDA device (--tiny tries the script)")
        return 2
    args.one_gpu = args.one_gpu or (not args.tiny and torch.cuda.device_count() == 1)
    args.budget = args.budget or (240.0 if args.one_gpu else 600.0)
    phases = (args.only or ("tinyllama" if args.one_gpu or args.tiny else ",".join(PHASES))).split(",")
    if unknown := set(phases) - set(PHASES):
        parser.error(f"unknown phase {', '.join(sorted(unknown))}; there are {', '.join(PHASES)}")
    if args.child:
        try:
            run_phase(args)
        except Exception:  # what was found before it still counts
            traceback.print_exc()
            return 1
        return 0
    if args.work:
        args.work.mkdir(parents=True, exist_ok=True)
    record, failed = in_processes(phases, args, given)
    if args.record:
        args.record.write_text(json.dumps(record, indent=2) + "\n")
    print_table(record["rows"])
    figures = record.get("figures", {})
    wrong = [name for name, value in figures.items() if value is False]
    last = {"figures": figures, "failed_phases": failed, "not_equal": wrong, "machine": record.get("machine")}
    print(json.dumps(last))
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
