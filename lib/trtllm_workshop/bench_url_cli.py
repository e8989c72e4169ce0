"""`workshop bench URL`: load on an OpenAI-compatible server from the command line, the same as `benchmark.run_load`."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trtllm_workshop.load_metrics import Slo

SERVERS = ("trtllm", "vllm", "sglang", "tgi", "openai")  # load_client.SERVER_FIELDS, which a test compares


def add(commands: Any) -> None:
    """Adds `bench` to the subcommands of `workshop`."""
    bench = commands.add_parser("bench", help="measure a server of OpenAI's API: latencies, throughput, goodput")
    bench.add_argument("url", metavar="URL", help="for example http://127.0.0.1:8000")
    bench.add_argument(
        "--tokenizer", type=Path, required=True, metavar="FOLDER", help="of the served model: prompts get exact lengths"
    )
    how = bench.add_mutually_exclusive_group(required=True)
    how.add_argument("--concurrency", type=_count, nargs="+", metavar="N", help="closed loop; several make a sweep")
    how.add_argument("--rate", type=_positive, metavar="R", help="open loop, requests a second at random (Poisson)")
    how.add_argument("--trace", type=Path, metavar="FILE", help="open loop, JSON lines with timestamp in ms")
    bench.add_argument("--input-tokens", type=_count, default=128, metavar="N", help="of a prompt (128)")
    bench.add_argument("--output-tokens", type=_count, default=64, metavar="N", help="of an answer (64)")
    bench.add_argument("--requests", type=_count, metavar="N", help="of each load; default: 4 for each one in flight")
    bench.add_argument("--seconds", type=_positive, metavar="S", help="send no more after so long")
    bench.add_argument("--warm-up", type=int, metavar="N", help="requests before, not counted; default: up to 8")
    bench.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    bench.add_argument("--server", choices=SERVERS, default="trtllm", help="its kind, for fields such as ignore_eos")
    bench.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    for name, what in (("ttft", "to the first token"), ("tpot", "per output token"), ("e2e", "of a whole request")):
        bench.add_argument(
            f"--slo-{name}", type=_positive, metavar="S", help=f"goodput: at most so many seconds {what}"
        )
    bench.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="limit of one request (600)")
    bench.add_argument("--seed", type=int, default=0)
    bench.add_argument("--api-key-env", metavar="NAME", help="environment variable that holds the key")
    bench.add_argument("--out", type=Path, metavar="FOLDER", help="JSON and CSV of each load go here")
    bench.add_argument("--json", action="store_true", help="print JSON instead of the table")
    bench.set_defaults(action=run)


def _count(given: str) -> int:
    try:
        value = int(given)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number of at least 1")
    return value


def _positive(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = 0.0
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{given!r} is not a number above 0")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs the loads and prints them. 0 when every request was answered, 1 when one was not, 2 when nothing could be measured."""
    from trtllm_workshop.load_problem import LoadProblem

    try:
        return _measure(arguments)
    except LoadProblem as problem:
        print(f"workshop bench: {str(problem).replace('(model=…)', '(--model)')}", file=sys.stderr)
        return 2


def _measure(arguments: argparse.Namespace) -> int:
    from trtllm_workshop.benchmark import LoadProblem, run_load, sweep
    from trtllm_workshop.load_report import table

    if arguments.warm_up is not None and arguments.warm_up < 0:
        raise LoadProblem(f"--warm-up {arguments.warm_up} makes no sense: give 0 or more")
    if arguments.out is not None:  # before anything is measured that could then not be kept
        try:
            arguments.out.mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise LoadProblem(
                f"--out {arguments.out} cannot be a folder ({problem.strerror}): give another one"
            ) from None
    options: dict[str, Any] = {
        "tokenizer": read_tokenizer(arguments.tokenizer), "input_tokens": arguments.input_tokens,
        "output_tokens": arguments.output_tokens, "requests": arguments.requests, "seconds": arguments.seconds,
        "warm_up": arguments.warm_up, "endpoint": arguments.endpoint, "server": arguments.server, "model": arguments.model,
        "seed": arguments.seed, "timeout_s": arguments.timeout, "api_key": _key(arguments.api_key_env),
        "slo": _slo(arguments),
    }  # fmt: skip
    if arguments.concurrency:
        loads = sweep(arguments.url, arguments.concurrency, **options)
    else:
        loads = [run_load(arguments.url, rate=arguments.rate, trace=arguments.trace, **options)]
    if not all(load.records for load in loads):
        raise LoadProblem(f"no request was sent within --seconds {arguments.seconds:g}: give more, or leave it out")
    if arguments.json:
        print(json.dumps([load.to_json() for load in loads], indent=1))
    else:
        print(table(loads))
        for load in loads:
            if load.goodput is not None:
                print(f"goodput: {load.goodput:.2f} requests/s ({load.slo})")
    for load in loads:
        for warning in load.warnings:
            print(f"Warning: {warning}", file=sys.stderr)
    if arguments.out is not None:
        for number, load in enumerate(loads, 1):
            name = f"{number:02}-" + (f"{load.concurrency}-in-flight" if load.concurrency else "open-loop")
            print(f"wrote {load.save(arguments.out, name)} and its .csv", file=sys.stderr)
    return 1 if any(load.errors for load in loads) else 0


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder on this machine. Raises LoadProblem when there is none."""
    from trtllm_workshop.benchmark import LoadProblem

    if not folder.is_dir():
        raise LoadProblem(
            f"--tokenizer {folder} is no folder: give the Hugging Face folder of the served model, such as work/models/NAME"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as problem:  # transformers raises whatever its parsers raise
        reason = str(problem).strip().split("\n")[0]
        raise LoadProblem(f"--tokenizer {folder} holds no tokenizer that transformers can read: {reason}") from None


def _key(variable: str | None) -> str | None:
    from trtllm_workshop.benchmark import LoadProblem

    if variable is None:
        return None
    value = os.environ.get(variable)
    if not value:
        raise LoadProblem(f"--api-key-env {variable}: there is no such environment variable, or it is empty")
    return value


def _slo(arguments: argparse.Namespace) -> Slo | None:
    from trtllm_workshop.load_metrics import Slo

    limits = {name: getattr(arguments, f"slo_{name}") for name in ("ttft", "tpot", "e2e")}
    return Slo(**limits) if any(limits.values()) else None
