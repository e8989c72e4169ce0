"""The command line of trtllm-bench: measure an engine with a data set, and make data sets."""

from __future__ import annotations

import argparse
import difflib
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_workshop.commands import command, command_parser

if TYPE_CHECKING:
    from trtllm_workshop.reference.bench_dataset import InferenceRequest

BENCH = "trtllm-bench"
_COMMON = (
    "--engine_dir",
    "--backend",
    "--kv_cache_free_gpu_mem_fraction",
    "--dataset",
    "--num_requests",
    "--warmup",
    "--concurrency",
    "--report_json",
    "--iteration_log",
)
IMPLEMENTED: dict[str, tuple[str, ...]] = {
    BENCH: ("--model", "--model_path", "--workspace", "--log_level"),
    f"{BENCH} throughput": (
        *_COMMON,
        "--max_batch_size",
        "--max_num_tokens",
        "--eos_id",
        "--streaming",
        "--output_json",
        "--request_json",
        "--enable_chunked_context",
        "--scheduler_policy",
    ),
    f"{BENCH} latency": _COMMON,
    f"{BENCH} prepare-dataset": ("--output", "--random-seed", "--log-level"),
    f"{BENCH} prepare-dataset token-norm-dist": tuple(
        f"--{n}" for n in ("num-requests", "input-mean", "input-stdev", "output-mean", "output-stdev")
    ),
    f"{BENCH} prepare-dataset token-unif-dist": tuple(
        f"--{n}" for n in ("num-requests", "input-min", "input-max", "output-min", "output-max")
    ),
}
OUTPUTS = ("report_json", "output_json", "request_json", "iteration_log")


def make_parser(name: str = BENCH) -> argparse.ArgumentParser:
    """The parser of trtllm-bench (the flags before the sub-command), or of one of its sub-commands by full name."""
    parser = command_parser(name, IMPLEMENTED[name], __doc__)
    if words := _subcommands(name):
        parser.usage = f"{name} [-h] [options] {{{','.join(words)}}} …"
        parser.epilog = f"sub-commands: {', '.join(words)}; each answers to --help"
    return parser


def _subcommands(name: str) -> list[str]:
    return [word for word in command(name).subcommands if f"{name} {word}" in IMPLEMENTED]


def parse(argv: Sequence[str]) -> tuple[str, argparse.Namespace]:
    """The full name of the sub-command, and the flags of all levels in one namespace.

    The levels are cut apart first: each has its own flags, and a flag at the wrong level is refused there by name.
    """
    name, rest, found = BENCH, list(argv), argparse.Namespace()
    while True:
        parser, words = make_parser(name), _subcommands(name)
        at = _next_word(name, rest) if words else len(rest)
        parser.parse_args(rest[:at], found)
        if not words:
            return name, found
        if at == len(rest):
            parser.error(f"the sub-command is missing: choose from {', '.join(words)}")
        word = rest[at]
        if word in command(name).subcommands and word not in words:
            parser.error(f"{word} is an official sub-command that the reference toolchain does not implement; run this "
                         "command with the tensorrt_llm toolchain")  # fmt: skip
        if word not in words:
            near = difflib.get_close_matches(word, words, n=1)
            hint = f"did you mean {near[0]}?" if near else f"choose from {', '.join(words)}"
            parser.error(f"{name} has no sub-command {word}: {hint}")
        name, rest = f"{name} {word}", rest[at + 1 :]


def _next_word(name: str, words: Sequence[str]) -> int:
    """Where the first word lies that is neither a flag nor the value of one."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        flag = command(name).find(words[at].split("=", 1)[0])
        values = 0 if flag is None or flag.is_switch or "=" in words[at] else flag.nargs or 1
        at += 1 + (values if isinstance(values, int) else 1)
    return min(at, len(words))


# Data sets ------------------------------------------------------------------------------------------------------------


def load_model_tokenizer(args: argparse.Namespace) -> Any:
    from trtllm_workshop.reference.tokenizer_source import load_tokenizer

    if args.model_path:
        return load_tokenizer(args.model_path)[0]
    try:
        return load_tokenizer(args.model)[0]
    except FileNotFoundError as error:
        raise ValueError(f"--model {args.model}: {error}, with --model_path FOLDER") from error


def prepare_dataset(kind: str, args: argparse.Namespace) -> int:
    from trtllm_workshop.reference.bench_dataset import normal_lengths, synthetic, to_line, uniform_lengths
    from trtllm_workshop.reference.output_errors import output_error

    count, seed = args.num_requests, args.random_seed
    normal = kind == "token-norm-dist"
    sides = ("mean", "stdev") if normal else ("min", "max")
    pairs = [tuple(getattr(args, f"{side}_{name}") for name in sides) for side in ("input", "output")]
    if count < 1:
        raise ValueError(f"--num-requests {count}: give 1 or more")
    if not 0 <= seed < 2**32:
        raise ValueError(f"--random-seed {seed}: give a whole number from 0 to 2**32 - 1")
    for side, (first, second) in zip(("input", "output"), pairs, strict=True):
        if first < 1:
            raise ValueError(f"--{side}-{sides[0]} {first}: give 1 token or more")
        if normal and second < 0:
            raise ValueError(f"--{side}-stdev {second}: give 0 or more tokens")
        if not normal and second < first:
            raise ValueError(f"--{side}-max {second} is below --{side}-min {first}: give at least as many tokens")
    tokenizer = load_model_tokenizer(args)
    lengths = normal_lengths if normal else uniform_lengths
    # Both from the same seed, as in TensorRT-LLM: a request with a long prompt has a long answer.
    inputs, outputs = (lengths(first, second, count, seed) for first, second in pairs)
    lines = [
        to_line(r) + "\n"
        for r in synthetic(inputs, outputs, tokenizer.vocab_size, set(tokenizer.all_special_ids), seed)
    ]
    try:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise ValueError(output_error(error, "--output", args.output)) from error
    print(f"[TRT-LLM] [I] {count} requests, {sum(inputs)} prompt and {sum(outputs)} output tokens: {args.output}")
    return 0


# Runs -----------------------------------------------------------------------------------------------------------------


def check_run(args: argparse.Namespace) -> None:
    """What can be known to be wrong before anything is loaded; paths of outputs are tried here, not after the run.

    Raises:
        ValueError: naming the flag, its value and the remedy.
    """
    if Path(args.model).exists():
        raise ValueError(
            f"--model {args.model} is a file or directory, please provide a model name (such as "
            "HuggingFaceTB/SmolLM2-135M-Instruct); the folder goes to --model_path"
        )
    if args.model_path and not Path(args.model_path).is_dir():
        raise ValueError(f"--model_path {args.model_path} is no folder: name the Hugging Face model folder")


def check_load(args: argparse.Namespace) -> None:
    """See `check_run`; for the sub-commands that run an engine."""
    if args.backend != "tensorrt" or not args.engine_dir:
        raise ValueError(
            f"--backend {args.backend}{'' if args.engine_dir else ' without --engine_dir'}: the reference toolchain "
            "measures engines; give --engine_dir FOLDER and --backend tensorrt"
        )
    if not args.dataset:
        raise ValueError(
            "--dataset is missing: name a file of requests; trtllm-bench --model NAME prepare-dataset makes one"
        )
    for name, least in (("num_requests", 0), ("warmup", 0), ("max_batch_size", 1), ("max_num_tokens", 1)):
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: give {least} or more")
    for name in OUTPUTS:
        if path := getattr(args, name, None):
            check_output(f"--{name}", Path(path))


def check_output(flag: str, path: Path) -> None:
    """Raises ValueError when the file cannot be written. Its folder must exist, as TensorRT-LLM's own command wants it."""
    from trtllm_workshop.reference.output_errors import output_error

    wrong = "it is a folder" if path.is_dir() else "" if path.parent.exists() else f"{path.parent} does not exist"
    if wrong:
        raise ValueError(f"{flag} {path} cannot be written: {wrong}; make the folder, or name another file")
    there = path.exists()
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(output_error(error, flag, path)) from error
    if not there:
        path.unlink()


def read_requests(args: argparse.Namespace) -> list[InferenceRequest]:
    from trtllm_workshop.reference.bench_dataset import read_dataset

    requests = read_dataset(Path(args.dataset), lambda: load_model_tokenizer(args), args.num_requests)
    if len(requests) < args.num_requests:
        print(
            f"[TRT-LLM] [W] --num_requests {args.num_requests}: the data set has {len(requests)}, all of them are run"
        )
    return requests


def benchmark(kind: str, args: argparse.Namespace) -> int:
    from trtllm_workshop.checkpoint import read_config
    from trtllm_workshop.reference.bench_dataset import check_limits
    from trtllm_workshop.reference.bench_report import (
        RunSettings,
        dataset_section,
        dataset_text,
        report_text,
        statistics,
    )
    from trtllm_workshop.reference.bench_run import check_each, run_load
    from trtllm_workshop.reference.configs import CapacitySchedulerPolicy, KvCacheConfig, SchedulerConfig
    from trtllm_workshop.reference.engine import load_engine
    from trtllm_workshop.reference.executor import Executor

    latency = kind == "latency"
    requests = read_requests(args)
    config = read_config(Path(args.engine_dir))
    build, pretrained = config["build_config"], config["pretrained_config"]
    check_limits(requests, build, pretrained["vocab_size"])
    dataset = dataset_section(requests, str(Path(args.dataset).resolve()))
    print(dataset_text(dataset))
    chunked = not latency and args.enable_chunked_context
    if chunked and not build["plugin_config"].get("use_paged_context_fmha", True):
        raise ValueError(
            "--enable_chunked_context, which is the default, needs an engine built with --use_paged_context_fmha enable; "
            "build it again, or give --disable_chunked_context"
        )
    policy = "guaranteed_no_evict" if latency else args.scheduler_policy
    executor = Executor(
        load_engine(args.engine_dir),
        # No block reuse, as in TensorRT-LLM's own benchmark: warmup and repeated prompts would make the context phase free.
        KvCacheConfig(free_gpu_memory_fraction=args.kv_cache_free_gpu_mem_fraction, enable_block_reuse=False),
        1 if latency else args.max_batch_size,
        max_num_tokens=None if latency else args.max_num_tokens,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=CapacitySchedulerPolicy(policy.upper())),
        enable_chunked_context=chunked,
        most_stats=sys.maxsize if args.iteration_log else 0,
    )
    for name in ("max_batch_size", "max_num_tokens"):
        wanted, limit = getattr(args, name, None), build[name]
        if wanted is not None and wanted > limit:
            print(f"[TRT-LLM] [W] --{name} {wanted} is above what the engine was built for: {limit} counts")
    print(f"[TRT-LLM] [I] {executor.pool_description}")
    check_each(executor.scheduler, requests)
    end_id = -1 if latency else args.eos_id
    if args.warmup:
        print(f"[TRT-LLM] [I] Running warmup: {args.warmup} requests")
        run_load(executor, random.Random(0).choices(requests, k=args.warmup), args.concurrency, end_id)
    executor.stats.take()  # those of the warmup
    records = run_load(executor, requests, args.concurrency, end_id)
    if args.iteration_log:
        lines = [json.dumps(iteration) + "\n" for iteration in executor.stats.take()]
        Path(args.iteration_log).write_text("".join(lines), encoding="utf-8")
    settings = RunSettings(
        model=args.model,
        model_path=args.model_path,
        engine_dir=str(Path(args.engine_dir).resolve()),
        pretrained_config=pretrained,
        build_config=build,
        max_batch_size=executor.max_batch_size,
        max_num_tokens=executor.max_num_tokens,
        scheduling_policy=policy.upper(),
        kv_cache_percentage=args.kv_cache_free_gpu_mem_fraction,
        streaming=latency or args.streaming,
    )
    report = statistics(records, settings, dataset)
    print(report_text(report))
    if args.report_json:
        Path(args.report_json).write_text(json.dumps(report, indent=4) + "\n", encoding="utf-8")
        print(f"[TRT-LLM] [I] report: {args.report_json}")
    save_answers(args, records)
    return 0


def save_answers(args: argparse.Namespace, records: Sequence[Any]) -> None:
    """`--output_json`: the text of each answer by number; `--request_json`: each request's times and text."""
    output, details = getattr(args, "output_json", None), getattr(args, "request_json", None)
    if not output and not details:
        return
    tokenizer = load_model_tokenizer(args)
    texts = {record.id: tokenizer.decode(record.tokens) for record in records}
    for path, content in ((output, texts), (details, [r.saved() | {"output": texts[r.id]} for r in records])):
        if path:
            Path(path).write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    name, args = parse(sys.argv[1:] if argv is None else argv)
    # Heavy modules are imported after the command line is known to be right: a typing mistake answers at once.
    from trtllm_workshop.checkpoint import BrokenWeights, WrongFolderKind, require_kind
    from trtllm_workshop.reference.version import banner

    print(banner(name), flush=True)
    kind = name.split()[-1]
    try:
        check_run(args)
        if kind.startswith("token-"):
            return prepare_dataset(kind, args)
        check_load(args)
        require_kind(args.engine_dir, "engine")
        return benchmark(kind, args)
    except KeyboardInterrupt:
        print("[TRT-LLM] [E] stopped by the keyboard: nothing is reported", file=sys.stderr)
        return 130
    except (WrongFolderKind, BrokenWeights, ValueError, RuntimeError, OSError) as error:
        print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1
