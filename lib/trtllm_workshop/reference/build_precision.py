"""Which quantizations a build can do on this device, in trtllm-build's own words.

Read in the repository NVIDIA/TensorRT-LLM: tensorrt_llm/builder.py, what becomes of paged and FP8 context attention and of
INT8 on Blackwell, at commit 008b2b8d23af95e4e19fa6f354f9c5f6349b2bfc (of the time of 0.20) and in a state of late 2025, which
both say the same, word for word; 1.2.1 is later, and the file was not read at its tag. tensorrt_llm/plugin/plugin.py at commit
c20322ffd3dc0740ca530c9fad989b22e64f6e06: both switches are on by default. Further sources: what people report of TensorRT
("Networks with FP8 precision require hardware with FP8 support"), and what PyTorch's FP8 product asks of its factors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.build_output import BuildError
from trtllm_workshop.reference.configs import PluginConfig

FP8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0
NO_INT8 = ((10, 0), (12, 0))  # from the first (B200) up to the second, which is excluded (RTX 50)
FP8_MULTIPLE = 16  # the tensor cores' FP8 product takes matrices whose both sizes are multiples of it


def cuda_capability() -> tuple[int, int] | None:
    """The compute capability of the device that engines are built for here; None on a processor."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def check_precision(
    mode: QuantMode,
    plugins: PluginConfig,
    capability: tuple[int, int] | None,
    log: Callable[[str], object],
) -> PluginConfig:
    """The plugins with which the engine is built: switches that this quantization makes void are off.

    Logs what TensorRT-LLM warns about, for quantized checkpoints only (it says the first line for 16-bit weights as well).

    Raises:
        BuildError: for a quantization that does not run on a GPU of this compute capability.
    """
    _check_device(mode, capability)
    cache, fp8, paged = mode.kv_cache_quant_algo, mode.quant_algo == "FP8", plugins.use_paged_context_fmha
    if not plugins.context_fmha:
        if paged and mode.name:
            log("[TRT-LLM] [W] Context FMHA is disabled, FP8 Context FMHA and Paged Context FMHA are disabled.")
        paged = False
    elif not fp8 and mode.name:
        log(
            "[TRT-LLM] [W] FP8 Context FMHA is disabled because it must be used together with the fp8 quantization workflow."
        )
        if paged and cache == "FP8":
            log("[TRT-LLM] [W] FP8 Paged Context FMHA is disabled because FP8 context FMHA is disabled.")
            paged = False
    elif fp8 and paged and cache != "FP8":
        log(
            "[TRT-LLM] [W] FP8 Paged Context FMHA is disabled because it must be used together with fp8 KV Cache."
        )  # the FP8 arithmetic only: paged attention stays, on a 16-bit cache
    if paged and cache == "INT8":
        log("[TRT-LLM] [W] Paged Context FMHA is disabled because it doesn't work with int8 kv cache currently.")
        paged = False
    if fp8 and capability is None:
        log("[TRT-LLM] [I] FP8 on a processor: e4m3 values multiplied in float32, exact and not faster")
    return plugins.model_copy(update={"use_paged_context_fmha": paged})


def _check_device(mode: QuantMode, capability: tuple[int, int] | None) -> None:
    if capability is None:
        return
    here = f"this GPU has compute capability {capability[0]}.{capability[1]}"
    if mode.quant_algo == "FP8" and capability < FP8_CAPABILITY:
        raise BuildError(
            f"Networks with FP8 precision require hardware with FP8 support: {here}, FP8 matrix products need 8.9 (Ada) or "
            "9.0 (Hopper). Quantize weights only (--qformat int8_wo or int4_awq); an FP8 KV cache (--kv_cache_dtype fp8) "
            "works with those"
        )
    integer = mode.quant_algo in ("W8A16", "W4A16", "W4A16_AWQ") or mode.kv_cache_quant_algo == "INT8"
    if integer and NO_INT8[0] <= capability < NO_INT8[1]:
        raise BuildError(
            f"INT8/INT4 quantization is not supported on SM>=100.: {here}, the checkpoint is {mode.name}. Quantize with "
            "--qformat fp8 --kv_cache_dtype fp8"
        )


def check_widths(spec: ModelSpec, mode: QuantMode, capability: tuple[int, int] | None) -> None:
    """Raises BuildError when an FP8 layer of the engine has a size that the GPU's FP8 product does not take.

    A processor (no compute capability) multiplies matrices of any size.
    """
    if capability is None or mode.quant_algo != "FP8":
        return
    heads = spec.num_attention_heads * spec.head_size
    shapes = {
        "attention.qkv": (spec.qkv_rows, spec.hidden_size),
        "attention.dense": (spec.hidden_size, heads),
        "mlp.fc and mlp.gate": (2 * spec.intermediate_size, spec.hidden_size),  # one matrix in the engine
        "mlp.proj": (spec.hidden_size, spec.intermediate_size),
        "lm_head": (spec.vocab_size, spec.hidden_size),
    }
    odd = []
    for name, (outputs, inputs) in shapes.items():
        module = name if name == "lm_head" else f"transformer.layers.0.{name.split()[0]}"
        if mode.algorithm_of(module) == "FP8" and (outputs % FP8_MULTIPLE or inputs % FP8_MULTIPLE):
            odd.append(f"{name} [{outputs}, {inputs}]")
    if odd:
        raise BuildError(
            f"FP8 matrix products of a GPU need sizes that are multiples of {FP8_MULTIPLE}, these are [outputs, inputs]: "
            f"{', '.join(odd)}. Quantize weights only (--qformat int8_wo; --kv_cache_dtype fp8 works with it), or keep the "
            "model in 16 bits"
        )
