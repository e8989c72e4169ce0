"""Which flags of a trtllm-build command line are asked for and have no effect, or stop the build, on a given GPU.

The builder only logs a warning when it drops such a flag, and the line is lost among hundreds. Where that was read:
`reference/build_precision.py`. Users' threads: NVIDIA/TensorRT-LLM 1864, 2855.
"""

from __future__ import annotations

from collections.abc import Mapping

from trtllm_workshop.precision import fp8_support, parse_capability, precision_support
from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.quant_mode import QuantMode

_PAGED, _FP8, _FMHA = "use_paged_context_fmha", "use_fp8_context_fmha", "context_fmha"


def requested_but_ignored(
    build_args: Mapping[str, str], mode: QuantMode, compute_capability: str | None = None
) -> list[Problem]:
    """Problems of the flags that the user gave, for a checkpoint quantized like `mode`.

    `build_args` maps flags (with or without dashes) to enable or disable; what is not in it has its default, and a default
    that has no effect is not reported. A warning means that the flag will be ignored, an error that the build will stop.
    `compute_capability` is text such as "8.0"; None leaves out what depends on the GPU.
    """
    given = {name.lstrip("-"): value for name, value in build_args.items()}
    weights, cache = mode.quant_algo or "16-bit", mode.kv_cache_quant_algo
    attention = given.get(_FMHA, "enable") == "enable"
    paged = attention and given.get(_PAGED, "enable") == "enable"
    gpu = fp8_support(compute_capability)
    found: list[Problem] = []
    if mode.quant_algo == "FP8" and gpu.supported is False:
        found.append(error(f"FP8 weights do not run here: {gpu.reason}", "quantize again with one of these formats"))
    integer = parse_capability(compute_capability) and not precision_support(compute_capability)["int8"].supported
    if integer and (mode.quant_algo in ("W8A16", "W4A16", "W4A16_AWQ") or cache == "INT8"):
        message = f"{mode.name} does not run here: {precision_support(compute_capability)['int8'].reason}"
        found.append(error(message, "quantize with --qformat fp8 --kv_cache_dtype fp8, or keep 16 bits"))
    if not attention:
        for name in (_PAGED, _FP8):
            if given.get(name) == "enable":
                message = f"--{name} enable is ignored: --context_fmha is disable, and it belongs to that attention"
                found.append(warning(message, f"leave --{name} or --context_fmha out"))
        return found
    if given.get(_FP8) == "enable":
        ignored = f"--{_FP8} enable is ignored"
        if mode.quant_algo != "FP8":
            found.append(
                warning(f"{ignored}: the weights are {weights}, it needs FP8 weights", "quantize with --qformat fp8")
            )
        elif gpu.supported is False:
            found.append(warning(f"{ignored}: {gpu.reason}", f"leave --{_FP8} out"))
        elif paged and cache != "FP8":
            message = f"{ignored}: with --{_PAGED} it reads the KV cache, which is {cache or '16-bit'} and not FP8"
            found.append(warning(message, f"quantize with --kv_cache_dtype fp8, or give --{_PAGED} disable"))
    elif (
        given.get(_FP8) == "disable"
        and paged
        and (mode.quant_algo, cache) == ("FP8", "FP8")
        and gpu.supported is not False
    ):
        message = f"--{_FP8} disable is ignored: --{_PAGED} with FP8 weights and an FP8 KV cache switches it on again"
        found.append(warning(message, f"give --{_PAGED} disable as well, or leave it out"))
    if given.get(_PAGED) == "enable" and cache == "INT8":
        message = f"--{_PAGED} enable is ignored: it does not work with an INT8 KV cache"
        found.append(warning(message, f"leave --{_PAGED} out, or quantize with --kv_cache_dtype fp8"))
    elif given.get(_PAGED) == "enable" and cache == "FP8" and mode.quant_algo != "FP8":
        message = f"--{_PAGED} enable is ignored: with an FP8 KV cache it needs FP8 weights, these are {weights}"
        found.append(warning(message, f"leave --{_PAGED} out, or quantize with --qformat fp8"))
    return found


def explain_requests(build_args: Mapping[str, str], mode: QuantMode, compute_capability: str | None = None) -> str:
    """The problems as text, one line each, or one line that says there are none."""
    found = requested_but_ignored(build_args, mode, compute_capability)
    return "\n".join(map(str, found)) or "every flag that was asked for has its effect"
