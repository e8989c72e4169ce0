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
DESCRIPTION = "Calibrates a Hugging Face model with NVIDIA ModelOpt and writes a quantized TensorRT-LLM checkpoint."
_HELPS = {
    "--model_dir": "folder of the Hugging Face model, with its tokenizer",
    "--output_dir": "folder for the checkpoint",
    "--device": "where to calibrate",
    "--dtype": "type of everything that is not quantized; auto: that of the model",
    "--qformat": "format of the weights: fp8, int4_awq, int8_wo, int4_wo or full_prec here; the others are refused",
    "--kv_cache_dtype": "format of the KV cache; 16 bits when it is left out",
    "--calib_dataset": "texts for calibration: a folder with train.jsonl, one {'text': ...} a line. Nothing is downloaded",
    "--calib_size": "most texts that are read; int4_awq stops at 32",
    "--calib_max_seq_length": "tokens after which a text is cut",
    "--tokenizer_max_seq_length": "a second limit on a text's tokens; the smaller one counts",
    "--batch_size": "texts in one forward pass; more than 1 measures padding as well",
    "--awq_block_size": "input channels that share one scale, int4_awq only",
    "--quantize_lm_head": "true quantizes the last layer as well, fp8 only",
    "--tp_size": "tensor-parallel ranks, one file each",
    "--pp_size": "pipeline stages; must divide the layers",
    "--seed": "seed of random numbers",
}
IMPLEMENTED = tuple(_HELPS)


def make_parser() -> argparse.ArgumentParser:
    """The parser with the official flags that the reference implements."""
    return command_parser(SCRIPT, IMPLEMENTED, DESCRIPTION, _HELPS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script and returns its exit code: 0, 1 with the reason on standard error, 130 when
    interrupted or 143 when terminated."""
    print(banner(SCRIPT), flush=True)
    options = vars(make_parser().parse_args(argv))
    model_dir, output_dir = options.pop("model_dir"), options.pop("output_dir")
    if not model_dir:
        print("error: --model_dir is missing: give the folder of the Hugging Face model", file=sys.stderr)
        return 1
    os.environ["HF_DATASETS_OFFLINE"] = "1"  # nothing here may reach for the network
    # A terminated run must clean up behind itself; by default Python would just stop.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return exit_code(lambda: _run(model_dir, output_dir, options), output_dir)
    except (KeyboardInterrupt, SystemExit) as stop:
        what, code = ("terminated", stop.code) if isinstance(stop, SystemExit) else ("interrupted", 130)
        print(f"error: {what}; {output_dir} is as it was before", file=sys.stderr, flush=True)
        return int(code or 1)
    finally:
        signal.signal(signal.SIGTERM, before)


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
