"""Which quantizations a build can do on this device, in trtllm-build's own words.

Read from tensorrt_llm/builder.py and tensorrt_llm/plugin/plugin.py (paged context FMHA and 8-bit caches), and from what
people report of TensorRT ("Networks with FP8 precision require hardware with FP8 support").
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.build_output import BuildError
from trtllm_workshop.reference.configs import PluginConfig

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def cuda_capability() -> tuple[int, int] | None:
    """The compute capability of the device that engines are built for here; None on a processor."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def check_precision(
    mode: QuantMode,
    plugins: PluginConfig,
    capability: tuple[int, int] | None,
    log: Callable[[str], object],
) -> None:
    """Raises BuildError for a combination that TensorRT-LLM refuses; logs what it would warn about."""
    paged, cache = plugins.use_paged_context_fmha, mode.kv_cache_quant_algo
    if mode.quant_algo == "FP8" and capability is not None and capability < FP8_CAPABILITY:
        raise BuildError(
            "Networks with FP8 precision require hardware with FP8 support: this GPU has compute capability "
            f"{capability[0]}.{capability[1]}, FP8 matrix products need 8.9 (Ada) or 9.0 (Hopper). Quantize weights only "
            "(--qformat int8_wo or int4_awq); an FP8 KV cache (--kv_cache_dtype fp8) works with those"
        )
    if cache == "INT8" and paged:
        raise BuildError(
            "Paged Context FMHA doesn't work with int8 kv cache currently.; add --use_paged_context_fmha disable, or "
            "quantize with --kv_cache_dtype fp8"
        )
    if cache == "FP8" and paged and mode.quant_algo != "FP8":
        raise BuildError(
            "FP8 Paged Context FMHA only works with fp8 quantization workflow currently.; add "
            f"--use_paged_context_fmha disable: the weights are {mode.quant_algo or '16-bit'}, only the KV cache is FP8"
        )
    if cache == "FP8" and paged:
        log("[TRT-LLM] [W] FP8 Context FMHA is enabled by default to support FP8 Paged Context FMHA.")
    if mode.quant_algo == "FP8" and capability is None:
        log("[TRT-LLM] [I] FP8 on a processor: e4m3 values multiplied in float32, exact and not faster")
