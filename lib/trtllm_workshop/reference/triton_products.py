# mypy: allow-untyped-defs
"""Matrix products with one row of activations, written with Triton. Import it only where Triton is installed.

One request alone reads every weight for one row: there is nothing for tensor cores to do, and the time is that of reading. Each program
takes a few output channels and runs along their weights in long pieces. For the gated part of the MLP one program takes the same
channels of fc and gate, so that SiLU, the product and the rounding cost no kernel of their own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _silu(value):
    return value / (1.0 + tl.exp(-value))


@triton.jit
def _row_product(
    x,
    weight,
    bias,
    weight_scale,
    scale,
    out_scale,
    out,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    GATE: tl.constexpr,
    ROUND: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program ROWS output channels; with GATE the channels `outputs` further on are those of the gate."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < outputs
    column = tl.arange(0, BLOCK)
    at = weight + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * inputs + column[None, :]
    other = at + outputs.to(tl.int64) * inputs
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    acc_gate = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, inputs, BLOCK):
        # Masks only where a piece may be cut off: unmasked loads are wider.
        within = start + column < inputs
        piece = tl.load(x + start + column) if EVEN else tl.load(x + start + column, within, 0.0)
        values = tl.load(at + start) if EVEN else tl.load(at + start, within[None, :], 0.0)
        piece = piece.to(tl.float32)[None, :]
        acc += values.to(tl.float32) * piece
        if GATE:
            values = tl.load(other + start) if EVEN else tl.load(other + start, within[None, :], 0.0)
            acc_gate += values.to(tl.float32) * piece
    total, gate = tl.sum(acc, 1), tl.sum(acc_gate, 1)
    if QUANTIZED:
        factor = tl.load(weight_scale) * tl.load(scale)
        total, gate = total * factor, gate * factor
    if BIAS:
        total += tl.load(bias + row, inside, 0.0).to(tl.float32)
        if GATE:
            gate += tl.load(bias + outputs + row, inside, 0.0).to(tl.float32)
    result = total.to(KIND)
    if GATE:  # rounded where the separate operators round
        active = _silu(result.to(tl.float32)).to(KIND).to(tl.float32)
        result = (active * gate.to(KIND).to(tl.float32)).to(KIND)
    if ROUND:
        scaled = result.to(tl.float32) * tl.div_rn(1.0, tl.load(out_scale))
        code = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(out + row, code, inside)
    else:
        tl.store(out + row, result, inside)


KINDS = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def row_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    gated: bool = False,
    out_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T · scale · weight_scale + bias for one row; with `gated` silu of its first half times the second.

    Args:
        x: [1, in], dense; in `dtype`, or float8_e4m3fn with both scales.
        weight: [out, in], dense, in the type of x.
        bias: [out] or None.
        weight_scale, scale: [1], float32, or both None.
        dtype: of the result before it is rounded to e4m3 with `out_scale` ([1], float32) if that is given.

    Returns:
        [1, out], or [1, out / 2] with `gated`.
    """
    outputs, inputs = weight.shape
    outputs //= 2 if gated else 1
    kind = dtype if out_scale is None else torch.float8_e4m3fn
    out = torch.empty(1, outputs, dtype=kind, device=x.device)
    # Measured on an H200: bfloat16 reads fastest in pieces of 16 bytes a thread with four warps, e4m3 with two; short outputs and
    # gates, which read two rows for one, want fewer rows a program.
    rows, block, warps = 2, 1024, 4 if weight.dtype.itemsize == 2 else 2
    if weight.dtype.itemsize == 2 and not gated and outputs > 4096:
        rows = 4
    _row_product[(triton.cdiv(outputs, rows),)](
        x, weight, bias, weight_scale, scale, out_scale, out, outputs, inputs, bias is not None, scale is not None, gated,
        out_scale is not None, inputs % block == 0, rows, block, KINDS[dtype], num_warps=warps,
    )  # fmt: skip
    return out
