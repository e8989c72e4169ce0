"""FP8 in the engine: rounding to e4m3, for activations and for cached keys and values, and products of what is rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trtllm_workshop.quant_mode import E4M3_MAX

# Fast accumulation keeps fewer bits of the tensor cores' sums. Measured on an H200 with 8,000 tokens and the layers of Llama 3
# 8B and TinyLlama, against float64: 3 to 6% less time, and relative errors of 8e-4 (2,048 inputs) to 2.9e-3 (14,336) in the place
# of 1.3e-4. Rounding a result to bfloat16 makes 1.7e-3, rounding the inputs to e4m3 far more.
FAST_ACCUMULATION = True


def to_e4m3(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x / scale as float8_e4m3fn, round to nearest even; what lies outside ±448 is clamped (torch's cast would not).

    x: any shape; scale: [1], float32.
    """
    return (x.float() * scale.reciprocal()).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def scaled_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    fast: bool = FAST_ACCUMULATION,
) -> torch.Tensor:
    """(x W^T) · scale · weight_scale + bias of e4m3 values: by the tensor cores on CUDA, in float32 elsewhere.

    Args:
        x: [tokens, in], float8_e4m3fn.
        weight: [out, in], float8_e4m3fn; on CUDA both sizes are multiples of 16.
        weight_scale, scale: [1], float32.
        bias: [out] or None.
        dtype: of the result, [tokens, out].
        fast: whether the tensor cores may keep sums in fewer bits.
    """
    if x.device.type != "cuda":
        wide = F.linear(x.float(), weight.float()) * (weight_scale * scale)
        return (wide if bias is None else wide + bias.float()).to(dtype)
    half = dtype in (torch.float16, torch.bfloat16)  # the kernel adds a bias in 16 bits only
    out = torch._scaled_mm(
        x,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        bias=bias.to(dtype) if half and bias is not None else None,
        out_dtype=dtype,
        use_fast_accum=fast,
    )
    return out if half or bias is None else out + bias
