# mypy: allow-untyped-defs
"""Attention that reads keys and values straight from the KV-cache pool, written with Triton. Import it only where Triton is installed.

Gathering a request's blocks first, as the plain path does, moves every cached byte three times: out of the pool, into the copy,
out of the copy. These kernels look up the block table themselves and read the pool once.

Generation phase: one program a request, KV head and part of the sequence. The query heads that share a KV head are the rows of one
matrix product, so that the pool is read once for all of them. With few requests the sequence is split over several programs, whose
results a second kernel joins (flash-decoding: arXiv 2311.01282). How many parts is decided by the number of requests alone, never
by their lengths: a CUDA graph can then be replayed for sequences that grow.

Context phase: one program a tile of new tokens and query head, over cached and new tokens alike: the step's keys and values lie in
the pool before attention starts.

Triton compiles a kernel anew for addresses and integers that are multiples of 16. Where the requests' tables and lengths lie among a
step's inputs changes from step to step, so those arguments are exempt: no request waits for a compiler.

Values of a quantized pool are e4m3 codes, each exact in float16: products take the codes, and the layer's scale multiplies scores
and result afterwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
ROWS = 64  # new tokens in a tile of the context phase
MOST_SPLITS = 64
# Cached tokens a generation program takes at a time, the warps that share them, and how many such tiles it reads ahead. Measured on an
# H200, 880 requests with 1,500 e4m3 tokens: 3.72 TB/s with 2 warps, 2.52 with 4 and 1.84 with 8, where a copy reaches 4.2; in
# bfloat16 with 64 requests of 1,000 tokens 3.93, 3.86 and 3.74.
TILE, WARPS, STAGES = 64, 2, 2


@triton.jit
def _tile_of_pool(pool, blocks, position, head, KV_HEADS: tl.constexpr, SIZE: tl.constexpr, PER_BLOCK: tl.constexpr):
    """Addresses of the keys of these positions: [positions, SIZE]; values lie KV_HEADS * SIZE further on."""
    block = tl.load(blocks + position // PER_BLOCK)
    slot = block * PER_BLOCK + position % PER_BLOCK
    return pool + (slot * (2 * KV_HEADS) + head)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]


@triton.jit
def _online_softmax(scores, top, total, acc):
    """New weights for these scores, and the older sum and result shrunk to the new maximum; scores are in units of log 2."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    return weights, new_top, total * shrink + tl.sum(weights, 1), acc * shrink[:, None]


@triton.jit
def _store(out, at, value, inside, out_scale, KIND: tl.constexpr, ROUND: tl.constexpr):
    """Round to KIND, and then to e4m3 if asked, as separate operators would."""
    value = value.to(KIND)
    if ROUND:
        scaled = value.to(tl.float32) * tl.div_rn(1.0, tl.load(out_scale))
        code = tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
        tl.store(out + at, code, inside)
    else:
        tl.store(out + at, value, inside)


@triton.jit(do_not_specialize=["splits", "blocks_stride"], do_not_specialize_on_alignment=["blocks", "lengths"])
def _generation(
    q,
    q_stride,
    pool,
    blocks,
    blocks_stride,
    lengths,
    scale,
    out,
    out_scale,
    parts,
    weights_of_parts,
    softmax_scale,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    WHOLE: tl.constexpr,
    QUANTIZED: tl.constexpr,
    ROUND: tl.constexpr,
    KIND: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program a KV head, request and split. HEADS is GROUP rounded up to what a matrix product needs; WHOLE means one split."""
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    length = tl.load(lengths + row).to(tl.int32)
    span = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * span
    end = tl.minimum(begin + span, length)
    if begin >= end:
        return
    compute: tl.constexpr = tl.float16 if QUANTIZED else pool.dtype.element_ty
    column, member = tl.arange(0, SIZE), tl.arange(0, HEADS)
    of_group = (member < GROUP)[:, None]
    heads = (head * GROUP + member)[:, None] * SIZE + column[None, :]
    query = tl.load(q + row * q_stride + heads, of_group, 0.0).to(compute)
    factor = 1.0
    if QUANTIZED:
        factor = tl.load(scale)
    rate = softmax_scale * factor
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, SIZE], tl.float32)
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + tl.arange(0, TILE)
        # The last token stands in for those behind the end: what is read is always valid, and its weight becomes 0.
        at = _tile_of_pool(
            pool, blocks + row * blocks_stride, tl.minimum(position, end - 1), head, KV_HEADS, SIZE, PER_BLOCK
        )
        keys = tl.load(at).to(compute)
        values = tl.load(at + KV_HEADS * SIZE).to(compute)
        scores = tl.dot(query, tl.trans(keys)) * rate
        scores = tl.where((position < end)[None, :], scores, float("-inf"))
        weights, top, total, acc = _online_softmax(scores, top, total, acc)
        acc = tl.dot(weights.to(compute), values, acc)
    result = acc / total[:, None] * factor
    if WHOLE:
        _store(out, row * KV_HEADS * GROUP * SIZE + heads, result, of_group, out_scale, KIND, ROUND)
    else:
        part = (row * splits + split) * KV_HEADS * GROUP
        tl.store(parts + part * SIZE + heads, result, of_group)
        tl.store(weights_of_parts + part + head * GROUP + member, top + tl.log2(total), member < GROUP)


@triton.jit(do_not_specialize_on_alignment=["lengths"])
def _join(
    parts,
    weights_of_parts,
    lengths,
    out,
    out_scale,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    ROUND: tl.constexpr,
    KIND: tl.constexpr,
):
    """One program a query head and request: the results of the splits, weighted by their share of the softmax's sum."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(tl.load(lengths + row).to(tl.int32), TILE)
    used = tl.cdiv(tiles, tl.cdiv(tiles, SPLITS))
    split, column = tl.arange(0, SPLITS), tl.arange(0, SIZE)
    part = (row * SPLITS + split) * HEADS + head
    share = tl.load(weights_of_parts + part, split < used, float("-inf"))
    share = tl.exp2(share - tl.max(share, 0))
    result = tl.load(parts + part[:, None] * SIZE + column[None, :], (split < used)[:, None], 0.0)
    result = tl.sum(result * share[:, None], 0) / tl.sum(share, 0)
    _store(out, (row * HEADS + head) * SIZE + column, result, column < SIZE, out_scale, KIND, ROUND)


@triton.jit(do_not_specialize=["blocks_stride"], do_not_specialize_on_alignment=["blocks"])
def _context(
    q,
    q_stride,
    pool,
    blocks,
    blocks_stride,
    tiles,
    scale,
    out,
    softmax_scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    NEW: tl.constexpr,
    TILE: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    """One program a tile of new tokens and query head; a row of `tiles` as `context_tiles` makes it."""
    tile, query_head = tl.program_id(0), tl.program_id(1)
    request = tl.load(tiles + 4 * tile).to(tl.int64)
    first = tl.load(tiles + 4 * tile + 1).to(tl.int64)
    count = tl.load(tiles + 4 * tile + 2)
    cached = tl.load(tiles + 4 * tile + 3)
    head = query_head // GROUP
    compute: tl.constexpr = tl.float16 if QUANTIZED else pool.dtype.element_ty
    column, new = tl.arange(0, SIZE), tl.arange(0, NEW)
    inside = (new < count)[:, None]
    query = tl.load(q + (first + new)[:, None] * q_stride + query_head * SIZE + column[None, :], inside, 0.0)
    query = query.to(compute)
    factor = 1.0
    if QUANTIZED:
        factor = tl.load(scale)
    rate = softmax_scale * factor
    top = tl.full([NEW], float("-inf"), tl.float32)
    total = tl.zeros([NEW], tl.float32)
    acc = tl.zeros([NEW, SIZE], tl.float32)
    end = cached + count
    for start in range(0, end, TILE):
        position = start + tl.arange(0, TILE)
        at = _tile_of_pool(
            pool, blocks + request * blocks_stride, tl.minimum(position, end - 1), head, KV_HEADS, SIZE, PER_BLOCK
        )
        keys = tl.load(at).to(compute)
        values = tl.load(at + KV_HEADS * SIZE).to(compute)
        scores = tl.dot(query, tl.trans(keys)) * rate
        scores = tl.where(position[None, :] <= (cached + new)[:, None], scores, float("-inf"))
        weights, top, total, acc = _online_softmax(scores, top, total, acc)
        acc = tl.dot(weights.to(compute), values, acc)
    result = acc / total[:, None] * factor
    at = out + ((first + new)[:, None] * KV_HEADS * GROUP + query_head) * SIZE + column[None, :]
    tl.store(at, result.to(out.dtype.element_ty), inside)


def serves(heads: int, kv_heads: int, head_size: int) -> bool:
    """Whether the kernels take these sizes: head sizes are powers of two, for a matrix product has no others."""
    return heads % kv_heads == 0 and head_size in (16, 32, 64, 128, 256)


def splits_for(requests: int, kv_heads: int, processors: int, itemsize: int) -> int:
    """Into how many parts sequences are split, so that every multiprocessor of the device has work: a power of two.

    The fewer bytes a cached value has (`itemsize`), the more programs must wait for theirs at a time.
    """
    wanted = max(1, 12 * processors // (itemsize * requests * kv_heads))
    return min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _kind(dtype: torch.dtype) -> tl.dtype:
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}[dtype]


def generation_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    out_scale: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """Attention of one new token a request over all its cached tokens.

    Args:
        q: [requests, heads, head_size], rotated; any stride between requests, heads dense.
        pool: one layer's, [blocks, tokens_per_block, 2, kv_heads, head_size]; in q's type, or float8_e4m3fn with `scale`.
        scale: [1], float32: value = code · scale.
        blocks: [requests, max blocks], int64, rows dense.
        lengths: [requests], int64: tokens in the cache, the new one among them; at least 1.
        out: [requests, heads * head_size], dense; in q's type, or float8_e4m3fn with `out_scale`.
        out_scale: [1], float32: round the result to e4m3 for the layer that reads it.
        splits: parts of a sequence, a power of two; by default what `splits_for` says.
    """
    requests, heads, size = q.shape
    kv_heads, per_block = pool.shape[3], pool.shape[1]
    group = heads // kv_heads
    if splits is None:
        splits = splits_for(requests, kv_heads, _processors(q.device), pool.dtype.itemsize)
    parts = torch.empty(requests * splits * heads * size if splits > 1 else 1, dtype=torch.float32, device=q.device)
    shares = torch.empty(requests * splits * heads if splits > 1 else 1, dtype=torch.float32, device=q.device)
    rounded, kind = out_scale is not None, _kind(q.dtype)
    _generation[(kv_heads, requests, splits)](
        q, q.stride(0), pool, blocks, blocks.stride(0), lengths, scale, out, out_scale, parts, shares,
        LOG2_E / size**0.5, splits, kv_heads, group, max(16, triton.next_power_of_2(group)), size, per_block, TILE,
        splits == 1, scale is not None, rounded, kind, STAGES, num_warps=WARPS,
    )  # fmt: skip
    if splits > 1:
        _join[(heads, requests)](
            parts, shares, lengths, out, out_scale, heads, size, TILE, splits, rounded, kind, num_warps=4
        )


def context_tiles(lengths: list[int], totals: list[int]) -> list[tuple[int, int, int, int]]:
    """The work of `context_attention`: (request, its first token among the packed ones, how many, tokens before the first).

    lengths, totals: new tokens and tokens in the cache after the step, of each context request in order. Tiles with many tokens
    to look at come first: none of them should start last.
    """
    tiles, start = [], 0
    for row, (new, total) in enumerate(zip(lengths, totals, strict=True)):
        for done in range(0, new, ROWS):
            tiles.append((row, start + done, min(ROWS, new - done), total - new + done))
        start += new
    return sorted(tiles, key=lambda tile: -tile[3])


def context_attention(
    q: torch.Tensor,
    pool: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Causal attention of the new tokens of context requests over cached and new tokens, all read from the pool.

    Args:
        q: [tokens, heads, head_size], rotated; any stride between tokens, heads dense.
        pool, scale, blocks: as for `generation_attention`.
        tiles: [tiles, 4], int32: `context_tiles` on the device.
        out: [tokens, heads * head_size], dense, in q's type.
    """
    heads, size, kv_heads = q.shape[1], q.shape[2], pool.shape[3]
    _context[(tiles.shape[0], heads)](
        q, q.stride(0), pool, blocks, blocks.stride(0), tiles, scale, out, LOG2_E / size**0.5,
        kv_heads, heads // kv_heads, size, pool.shape[1], ROWS, 64 if size <= 128 else 32, scale is not None,
        num_warps=4, num_stages=2,
    )  # fmt: skip
