"""The formats of quantize.py: what each makes of weights and KV cache, and why some are refused. No torch here.

Facts: tensorrt_llm/quantization/quantize_by_modelopt.py (which formats calibrate, the cap for AWQ, the lm_head switch)
and nvidia-modelopt 0.37 (the configurations), which TensorRT-LLM 1.2.1 pins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trtllm_workshop.model_spec import ModelSpec

AWQ_CALIB_SIZE = 32  # the search passes over the data twice and needs little of it


class QuantizeError(ValueError):
    """Why a model cannot be quantized as asked: what was wrong, the value, and what to do next."""


@dataclass(frozen=True)
class Format:
    """One --qformat: the checkpoint's `quant_algo`, and whether the weights' scales need calibration data."""

    name: str
    quant_algo: str | None
    calibrates: bool


FORMATS = {
    "fp8": Format("fp8", "FP8", True),
    "int4_awq": Format("int4_awq", "W4A16_AWQ", True),
    "int8_wo": Format("int8_wo", "W8A16", False),
    "int4_wo": Format("int4_wo", "W4A16", False),
    "full_prec": Format("full_prec", None, False),
}
_REFUSED = {
    "int8_sq": "SmoothQuant's INT8 products of weights and activations are not in the reference engine: take int8_wo",
    "w4a8_awq": "INT4 weights with FP8 activations are not in the reference engine: take int4_awq or fp8",
    "fp8_pc_pt": "FP8 per channel and token is not in the reference engine: take fp8, with one scale per tensor",
    "nvfp4": "NVFP4 needs CUDA to quantize and a Blackwell GPU to run: take int4_awq for four bits",
}
KV_CACHE_DTYPES = ("fp8", "int8")


def find_format(name: str) -> Format:
    """The format with this name. Raises QuantizeError for one that the reference engine does not run."""
    if name in FORMATS:
        return FORMATS[name]
    reason = _REFUSED.get(name, f"the reference toolchain knows {', '.join(FORMATS)}")
    raise QuantizeError(f"--qformat {name} is refused: {reason}")


def check_block_size(spec: ModelSpec, tp_size: int, block: int) -> None:
    """Raises QuantizeError when groups of `block` input channels do not divide every linear's input on one rank."""
    widths = {
        "hidden size": spec.hidden_size,
        "attention heads x head size per rank": spec.num_attention_heads * spec.head_size // tp_size,
        "intermediate size per rank": spec.intermediate_size // tp_size,
    }
    bad = {what: width for what, width in widths.items() if block < 1 or width % block}
    if not bad:
        return
    fitting = [size for size in (128, 64, 32, 16, 8) if all(width % size == 0 for width in widths.values())]
    what, width = next(iter(bad.items()))
    raise QuantizeError(
        f"--awq_block_size {block} does not divide {what} {width}: "
        + (
            f"take {' or '.join(map(str, fitting[:3]))}"
            if fitting
            else "no usual block size does, take --qformat int8_wo"
        )
    )


def modelopt_config(form: Format, kv_cache_dtype: str | None, block: int, quantize_lm_head: bool) -> dict[str, Any]:
    """The configuration for ModelOpt's `quantize`: which quantizers are on, with how many bits and which scales."""
    on: dict[str, Any]
    algorithm: Any = "max"
    if form.name == "fp8":
        on = {"num_bits": (4, 3), "axis": None, "enable": True}
        rules = {"*weight_quantizer": on, "*input_quantizer": dict(on)}
    elif form.name == "int4_awq":
        on = {"num_bits": 4, "block_sizes": {-1: block, "type": "static"}, "enable": True}
        rules = {"*weight_quantizer": on, "*input_quantizer": {"enable": False}}
        algorithm = {"method": "awq_lite", "alpha_step": 0.1}
    else:
        rules = {"*weight_quantizer": {"enable": False}, "*input_quantizer": {"enable": False}}
    rules["*output_quantizer"] = {"enable": False}
    if not quantize_lm_head:
        rules["*lm_head*"] = {"enable": False}
    if kv_cache_dtype:
        # These sit at the call of the attention: keys are measured after the rotation, as the cache holds them.
        bits = (4, 3) if kv_cache_dtype == "fp8" else 8
        rules["*[kv]_bmm_quantizer"] = {"num_bits": bits, "axis": None, "enable": True}
    rules["default"] = {"enable": False}
    return {"quant_cfg": rules, "algorithm": algorithm}
