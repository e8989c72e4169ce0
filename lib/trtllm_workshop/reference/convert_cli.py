"""The command line of convert_checkpoint.py, shared by the scripts of all model families."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Sequence

from trtllm_workshop.commands import command_parser
from trtllm_workshop.reference.convert import convert_checkpoint, hf_spec
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.output_errors import output_error
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
)
_FLAGS = {LLAMA: (*_COMMON, "--n_kv_head", "--load_by_shard", "--save_config_only", "--log_level"), QWEN: _COMMON}
# tensorrt_llm.logger's names, from silent to talkative
_LOG_LEVELS = ("internal_error", "error", "warning", "info", "verbose", "debug")


def main(script: str, argv: Sequence[str] | None = None) -> int:
    """Runs the script with these arguments and returns its exit code: 0, or 1 with the reason on standard error."""
    print(banner(script), flush=True)
    args = command_parser(script, _FLAGS[script]).parse_args(argv)
    # A terminated conversion must clean up behind itself; by default Python would just stop.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        _run(script, args)
    except OSError as error:
        print(f"error: {output_error(error, '--output_dir', args.output_dir)}", file=sys.stderr, flush=True)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


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
        say=say,
    )
    say(f"{result.folder}: {result.config['architecture']}, {result.config['dtype']}, {len(result.file_sizes)} rank(s)")
    print(f"Total time of converting checkpoints: {time.strftime('%H:%M:%S', time.gmtime(time.monotonic() - started))}")


def _refuse_other_family(script: str, model_dir: str) -> None:
    architecture = hf_spec(model_dir).architecture
    if SCRIPT_OF[architecture] != script:
        raise ValueError(f"{model_dir} is a {architecture}: convert it with {SCRIPT_OF[architecture]}")
