"""The command line of convert_checkpoint.py, shared by the scripts of all model families."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trtllm_workshop.commands import command_parser
from trtllm_workshop.reference.convert import convert_checkpoint, hf_spec
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.output_errors import exit_code
from trtllm_workshop.reference.version import banner

LLAMA = "examples/models/core/llama/convert_checkpoint.py"
QWEN = "examples/models/core/qwen/convert_checkpoint.py"
SCRIPT_OF = {"LlamaForCausalLM": LLAMA, "MistralForCausalLM": LLAMA, "Qwen2ForCausalLM": QWEN}

_COMMON = (
    "--model_dir",
    "--output_dir",
    "--dtype",
    "--tp_size",
    "--pp_size",
    "--workers",
    "--load_model_on_cpu",
    "--use_parallel_embedding",
    "--embedding_sharding_dim",
    "--use_weight_only",
    "--weight_only_precision",
    "--int8_kv_cache",
)
_FLAGS = {
    LLAMA: (
        *_COMMON,
        "--use_fp8",
        "--fp8_kv_cache",
        "--n_kv_head",
        "--load_by_shard",
        "--save_config_only",
        "--log_level",
    ),
    QWEN: _COMMON,
}
_WEIGHT_ONLY = {"int8": "W8A16", "int4": "W4A16"}
# What 1.2.1 does with these, and why it is not repeated here.
_CALIBRATED = {
    "use_fp8": ("sets the algorithm and measures nothing, so the scales would be missing", "--qformat fp8"),
    "int8_kv_cache": ("needs scales that are measured on texts", "--kv_cache_dtype int8"),
    "fp8_kv_cache": ("writes the scale 1.0 for every layer without measuring", "--kv_cache_dtype fp8"),
}
# tensorrt_llm.logger's names, from silent to talkative
_LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug")


def main(script: str, argv: Sequence[str] | None = None) -> int:
    """Runs the script with these arguments and returns its exit code: 0, or 1 with the reason on standard error."""
    print(banner(script), flush=True)
    args = command_parser(script, _FLAGS[script]).parse_args(argv)
    # A terminated conversion must clean up behind itself; by default Python would just stop.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    return exit_code(lambda: _run(script, args), args.output_dir)


def _run(script: str, args: object) -> None:
    options = vars(args)
    level = options.get("log_level", "info")
    if level not in _LOG_LEVELS:
        raise ValueError(f"--log_level {level} is not one of {', '.join(_LOG_LEVELS)}")
    if not options["model_dir"]:
        raise ValueError("--model_dir is missing: give the folder of the Hugging Face model")
    loudness = _LOG_LEVELS.index(level)

    def say(text: str) -> None:
        if loudness >= _LOG_LEVELS.index("warning" if text.startswith("warning: ") else "info"):
            sys.stdout.write(text + "\n")  # one write: lines of several ranks do not run into each other
            sys.stdout.flush()

    quant_algo = _weight_only(options, say)
    started = time.monotonic()
    _refuse_other_family(script, options["model_dir"])
    result = convert_checkpoint(
        options["model_dir"],
        options["output_dir"],
        dtype=options["dtype"],
        sharding=Sharding(
            options["tp_size"],
            options["pp_size"],
            options["use_parallel_embedding"],
            options["embedding_sharding_dim"],
        ),
        workers=options["workers"],
        n_kv_head=options.get("n_kv_head"),
        save_config_only=options.get("save_config_only", False),
        quant_algo=quant_algo,
        say=say,
    )
    say(f"{result.folder}: {result.config['architecture']}, {result.config['dtype']}, {len(result.file_sizes)} rank(s)")
    print(f"Total time of converting checkpoints: {time.strftime('%H:%M:%S', time.gmtime(time.monotonic() - started))}")


def _weight_only(options: Mapping[str, Any], say: Callable[[str], None]) -> str | None:
    """The checkpoint's quant_algo; the tensors stay 16-bit, and trtllm-build quantizes them, as in 1.2.1."""
    for name, (reason, instead) in _CALIBRATED.items():
        if options.get(name):
            raise ValueError(f"--{name} {reason}: run examples/quantization/quantize.py {instead} instead")
    precision = options["weight_only_precision"]
    if precision not in _WEIGHT_ONLY:
        raise ValueError(
            f"--weight_only_precision {precision} reads weights that GPTQ has quantized already, which the reference "
            "toolchain does not: take int8 or int4"
        )
    if options["use_weight_only"]:
        algorithm = _WEIGHT_ONLY[precision]
        say(f"weight-only {precision} ({algorithm}): the checkpoint stays 16-bit, trtllm-build quantizes the weights")
        return algorithm
    if precision != "int8":
        say(f"warning: --weight_only_precision {precision} has no effect without --use_weight_only")
    return None


def _refuse_other_family(script: str, model_dir: str) -> None:
    architecture = hf_spec(model_dir).architecture
    if SCRIPT_OF[architecture] != script:
        raise ValueError(f"{model_dir} is a {architecture}: convert it with {SCRIPT_OF[architecture]}")
