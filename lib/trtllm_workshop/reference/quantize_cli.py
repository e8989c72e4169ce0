"""The command line of examples/quantization/quantize.py."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from trtllm_workshop.commands import command_parser
from trtllm_workshop.reference.output_errors import exit_code
from trtllm_workshop.reference.version import banner

SCRIPT = "examples/quantization/quantize.py"
IMPLEMENTED = (
    "--model_dir",
    "--output_dir",
    "--device",
    "--dtype",
    "--qformat",
    "--kv_cache_dtype",
    "--calib_dataset",
    "--calib_size",
    "--calib_max_seq_length",
    "--tokenizer_max_seq_length",
    "--batch_size",
    "--awq_block_size",
    "--quantize_lm_head",
    "--tp_size",
    "--pp_size",
    "--seed",
)


def make_parser() -> argparse.ArgumentParser:
    """The parser with the official flags that the reference implements."""
    return command_parser(SCRIPT, IMPLEMENTED, __doc__)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code: 0, 1 with the reason on standard error, or 130 when interrupted."""
    print(banner(SCRIPT), flush=True)
    options = vars(make_parser().parse_args(argv))
    model_dir, output_dir = options.pop("model_dir"), options.pop("output_dir")
    if not model_dir:
        print("error: --model_dir is missing: give the folder of the Hugging Face model", file=sys.stderr)
        return 1
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # nothing here may reach for the network
    # A terminated run must clean up behind itself; by default Python would just stop.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return exit_code(lambda: _run(model_dir, output_dir, options), output_dir)
    except KeyboardInterrupt:
        print(f"error: interrupted; {output_dir} is as it was before", file=sys.stderr, flush=True)
        return 130


def _run(model_dir: str, output_dir: str, options: dict[str, Any]) -> None:
    # Heavy modules are imported after the command line is known to be right: a typing mistake answers at once.
    from trtllm_workshop.reference.quantize import QuantizeOptions, quantize

    started = time.monotonic()
    result = quantize(model_dir, output_dir, QuantizeOptions(**options), _say)
    quantization = result.config["quantization"]
    _say(
        f"{result.folder}: {result.config['architecture']}, {result.config['dtype']}, weights "
        f"{quantization['quant_algo'] or 'not quantized'}, KV cache "
        f"{quantization['kv_cache_quant_algo'] or 'not quantized'}"
    )
    print(f"Quantized model exported to {output_dir} in {time.monotonic() - started:.1f} s", flush=True)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
