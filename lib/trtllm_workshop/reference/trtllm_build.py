"""The command line of trtllm-build."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trtllm_workshop.commands import add_arguments

IMPLEMENTED = (
    "--checkpoint_dir",
    "--output_dir",
    "--max_batch_size",
    "--max_input_len",
    "--max_seq_len",
    "--max_beam_width",
    "--max_num_tokens",
    "--opt_num_tokens",
    "--kv_cache_type",
    "--output_timing_cache",
    "--profiling_verbosity",
    "--workers",
    "--log_level",
    "--visualize_network",
    "--dry_run",
    "--monitor_memory",
    "--gather_context_logits",
    "--gather_generation_logits",
    "--gather_all_token_logits",
    "--gpt_attention_plugin",
    "--gemm_plugin",
    "--nccl_plugin",
    "--context_fmha",
    "--remove_input_padding",
    "--tokens_per_block",
    "--use_paged_context_fmha",
    "--use_fused_mlp",
    "--multiple_profiles",
)
PLUGIN_SWITCHES = (
    "context_fmha",
    "remove_input_padding",
    "use_paged_context_fmha",
    "use_fused_mlp",
    "multiple_profiles",
)
PLUGINS = ("gpt_attention_plugin", "gemm_plugin", "nccl_plugin", "tokens_per_block")
LIMITS = ("max_batch_size", "max_input_len", "max_seq_len", "max_beam_width", "max_num_tokens", "opt_num_tokens")
OPTIONS = ("output_timing_cache", "profiling_verbosity", "visualize_network", "dry_run", "monitor_memory")


def make_parser() -> argparse.ArgumentParser:
    """The parser with the official flags that the reference implements."""
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False, description=__doc__)
    add_arguments(parser, "trtllm-build", IMPLEMENTED)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    args = make_parser().parse_args(argv)
    # Heavy modules are imported after the command line is known to be right: a typing mistake answers at once.
    from trtllm_workshop.checkpoint import WrongFolderKind, require_kind
    from trtllm_workshop.reference.version import banner

    print(banner("trtllm-build"), flush=True)
    if not args.checkpoint_dir:
        print(
            "[TRT-LLM] [E] --checkpoint_dir is missing: name the folder that convert_checkpoint.py wrote",
            file=sys.stderr,
        )
        return 2
    try:
        require_kind(args.checkpoint_dir, "checkpoint")
    except WrongFolderKind as error:
        print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1
    from trtllm_workshop.reference.build import BuildError, build_engine
    from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
    from trtllm_workshop.reference.output_errors import output_error

    # A terminated build must clean up behind itself; by default Python would just stop.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    started = time.perf_counter()
    try:
        plugins = {name: getattr(args, name) for name in PLUGINS} | {
            n: getattr(args, n) == "enable" for n in PLUGIN_SWITCHES
        }
        config = BuildConfig(
            **{name: getattr(args, name) for name in (*LIMITS, *OPTIONS)},
            kv_cache_type=getattr(args, "kv_cache_type", None),
            gather_context_logits=args.gather_context_logits or args.gather_all_token_logits,
            gather_generation_logits=args.gather_generation_logits or args.gather_all_token_logits,
            plugin_config=PluginConfig(**plugins),
        )
        output = build_engine(Path(args.checkpoint_dir), config, Path(args.output_dir))
    except OSError as error:
        print(f"[TRT-LLM] [E] {output_error(error, '--output_dir', args.output_dir)}", file=sys.stderr)
        return 1
    except (BuildError, ValueError) as error:
        print(f"[TRT-LLM] [E] {error}", file=sys.stderr)
        return 1
    if args.monitor_memory:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"[TRT-LLM] [I] peak host memory {peak:.0f} MiB")
    print(f"[TRT-LLM] [I] Total time of building all engines: {time.perf_counter() - started:.1f} s ({output})")
    return 0
