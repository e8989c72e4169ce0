"""A Truss `config.yaml` with a `trt_llm` section, checked without Truss: what contradicts itself, and misspelt fields.

Truss accepts unknown fields silently, so a misspelt one changes nothing and nobody says so. Field names, limits and the rules about
accelerators are those of truss 0.18 (truss/base/trt_llm_config.py, truss/base/truss_config.py).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from trtllm_workshop.problem import Problem

BUILD = {
    "base_model", "checkpoint_repository", "max_seq_len", "max_batch_size", "max_num_tokens", "max_beam_width",
    "max_prompt_embedding_table_size", "gather_all_token_logits", "strongly_typed", "quantization_type",
    "quantization_config", "tensor_parallel_count", "pipeline_parallel_count", "sequence_parallel_count",
    "moe_expert_parallel_option", "plugin_configuration", "num_builder_gpus", "speculator", "lora_adapters",
    "lora_configuration", "skip_build_result",
}  # fmt: skip
RUNTIME = {
    "kv_cache_free_gpu_mem_fraction", "kv_cache_host_memory_bytes", "enable_chunked_context", "batch_scheduler_policy",
    "request_default_max_tokens", "served_model_name", "total_token_limit", "webserver_default_route",
}  # fmt: skip
QUANTIZATION = ("no_quant", "fp8", "fp8_kv", "fp8_mlp_only", "fp4", "fp4_kv", "fp4_mlp_only")
LIMITS = {"max_seq_len": (1, 1048576), "max_batch_size": (1, 2048), "max_num_tokens": (65, 1048576)}
COUNTS = ("tensor_parallel_count", "pipeline_parallel_count", "sequence_parallel_count")
TOO_OLD = ("T4", "V100")
NO_FP8 = (*TOO_OLD, "A10G", "A100")
NO_FP4 = (*NO_FP8, "L4", "L40S", "H100", "H100_40GB", "H200")


def check_truss(file: str | Path) -> list[Problem]:
    """Everything that is wrong with the `trt_llm` section (engine builder, `inference_stack: v1`); empty when nothing is.

    Raises:
        OSError: when the file cannot be read.
    """
    import yaml

    try:
        config = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as problem:
        return [_error(f"{file} is no YAML: {str(problem).splitlines()[0]}", "mend that line")]
    section = config.get("trt_llm") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return [_error(f"{file} has no section trt_llm", "write trt_llm: with build: and runtime: below it")]
    if section.get("inference_stack", "v1") != "v1":
        return [
            _error(f"inference_stack is {section['inference_stack']!r}", "only v1, the engine builder, is checked here")
        ]
    build, runtime = ({} if (part := section.get(name)) is None else part for name in ("build", "runtime"))
    wrong = [name for name, part in (("build", build), ("runtime", runtime)) if not isinstance(part, Mapping)]
    if wrong:
        return [_error(f"trt_llm.{name} is no mapping", "write its fields below it, indented") for name in wrong]
    resources = config.get("resources")
    accelerator = resources.get("accelerator") if isinstance(resources, Mapping) else None
    return [
        *_unknown("build", build, BUILD),
        *_unknown("runtime", runtime, RUNTIME),
        *_numbers(build, runtime),
        *_accelerator(build, accelerator),
    ]


def _error(message: str, fix: str) -> Problem:
    return Problem("error", message, fix)


def _unknown(name: str, part: Mapping[str, Any], known: set[str]) -> Iterator[Problem]:
    for key in part:
        if key not in known and not str(key).startswith("lora_cache_"):
            near = difflib.get_close_matches(str(key), sorted(known), n=1)
            fix = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(sorted(known))}"
            yield _error(f"trt_llm.{name} has no field {key!r}, and Truss would ignore it silently", fix)


def _whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _numbers(build: Mapping[str, Any], runtime: Mapping[str, Any]) -> Iterator[Problem]:
    for name, (least, most) in LIMITS.items():
        value = build.get(name)
        if value is not None and not (_whole(value) and least <= value <= most):
            yield _error(f"trt_llm.build.{name} is {value!r}", f"give a whole number from {least} to {most}")
    for name in COUNTS:
        value = build.get(name)
        if value is not None and not (_whole(value) and value >= 1):
            yield _error(f"trt_llm.build.{name} is {value!r}", "give a whole number of at least 1")
    longest, prompt = build.get("max_seq_len"), build.get("max_input_len")
    if _whole(longest) and _whole(prompt) and prompt > longest:
        yield _error(
            f"max_input_len is {prompt}, max_seq_len {longest}: prompt and answer together must fit",
            "make max_seq_len larger",
        )
    default = runtime.get("request_default_max_tokens")
    if _whole(longest) and _whole(default) and default >= longest:
        yield _error(
            f"request_default_max_tokens is {default}, max_seq_len {longest}: no prompt would fit beside such an answer",
            "lower request_default_max_tokens, or make max_seq_len larger",
        )
    fraction = runtime.get("kv_cache_free_gpu_mem_fraction")
    if fraction is not None and not (isinstance(fraction, int | float) and 0 < fraction <= 1):
        yield _error(f"kv_cache_free_gpu_mem_fraction is {fraction!r}", "give a share above 0 and at most 1")
    if build.get("max_beam_width") not in (None, 1):
        yield _error(f"max_beam_width is {build['max_beam_width']!r}", "only 1 is supported")
    quantization = build.get("quantization_type")
    if quantization is not None and quantization not in QUANTIZATION:
        yield _error(f"quantization_type is {quantization!r}", f"choose one of {', '.join(QUANTIZATION)}")


def _accelerator(build: Mapping[str, Any], accelerator: Any) -> Iterator[Problem]:
    if not isinstance(accelerator, str) or not accelerator:
        yield _error("resources.accelerator is missing", "name the GPU and their number, for example H100:2")
        return
    name, _, number = accelerator.partition(":")
    if number and not (number.isdigit() and int(number) > 0):
        yield _error(f"resources.accelerator is {accelerator!r}", "write the name and a number, for example H100:2")
        return
    gpus, split = int(number or 1), 1
    for field in COUNTS:
        value = build.get(field, 1)
        split *= value if _whole(value) and value >= 1 else 1
    if split != gpus:
        yield _error(
            f"the engine is split over {split} GPU{'s' * (split > 1)} ({' x '.join(COUNTS)}), accelerator {accelerator} has {gpus}",
            f"set tensor_parallel_count to {gpus}, or accelerator to {name}:{split}",
        )
    quantization = str(build.get("quantization_type", "no_quant"))
    lacking: tuple[str, ...] = (
        TOO_OLD if quantization == "no_quant" else NO_FP8 if quantization.startswith("fp8") else ()
    )
    lacking = NO_FP4 if quantization.startswith("fp4") else lacking
    if name in TOO_OLD:
        yield _error(f"accelerator {name} is too old for TensorRT-LLM's engines", "choose A10G or newer")
    elif name in lacking:
        newer = "B200" if quantization.startswith("fp4") else "L4, H100 or newer"
        yield _error(f"quantization_type {quantization} does not run on {name}", f"choose {newer}, or no_quant")
