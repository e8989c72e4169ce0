"""Weight-only quantization at build: int8 or int4 per output channel, without calibration.

Source of the rule (symmetric, scale = amax / 2^(bits - 1), values clamped to the type's range):
NVIDIA/TensorRT-LLM, cpp/tensorrt_llm/kernels/cutlass_kernels/cutlass_preprocessors.cpp, symmetric_quantize.
"""

from __future__ import annotations

import torch


def per_channel_scale(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """One scale per output channel: [out] in the weight's type, for weight [out, in].

    Rounded to eight significant bits, so that float16, bfloat16 and float32 kernels all multiply by the same number. A
    channel of zeros has the scale 1.
    """
    scale = (weight.abs().amax(dim=1).float() / 2 ** (bits - 1)).to(torch.bfloat16).to(weight.dtype)
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def quantize_per_channel(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers of a weight [out, in] at `per_channel_scale(weight, bits)`, as int8 from -2^(bits-1) on."""
    most = 2 ** (bits - 1)
    scale = per_channel_scale(weight, bits).float()
    return (weight.float() / scale[:, None]).round_().clamp_(-most, most - 1).to(torch.int8)
