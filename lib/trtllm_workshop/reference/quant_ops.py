"""Matrix products with quantized weights, as custom operators that sit in the exported graph.

Each operator exists twice: for tracing (shapes only) and as a plain implementation that is right on any device. On a
processor `cpu_quantized` replaces them at load by faster equal ones; on a CUDA device with FP8 `fp8_linear` calls the
tensor cores. No operator names the type of its activations, so the graph stays free of types.

Formats: FP8 is e4m3 with one scale for the matrix and one for its input (scale = amax / 448). Weight-only INT8 has one
scale per output channel, groupwise INT4 one per output channel and group of input channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trtllm_workshop.reference.attention import LIBRARY
from trtllm_workshop.reference.fp8 import scaled_product, to_e4m3

LIBRARY.define(
    "fp8_linear(Tensor x, Tensor weight, Tensor weights_scaling_factor, Tensor activation_scaling_factor, Tensor? bias) "
    "-> Tensor"
)
LIBRARY.define("weight_only_linear(Tensor x, Tensor weight, Tensor per_channel_scale, Tensor? bias) -> Tensor")
LIBRARY.define(
    "groupwise_linear(Tensor x, Tensor weight, Tensor weights_scaling_factor, Tensor? prequant_scaling_factor, "
    "Tensor? bias) -> Tensor"
)
LIBRARY.define("e4m3_round(Tensor x, Tensor scale) -> Tensor")


@torch.library.impl(LIBRARY, "e4m3_round", "CompositeExplicitAutograd")
def e4m3_round(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The values of `to_e4m3(x, scale)` in float32, not multiplied by the scale: every e4m3 value fits exactly."""
    return to_e4m3(x, scale).float()


@torch.library.impl(LIBRARY, "fp8_linear", "CompositeExplicitAutograd")
def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights_scaling_factor: torch.Tensor,
    activation_scaling_factor: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y = (e4m3(x / s_x) W^T) · s_x · s_w + b, products and sums wide, the scales afterwards.

    Args:
        x: [tokens, in], any floating type.
        weight: [out, in], float8_e4m3fn.
        weights_scaling_factor, activation_scaling_factor: [1], float32.
        bias: [out] or None.

    Returns:
        [tokens, out] in the type of x.
    """
    rounded = to_e4m3(x, activation_scaling_factor)
    return scaled_product(rounded, weight, weights_scaling_factor, activation_scaling_factor, bias, x.dtype)


@torch.library.impl(LIBRARY, "weight_only_linear", "CompositeExplicitAutograd")
def weight_only_linear(
    x: torch.Tensor, weight: torch.Tensor, per_channel_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """y = x (W · s)^T + b with W int8 [out, in] and one scale per output channel, [out]; x stays as it is."""
    plain = weight.to(x.dtype) * per_channel_scale.to(x.dtype)[:, None]
    return F.linear(x, plain, None if bias is None else bias.to(x.dtype))


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """[out, in / 2] uint8, the even input channel in the low half-byte, value plus 8 -> [out, in] int8 from -8 to 7."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).to(torch.int8) - 8
    return halves.flatten(-2)


def pack_int4(values: torch.Tensor) -> torch.Tensor:
    """The reverse of `unpack_int4`: [out, in] integers from -8 to 7 -> [out, in / 2] uint8."""
    halves = (values + 8).to(torch.uint8).unflatten(-1, (-1, 2))
    return halves[..., 0] | (halves[..., 1] << 4)


def expand_groups(packed: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix of `groupwise_linear` in a floating type: [out, in]; scales [out, groups]."""
    values = unpack_int4(packed).unflatten(-1, (scales.shape[1], -1))
    return (values.to(dtype) * scales.to(dtype)[..., None]).flatten(-2)


@torch.library.impl(LIBRARY, "groupwise_linear", "CompositeExplicitAutograd")
def groupwise_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weights_scaling_factor: torch.Tensor,
    prequant_scaling_factor: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """y = (x · p) W^T + b with W in four bits, one scale per output channel and group of input channels.

    Args:
        x: [tokens, in].
        weight: [out, in / 2], uint8, see `unpack_int4`.
        weights_scaling_factor: [out, groups].
        prequant_scaling_factor: [in], AWQ's factors, or None.
        bias: [out] or None.
    """
    if prequant_scaling_factor is not None:
        x = x * prequant_scaling_factor.to(x.dtype)
    plain = expand_groups(weight, weights_scaling_factor, x.dtype)
    return F.linear(x, plain, None if bias is None else bias.to(x.dtype))


def _shape(x: torch.Tensor, weight: torch.Tensor, *_: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


for _name in ("fp8_linear", "weight_only_linear", "groupwise_linear"):
    torch.library.impl(LIBRARY, _name, "Meta")(_shape)
torch.library.impl(LIBRARY, "e4m3_round", "Meta")(lambda x, scale: x.new_empty(x.shape, dtype=torch.float32))
