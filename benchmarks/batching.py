"""What do in-flight batching and batches bring on this machine, and what does the engine cost around the model?

Three questions, one engine, one run:

* `inflight_over_static`: output tokens/s of in-flight batching (GUARANTEED_NO_EVICT) over static batches (STATIC_BATCH: the
  next batch starts when the last answer of this one has ended). The same requests, all queued at the start, in the same
  order, under the same max_batch_size. The answers' lengths follow a log-normal distribution, so most are short and a few
  are long; they are fixed beforehand and end tokens are ignored. Each round has the same lengths in another order.
* `c8_over_sequential`: output tokens/s of 8 equal requests at once over the same 8 one after the other.
* `overhead_share`: of the time of all steps, the part outside the model: scheduling, packing, choosing tokens, text,
  stop strings, statistics, and handing the text to its reader. 8 streaming requests with text.

Both sides of a pair run in every round, and each figure is the median over the rounds. In float32 both sides must give the
same tokens, or the run fails (in bfloat16 the order of sums differs with the batch, and now and then a token with it).

    .venv/bin/python benchmarks/batching.py [--model FOLDER] [--rounds 3] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from trtllm_workshop.reference.bench_dataset import InferenceRequest
from trtllm_workshop.reference.bench_run import run_load
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.engine import Engine, load_engine
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.outputs import RequestOutput
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules
from trtllm_workshop.reference.tokenizer_source import load_tokenizer

TOGETHER = 8


@dataclass(frozen=True)
class Run:
    """One pass over a load: its tokens by request, its seconds, and how many steps it took."""

    tokens: list[list[int]]
    seconds: float
    steps: int

    @property
    def rate(self) -> float:
        """Output tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


def mixed_load(count: int, longest: int, vocabulary: int, seed: int) -> list[InferenceRequest]:
    """Requests with prompts of 16 to 64 random tokens and answers of 4 to `longest` tokens.

    The answers are the middles of `count` equally likely parts of a log-normal distribution (median 16, sigma 1.4): its
    shape without the luck of a draw. `seed` decides their order, and the prompts.
    """
    chance, normal = random.Random(seed), statistics.NormalDist(math.log(16), 1.4)
    middles = (math.exp(normal.inv_cdf((part + 0.5) / count)) for part in range(count))
    answers = [min(max(round(length), 4), longest) for length in middles]
    chance.shuffle(answers)
    return [
        InferenceRequest(number, [chance.randrange(vocabulary) for _ in range(chance.randint(16, 64))], answer)
        for number, answer in enumerate(answers)
    ]


def equal_load(count: int, answer: int, vocabulary: int, seed: int) -> list[InferenceRequest]:
    """Requests with 32 prompt tokens each and equally long answers."""
    chance = random.Random(seed)
    return [
        InferenceRequest(n, [chance.randrange(vocabulary) for _ in range(32)], answer) for n in range(count)
    ]  # fmt: skip


def make_executor(engine: Engine, policy: CapacitySchedulerPolicy, batch: int) -> Executor:
    """Without block reuse: prompts come again in every round and must be computed again."""
    cache = KvCacheConfig(enable_block_reuse=False)
    return Executor(engine, cache, batch, scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy))


def timed(executor: Executor, requests: Sequence[InferenceRequest], concurrency: int = -1) -> Run:
    before, started = executor.iterations, time.perf_counter()
    records = run_load(executor, requests, concurrency)
    return Run([r.tokens for r in records], time.perf_counter() - started, executor.iterations - before)


def rounds_of(sides: dict[str, Callable[[int], Run]], rounds: int, exact: bool) -> dict[str, list[Run]]:
    """Run all sides in turn, `rounds` times, each given the number of the round; with `exact` to the same tokens."""
    found: dict[str, list[Run]] = {name: [] for name in sides}
    for number in range(rounds):
        order = list(sides) if number % 2 == 0 else list(sides)[::-1]
        for name in order:
            found[name].append(sides[name](number))
        if exact and len({str(runs[-1].tokens) for runs in found.values()}) != 1:
            raise RuntimeError(f"{' and '.join(sides)} gave different tokens: this is no comparison of the same work")
    return found


def ratio(above: list[Run], below: list[Run]) -> float:
    """The median of the rounds' ratios of output tokens a second."""
    return statistics.median(a.rate / b.rate for a, b in zip(above, below, strict=True))


def overhead(engine: Engine, tokenizer: Any, requests: Sequence[InferenceRequest]) -> float:
    """The share of the steps' time in which the model did not run."""
    model, spent = engine.run, [0.0]

    def watched(*inputs: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        logits = model(*inputs)
        spent[0] += time.perf_counter() - started
        return logits

    engine.run = watched
    try:
        executor = Executor(engine)
        running = []
        for wanted in requests:
            params = SamplingParams(max_tokens=wanted.output_tokens, ignore_eos=True, stop="\u2042 never said")
            rules = StopRules(stop_texts=["\u2042 never said"])
            request = Request(wanted.task_id, wanted.input_ids, params, rules, tokenizer)
            output = RequestOutput.following(request, None, executor.abort, True)
            executor.submit(request)
            running.append(output)
        total = 0.0
        while executor.busy:
            started = time.perf_counter()
            for request in executor.step():
                output = running[request.request_id]
                next(output).outputs[0].text_diff  # noqa: B018  (what a reader of the stream does)
            total += time.perf_counter() - started
        if not all(o.finished and len(o.outputs[0].token_ids) == requests[0].output_tokens for o in running):
            raise RuntimeError("an answer is not complete")
    finally:
        engine.run = model
    return (total - spent[0]) / total


def build(folder: Path, scratch: Path, dtype: str, batch: int, longest: int) -> Engine:
    def quiet(*_: object) -> None:
        pass

    checkpoint = convert_checkpoint(folder, scratch / "checkpoint", dtype=dtype, say=quiet).folder
    config = BuildConfig(max_batch_size=batch, max_seq_len=longest)
    return load_engine(build_engine(checkpoint, config, scratch / "engine", log=quiet))


def show(title: str, sides: dict[str, list[Run]]) -> None:
    print(
        f"\n{title}\n{'':<14} {'output tokens':>14} {'steps':>7} {'requests a step':>16} {'tokens/s, each round':>28}"
    )
    for name, runs in sides.items():
        made, steps = sum(map(len, runs[0].tokens)), runs[0].steps
        rates = " ".join(f"{run.rate:.1f}" for run in runs)
        print(f"{name:<14} {made:>14.0f} {steps:>7.0f} {made / steps:>16.2f} {rates:>28}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("work/models/HuggingFaceTB--SmolLM2-135M-Instruct"))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="max_batch_size of the mixed load")
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest answer of the mixed load")
    parser.add_argument("--new-tokens", type=int, default=48, help="tokens of the 8 equal answers")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if not args.model.is_dir():
        print(f"{args.model} does not exist: run `workshop run 01` first, or name a Hugging Face folder with --model")
        return 2
    for name in ("rounds", "requests", "batch", "longest", "new_tokens"):
        if getattr(args, name) < (4 if name == "longest" else 1):
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)} is too small")
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    mixed = [mixed_load(args.requests, args.longest, vocabulary, args.seed + n) for n in range(args.rounds)]
    equal = equal_load(TOGETHER, args.new_tokens, vocabulary, args.seed)
    tokenizer = load_tokenizer(args.model)[0]
    exact = args.dtype == "float32"
    policies = CapacitySchedulerPolicy
    with tempfile.TemporaryDirectory() as scratch:
        limit = max(64 + args.longest, 32 + args.new_tokens)
        engine = build(args.model, Path(scratch), args.dtype, max(args.batch, TOGETHER), limit)
        inflight, static = (
            make_executor(engine, policy, args.batch)
            for policy in (policies.GUARANTEED_NO_EVICT, policies.STATIC_BATCH)
        )
        eight = make_executor(engine, policies.GUARANTEED_NO_EVICT, TOGETHER)
        for executor in (inflight, static, eight):
            timed(executor, equal_load(2, 3, vocabulary, 1))  # first calls are slow
        load = rounds_of(
            {"in-flight": lambda n: timed(inflight, mixed[n]), "static": lambda n: timed(static, mixed[n])},
            args.rounds,
            exact,
        )
        pair = rounds_of(
            {"8 at once": lambda _: timed(eight, equal), "one by one": lambda _: timed(eight, equal, 1)},
            args.rounds,
            exact,
        )
        overhead(engine, tokenizer, equal_load(2, 3, vocabulary, 1))
        shares = [overhead(engine, tokenizer, equal) for _ in range(args.rounds)]
    answers = sorted(r.output_tokens for r in mixed[0])
    print(
        f"{args.requests} requests, answers of {answers[0]} to {answers[-1]} tokens, median {answers[len(answers) // 2]}, "
        f"mean {statistics.mean(answers):.1f}; max_batch_size {args.batch}; {args.dtype}"
    )
    show("mixed load", load)
    show("8 equal requests", pair)
    print(f"\noutside the model, each round: {' '.join(f'{share:.2%}' for share in shares)}")
    result = {
        "inflight_over_static": ratio(load["in-flight"], load["static"]),
        "c8_over_sequential": ratio(pair["8 at once"], pair["one by one"]),
        "overhead_share": statistics.median(shares),
    }
    settings = {name: getattr(args, name) for name in ("dtype", "rounds", "requests", "batch", "longest", "seed")}
    machine = {"processor": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    figures = {name: round(value, 4) for name, value in result.items()}
    print(json.dumps(figures | {"load": settings, "machine": machine, "versions": versions}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
