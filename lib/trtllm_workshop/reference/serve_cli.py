"""The command line of trtllm-serve: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.commands import command, command_parser

SERVE = "trtllm-serve serve"
IMPLEMENTED = (
    "MODEL", "--tokenizer", "--host", "--port", "--backend", "--log_level", "--max_batch_size", "--max_num_tokens",
    "--max_seq_len", "--tensor_parallel_size", "--pipeline_parallel_size", "--free_gpu_memory_fraction",
    "--trust_remote_code", "--extra_llm_api_options", "--enable_chunked_prefill", "--chat_template",
)  # fmt: skip
# The reference's own; TensorRT-LLM has no such settings.
OWN_SETTINGS = {
    "TRTLLM_SERVE_GRACE_S": ("grace_s", float, "seconds that accepted requests have to finish after SIGTERM"),
    "TRTLLM_SERVE_MAX_QUEUE": ("queue", int, "answers that may wait beyond those that run"),
    "TRTLLM_SERVE_MAX_BODY": ("body_bytes", int, "bytes of a request body"),
}


def make_parser() -> argparse.ArgumentParser:
    """The parser of `trtllm-serve serve`."""
    parser = command_parser(SERVE, IMPLEMENTED, __doc__)
    own = "; ".join(f"{name} ({text})" for name, (_, _, text) in OWN_SETTINGS.items())
    parser.epilog = f"Environment variables of the reference toolchain alone: {own}."
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags; `serve` may stand in front, the other sub-commands are refused by name."""
    words = list(argv)
    parser = make_parser()
    if words[:1] == ["serve"]:
        words = words[1:]
    elif words and words[0] in command(SERVE).siblings:
        parser.error(
            f"{words[0]} is an official sub-command that the reference toolchain does not implement; run this command with the "
            "tensorrt_llm toolchain"
        )
    args = parser.parse_args(words)
    if args.backend not in ("tensorrt", "trt"):
        parser.error(
            f"--backend {args.backend}{' (the default)' if args.backend == 'pytorch' else ''} is not what the reference "
            "toolchain has: it serves TensorRT engines. Add --backend tensorrt, which 1.2.1 needs for an engine folder too"
        )
    if not 1 <= args.port <= 65535:
        parser.error(f"--port {args.port} is not from 1 to 65535")
    if not 0 < args.free_gpu_memory_fraction <= 1:
        parser.error(f"--free_gpu_memory_fraction {args.free_gpu_memory_fraction} is not above 0 and at most 1")
    return args


def read_options_file(path: str) -> dict[str, Any]:
    """The LLM arguments of an `--extra_llm_api_options` file.

    Raises:
        ValueError: when it is no YAML mapping.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(f"--extra_llm_api_options {path} cannot be read: {problem}") from None
    except yaml.YAMLError as problem:
        raise ValueError(f"--extra_llm_api_options {path} is not YAML: {problem}") from None
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"--extra_llm_api_options {path} holds no mapping of LLM arguments (name: value)")
    return found


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of the LLM; what the YAML file says wins over the command line, as in 1.2.1.

    Raises:
        ValueError: for a file that cannot be used.
        WrongFolderKind: for a MODEL that is no engine, checkpoint or Hugging Face folder.
    """
    from trtllm_workshop.checkpoint import classify, require_kind

    folder = Path(args.model)
    kind = classify(folder)
    if kind not in ("engine", "checkpoint", "hf"):
        require_kind(folder, "engine")
    if kind != "hf" and not args.tokenizer:
        raise ValueError(
            f"{args.model} is {'an engine' if kind == 'engine' else 'a checkpoint'} folder, which has no tokenizer: add "
            "--tokenizer FOLDER with the Hugging Face folder of the model"
        )
    options: dict[str, Any] = {
        "model": str(folder.absolute()),
        "tokenizer": args.tokenizer,
        "trust_remote_code": args.trust_remote_code,
        "enable_chunked_prefill": args.enable_chunked_prefill,
        "gather_generation_logits": True,
        "kv_cache_config": {"free_gpu_memory_fraction": args.free_gpu_memory_fraction},
    }
    flags = {flag.dest: flag for flag in command(SERVE).flags.values()}
    for name in ("max_batch_size", "max_num_tokens", "max_seq_len"):
        value = getattr(args, name)
        # The official defaults are upper limits for an engine; building one with them would ask for far too much here.
        if value is not None and (kind == "engine" or value != flags[name].default):
            options[name] = value
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(args, name) != 1:
            options[name] = getattr(args, name)
    if args.chat_template:
        given = Path(args.chat_template)
        options["chat_template"] = given.read_text(encoding="utf-8") if given.is_file() else args.chat_template
    if args.extra_llm_api_options:
        more = read_options_file(args.extra_llm_api_options)
        cache = {**options["kv_cache_config"], **(more.pop("kv_cache_config", None) or {})}
        options = {**options, **more, "kv_cache_config": cache}
    return options


def read_settings(environ: Mapping[str, str]) -> dict[str, Any]:
    """The reference's own settings.

    Raises:
        ValueError: for a value that is no number from 0 on.
    """
    found = {}
    for variable, (name, kind, text) in OWN_SETTINGS.items():
        if variable in environ:
            try:
                found[name] = kind(environ[variable])
                if not 0 <= found[name] < float("inf"):
                    raise ValueError
            except ValueError:
                raise ValueError(f"{variable}={environ[variable]!r} is no number from 0 on ({text})") from None
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = parse(sys.argv[1:] if argv is None else argv)
    from trtllm_workshop.checkpoint import BrokenWeights, WrongFolderKind
    from trtllm_workshop.reference.serve_run import run
    from trtllm_workshop.reference.serve_state import Limits
    from trtllm_workshop.reference.version import banner

    print(banner("trtllm-serve"), flush=True)
    try:
        options, limits = engine_options(args), Limits(**read_settings(os.environ))
        return run(args.host, args.port, options, Path(args.model).resolve().name, limits)
    except (WrongFolderKind, BrokenWeights, ValueError, RuntimeError, OSError) as problem:
        print(f"[TRT-LLM] [E] {problem}", file=sys.stderr)
        return 1
