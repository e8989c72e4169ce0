"""What single flags cannot show: values that contradict each other, have no effect, or need another flag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trtllm_workshop.build_requests import requested_but_ignored
from trtllm_workshop.checkpoint import read_config
from trtllm_workshop.command_facts import Command
from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.sampling_check import check_sampling
from trtllm_workshop.shell_words import is_placeholder

Values = Mapping[str, Sequence[str]]

PYTORCH_IS_DEFAULT = (
    "since 1.0 the default backend is PyTorch, which loads Hugging Face folders and makes no engine file; "
    "an engine is only served by the TensorRT backend"
)


def check_rules(entry: Command, values: Values, positionals: Sequence[str], partial: bool = False) -> list[Problem]:
    """Problems between the flags of one command line; `partial` skips what depends on flags that may still follow."""
    rule = _RULES.get(entry.name) or _RULES.get(entry.stage)
    return [] if rule is None else list(rule(entry, values, positionals, partial))


def _text(values: Values, name: str) -> str | None:
    given = values.get(name)
    return None if not given or is_placeholder(given[0]) else given[0]


def _int(values: Values, name: str, default: int | None = None) -> int | None:
    text = _text(values, name)
    return int(text) if text is not None else (None if name in values else default)


def looks_like_engine(path: str) -> bool:
    """Whether a path or a placeholder's name means an engine folder; a folder that exists is looked into."""
    folder = Path(path)
    if not is_placeholder(path) and folder.is_dir():
        return any(folder.glob("rank*.engine"))
    last = [part for part in path.strip("{}$").replace("\\", "/").lower().split("/") if part]
    return any(part.startswith("engine") or part.endswith(("_engine", ".engine", "_engine_dir")) for part in last)


def _build(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    found = []
    inputs, total = _int(values, "--max_input_len"), _int(values, "--max_seq_len")
    if inputs is not None and total is not None and inputs >= total:
        message = f"--max_input_len {inputs} leaves no room for an answer in --max_seq_len {total}"
        found.append(error(message, f"--max_seq_len counts prompt and answer: give more than {inputs}"))
    if _text(values, "--multiple_profiles") == "enable" and "--opt_num_tokens" in values:
        found.append(
            error("--multiple_profiles enable does not go with --opt_num_tokens", "leave out --opt_num_tokens")
        )
    if "--gather_context_logits" in values and (_int(values, "--max_draft_len") or 0) > 0:
        fix = "leave one of them out"
        found.append(error("--gather_context_logits does not go with --max_draft_len above 0", fix))
    if _text(values, "--streamingllm") == "enable":
        found.append(error("--streamingllm enable is no longer supported", "leave it out"))
    if _text(values, "--user_buffer") == "enable" and values.get("--reduce_fusion", ["disable"])[0] == "disable":
        found.append(error("--user_buffer enable needs --reduce_fusion enable", "add --reduce_fusion enable"))
    if _text(values, "--gemm_swiglu_plugin") == "fp8" and _text(values, "--use_fused_mlp") == "disable":
        found.append(error("--gemm_swiglu_plugin fp8 needs --use_fused_mlp enable", "leave --use_fused_mlp out"))
    if "--checkpoint_dir" in values and "--model_config" in values:
        found.append(warning("--model_config is ignored next to --checkpoint_dir", "leave --model_config out"))
    return found + _checkpoint_requests(values)


def _checkpoint_requests(values: Values) -> list[Problem]:
    """P69: flags that this checkpoint's quantization makes void; only for a checkpoint that is there to be read."""
    folder = _text(values, "--checkpoint_dir")
    try:
        config = read_config(folder) if folder else {}
        mode = QuantMode.from_config(config) if "architecture" in config else None
    except (OSError, ValueError):
        return []  # the build says what is wrong with the folder
    if mode is None:
        return []
    given = {name: text for name in values if "context_fmha" in name and (text := _text(values, name))}
    unknown = [name for name in values if "context_fmha" in name and name not in given]
    return [] if unknown else requested_but_ignored(given, mode)


def _quantize(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    found = []
    form = _text(values, "--qformat") or (None if "--qformat" in values else "full_prec")
    if form is None or partial:
        return []
    if "--awq_block_size" in values and "awq" not in form:
        found.append(warning(f"--awq_block_size has no effect with --qformat {form}", "leave it out"))
    if "--quantize_lm_head" in values and form != "fp8":
        found.append(error(f"--quantize_lm_head goes with --qformat fp8 only, not with {form}", "leave it out"))
    uncalibrated = form in ("full_prec", "int8_wo", "int4_wo") and "--kv_cache_dtype" not in values
    for name in ("--calib_dataset", "--calib_size", "--calib_max_seq_length"):
        if uncalibrated and name in values:
            message = f"{name} has no effect: --qformat {form} without --kv_cache_dtype measures nothing"
            found.append(warning(message, "leave it out, or give --kv_cache_dtype fp8"))
    return found


def _convert(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    found = []
    if "--weight_only_precision" in values and "--use_weight_only" not in values and not partial:
        message = "--weight_only_precision has no effect without --use_weight_only"
        found.append(warning(message, "add --use_weight_only"))
    ways = [name for name in ("--use_weight_only", "--use_fp8", "--use_nvfp4", "--smoothquant") if name in values]
    if len(ways) > 1:
        found.append(warning(f"only {ways[0]} counts, {', '.join(ways[1:])} is ignored", "give one of them"))
    return found


def _run(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    given: dict[str, float | int] = {}
    for name in ("--temperature", "--top_k", "--top_p", "--min_p", "--repetition_penalty"):
        flag = entry.find(name)
        text = _text(values, name)
        if flag is None or (name in values and text is None):
            return []  # an unknown value decides whether the others have an effect
        if text is not None:
            given[name[2:]] = int(text) if flag.type == "int" else float(text)
    given.setdefault("top_k", 1)  # the default of run.py
    found = check_sampling(**given)
    length = _int(values, "--max_output_len")
    if length is not None and length < 1:
        found.append(error(f"--max_output_len {length}: nothing would be generated", "give 1 or more"))
    return [problem for problem in found if problem.severity == "error" or not partial]


def _serve(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    backend = values.get("--backend", ["pytorch"])[0]
    if positionals and looks_like_engine(positionals[0]) and backend not in ("tensorrt", "trt"):
        if is_placeholder(backend):
            return []
        message = f"{positionals[0]} is an engine, but the backend is {backend}: {PYTORCH_IS_DEFAULT}"
        return [error(message, "add --backend tensorrt")]
    return []


def _bench(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    backend = values.get("--backend", ["pytorch"])[0]
    found = []
    if "--engine_dir" in values and backend in ("pytorch", "_autodeploy") and not partial:
        message = f"--engine_dir is given, but the backend is {backend}: {PYTORCH_IS_DEFAULT}"
        found.append(error(message, "add --backend tensorrt"))
    if backend == "tensorrt" and "--max_seq_len" in values and entry.name == "trtllm-bench throughput":
        found.append(error("--max_seq_len is refused with --backend tensorrt", "the engine fixes it: leave it out"))
    return found


def _bench_build(entry: Command, values: Values, positionals: Sequence[str], partial: bool) -> list[Problem]:
    found = []
    ways = {
        "--dataset": "--dataset" in values,
        "--max_batch_size with --max_num_tokens": "--max_batch_size" in values or "--max_num_tokens" in values,
        "--target_input_len with --target_output_len": not {"--target_input_len", "--target_output_len"}.isdisjoint(
            values
        ),
    }
    chosen = [name for name, there in ways.items() if there]
    if len(chosen) > 1:
        found.append(error(f"{' and '.join(chosen)} exclude each other", "keep one way to choose the sizes"))
    if "--dataset" not in values and "--max_seq_len" not in values and not partial:
        found.append(error("--max_seq_len is needed when there is no --dataset", "add --max_seq_len VALUE"))
    tp, pp = _int(values, "--tp_size", 1), _int(values, "--pp_size", 1)
    if tp is not None and pp is not None and tp * pp > 8:
        found.append(error(f"--tp_size {tp} x --pp_size {pp} is above 8", "use fewer GPUs"))
    return found


_RULES: dict[str, Callable[[Command, Values, Sequence[str], bool], list[Problem]]] = {
    "trtllm-build": _build,
    "trtllm-bench build": _bench_build,
    "trtllm-bench throughput": _bench,
    "trtllm-bench latency": _bench,
    "convert": _convert,
    "quantize": _quantize,
    "run": _run,
    "serve": _serve,
}
