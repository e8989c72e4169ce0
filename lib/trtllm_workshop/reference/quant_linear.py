"""The linear layers of the decoder graph: plain, FP8, weight-only INT8 and groupwise INT4, all y = x W^T + b."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference import quant_ops  # noqa: F401 - registers the operators

OPS = torch.ops.trtllm_workshop


def parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """A weight without a value, to be filled from the engine file."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """W of shape [out, in] in the model's type, as stored in checkpoints."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self._weights(inputs, outputs, dtype)
        self.bias = parameter(outputs, dtype=dtype) if bias else None

    def _weights(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.weight = parameter(outputs, inputs, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Fp8Linear(Linear):
    """W in e4m3, one scale for W and one, from calibration, for x."""

    def _weights(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.weight = parameter(outputs, inputs, dtype=torch.float8_e4m3fn)
        self.weights_scaling_factor = parameter(1, dtype=torch.float32)
        self.activation_scaling_factor = parameter(1, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scales = (self.weights_scaling_factor, self.activation_scaling_factor)
        return OPS.fp8_linear(x, self.weight, *scales, self.bias)


class WeightOnlyLinear(Linear):
    """W in int8 with one scale per output channel."""

    def _weights(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        self.weight = parameter(outputs, inputs, dtype=torch.int8)
        self.per_channel_scale = parameter(outputs, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return OPS.weight_only_linear(x, self.weight, self.per_channel_scale, self.bias)


class GroupwiseLinear(nn.Module):
    """W in four bits, one scale per output channel and group; with `prequant` also AWQ's factors of the input."""

    def __init__(
        self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool, group_size: int, prequant: bool
    ) -> None:
        super().__init__()
        self.weight = parameter(outputs, inputs // 2, dtype=torch.uint8)
        self.weights_scaling_factor = parameter(outputs, inputs // group_size, dtype=torch.float32)
        self.prequant_scaling_factor = parameter(inputs, dtype=dtype) if prequant else None
        self.bias = parameter(outputs, dtype=dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factors = (self.weights_scaling_factor, self.prequant_scaling_factor)
        return OPS.groupwise_linear(x, self.weight, *factors, self.bias)


def make_linear(
    mode: QuantMode, module: str, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False
) -> nn.Module:
    """The layer that `mode` asks for under this module name (the checkpoint's, such as `transformer.layers.0.mlp.fc`)."""
    algorithm = mode.algorithm_of(module)
    if algorithm == "FP8":
        return Fp8Linear(inputs, outputs, dtype, bias)
    if algorithm == "W8A16":
        return WeightOnlyLinear(inputs, outputs, dtype, bias)
    if algorithm == "W4A16":
        return GroupwiseLinear(inputs, outputs, dtype, bias, inputs, prequant=False)
    if algorithm == "W4A16_AWQ":
        return GroupwiseLinear(inputs, outputs, dtype, bias, mode.group_size, prequant=True)
    return Linear(inputs, outputs, dtype, bias)
