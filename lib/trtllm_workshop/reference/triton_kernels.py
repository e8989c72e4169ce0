# mypy: allow-untyped-defs
"""Triton kernels for the small work between matrix products on a CUDA device. Import it only where Triton is installed.

Each kernel reads its input once and writes its result once, and rounds at the places where the separate operators round
(the sum of the residual, the norm, SiLU, the product with the gate), so that e4m3 codes come out as theirs do, apart from
rare ties that a sum in another order moves.

Kernels index rows with 64 bits: tokens times width passes 2^31 early.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _e4m3(value, scale):
    """value / scale as e4m3 codes, the quotient taken as torch does: times the rounded reciprocal; clamped to ±448."""
    scaled = value * tl.div_rn(1.0, scale)
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _add_rms_norm(
    x, delta, weight, total, out, scale, width, eps, ADD: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, inside, 0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row + column, inside, 0.0).to(tl.float32)
        kept = value.to(x.dtype.element_ty)
        tl.store(total + row + column, kept, inside)
        value = kept.to(tl.float32)
    rate = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    gain = tl.load(weight + column, inside, 0.0).to(tl.float32)
    normed = (value * rate * gain).to(x.dtype.element_ty)
    if QUANTIZE:
        tl.store(out + row + column, _e4m3(normed.to(tl.float32), tl.load(scale)), inside)
    else:
        tl.store(out + row + column, normed, inside)


@triton.jit
def _silu_mul(x, out, scale, width, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program a row and block of columns; a row of x is [fc, gate], each `width` wide."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    kind = x.dtype.element_ty
    fc = tl.load(x + row * 2 * width + column, inside, 0.0).to(tl.float32)
    gate = tl.load(x + row * 2 * width + width + column, inside, 0.0).to(tl.float32)
    active = (fc / (1.0 + tl.exp(-fc))).to(kind).to(tl.float32)
    value = (active * gate).to(kind)
    if QUANTIZE:
        tl.store(out + row * width + column, _e4m3(value.to(tl.float32), tl.load(scale)), inside)
    else:
        tl.store(out + row * width + column, value, inside)


@triton.jit
def _quantize(x, out, scale, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, _e4m3(value, tl.load(scale)), inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rotate_and_store(
    qkv,
    cos,
    sin,
    table_stride,
    slots,
    pool,
    scale,
    heads,
    kv_heads,
    half,
    QUANTIZE: tl.constexpr,
    READ_BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a token and group of heads; `half` is half a head's size.

    Rotated queries and keys take the place of the plain ones; keys and values go to the token's slot of the pool.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, BLOCK)
    inside = (head < heads + 2 * kv_heads)[:, None] & (column < half)[None, :]
    kind = qkv.dtype.element_ty
    at = qkv + token * (heads + 2 * kv_heads) * 2 * half + head[:, None] * 2 * half + column[None, :]
    low = tl.load(at, inside, 0.0).to(tl.float32)
    high = tl.load(at + half, inside, 0.0).to(tl.float32)
    angle = token * table_stride + column
    cos_low = tl.load(cos + angle, column < half, 0.0)[None, :]
    cos_high = tl.load(cos + angle + half, column < half, 0.0)[None, :]
    sin_low = tl.load(sin + angle, column < half, 0.0)[None, :]
    sin_high = tl.load(sin + angle + half, column < half, 0.0)[None, :]
    rotated = (head < heads + kv_heads)[:, None]
    new_low = tl.where(rotated, low * cos_low + high * sin_low, low).to(kind)
    new_high = tl.where(rotated, high * cos_high + low * sin_high, high).to(kind)

    cached = (head >= heads)[:, None] & inside
    slot = tl.load(slots + token)
    place = pool + slot * 2 * kv_heads * 2 * half + (head - heads)[:, None] * 2 * half + column[None, :]
    if QUANTIZE:
        factor = tl.load(scale)
        stored_low, stored_high = _e4m3(new_low.to(tl.float32), factor), _e4m3(new_high.to(tl.float32), factor)
        tl.store(place, stored_low, cached)
        tl.store(place + half, stored_high, cached)
        if READ_BACK:
            query = (head < heads)[:, None]
            new_low = tl.where(query, new_low, (stored_low.to(tl.float32) * factor).to(kind))
            new_high = tl.where(query, new_high, (stored_high.to(tl.float32) * factor).to(kind))
    else:
        tl.store(place, new_low, cached)
        tl.store(place + half, new_high, cached)
    changed = inside if READ_BACK else rotated & inside
    tl.store(at, new_low, changed)
    tl.store(at + half, new_high, changed)


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `cuda_kernels.add_rms_norm`; x and delta contiguous, [rows, width]."""
    width = x.shape[-1]
    total = x if delta is None else torch.empty_like(x)
    out = torch.empty_like(x, dtype=x.dtype if scale is None else torch.float8_e4m3fn)
    block = triton.next_power_of_2(width)
    _add_rms_norm[(x.numel() // width,)](
        x, delta, weight, total, out, scale, width, eps, delta is not None, scale is not None, block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return total, out


def silu_mul(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """See `cuda_kernels.silu_mul`; x contiguous, [rows, 2 * width]."""
    rows, width = x.shape[0], x.shape[-1] // 2
    out = torch.empty(rows, width, dtype=x.dtype if scale is None else torch.float8_e4m3fn, device=x.device)
    block = 1024
    _silu_mul[(rows, triton.cdiv(width, block))](x, out, scale, width, scale is not None, block)
    return out


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """See `quant_ops.to_e4m3`; x contiguous."""
    out = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    block = 2048
    _quantize[(triton.cdiv(x.numel(), block),)](x, out, scale, x.numel(), block)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    slots: torch.Tensor,
    pool: torch.Tensor,
    scale: torch.Tensor | None,
    heads: int,
    kv_heads: int,
    read_back: bool,
) -> None:
    """Rotate queries and keys inside `qkv`, write keys and values to the pool; both arguments are changed.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_size], contiguous.
        cos, sin: [tokens, 1, head_size], float32, rows of one table, so that their strides are the same.
        slots: [tokens], int64.
        pool: one layer's, [blocks, tokens_per_block, 2, kv_heads, head_size], contiguous; in qkv's type, or e4m3 with `scale`.
        read_back: leave keys and values in `qkv` as the quantized pool gives them back.
    """
    groups, half = heads + 2 * kv_heads, cos.shape[-1] // 2
    some = 16
    _rotate_and_store[(qkv.shape[0], triton.cdiv(groups, some))](
        qkv, cos, sin, cos.stride(0), slots, pool, scale, heads, kv_heads, half, scale is not None,
        scale is not None and read_back, some, triton.next_power_of_2(half),
    )  # fmt: skip
