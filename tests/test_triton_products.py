"""Products of a single row of activations, against float32 products of the same values."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from triton_device import CUDA, DEVICE, TYPES, require_triton  # noqa: E402

require_triton()

from torch.nn import functional as F  # noqa: E402
from trtllm_workshop.reference import triton_products  # noqa: E402
from trtllm_workshop.reference.fp8 import to_e4m3  # noqa: E402

SIZES = [(10, 1024), (13, 1500), (7, 96), (6, 2048)] + ([(6144, 4096), (28672, 4096), (4096, 14336)] if CUDA else [])
# Up to four values are rounded on the way (fc, SiLU, gate, the product), each by at most 4.9e-4 (float16) or 3.9e-3 (bfloat16).
TOLERANCE = {"float16": 2e-3, "bfloat16": 1.2e-2}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_a_row(kind: str, quantized: bool, gated: bool, biased: bool, size: tuple[int, int]) -> None:
    outputs, inputs = size[0] * (2 if gated else 1), size[1]
    dtype, generator = getattr(torch, kind), torch.Generator().manual_seed(outputs + inputs)
    x, weight = torch.randn(1, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator) * 0.05
    bias = torch.randn(outputs, generator=generator).to(dtype).to(DEVICE) if biased else None
    scales = (
        (torch.tensor([0.2 / 448], device=DEVICE), torch.tensor([4.0 / 448], device=DEVICE))
        if quantized
        else (None, None)
    )
    if quantized:
        x, weight = to_e4m3(x.to(DEVICE), scales[1]), to_e4m3(weight.to(DEVICE), scales[0])
    else:
        x, weight = x.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE)
    wanted = F.linear(x.double(), weight.double()) * (scales[0].double() * scales[1].double() if quantized else 1.0)
    wanted = wanted if bias is None else wanted + bias.double()
    if gated:
        fc, gate = wanted.chunk(2, dim=-1)
        wanted = F.silu(fc) * gate
    got = triton_products.row_product(x, weight, bias, *scales, dtype, gated)
    assert got.dtype == dtype and got.shape == wanted.shape
    assert float((got.double() - wanted).norm() / wanted.norm()) < TOLERANCE[kind]


@pytest.mark.skipif(not CUDA, reason="the interpreter's rounding to e4m3 loses carries: needs a CUDA GPU")
@pytest.mark.parametrize("gated", [False, True])
def test_a_result_in_e4m3_is_the_rounded_16_bit_result(gated: bool) -> None:
    x, weight = torch.randn(1, 2048, device=DEVICE).bfloat16(), torch.randn(512, 2048, device=DEVICE).bfloat16()
    scale, arguments = torch.tensor([0.3], device=DEVICE), (None, None, None, torch.bfloat16, gated)
    plain = triton_products.row_product(x, weight, *arguments)
    codes = triton_products.row_product(x, weight, *arguments, scale)
    assert torch.equal(codes.float(), to_e4m3(plain, scale).float())
