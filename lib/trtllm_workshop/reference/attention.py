"""Paged attention over packed tokens, as one custom operator.

TensorRT-LLM runs attention in a plugin (`gpt_attention`) that sits in the network as one opaque node. The reference does
the same with a PyTorch custom operator, so that one exported graph serves the context phase, the generation phase and
any mix of both: the graph never sees where one request ends and the next begins.

Packed tokens: the tokens of all requests of a step lie behind each other without padding, context requests first, then
generation requests (one token each), which is the layout of TensorRT-LLM's `remove_input_padding`.

The KV-cache pool has the shape [layers, blocks, tokens_per_block, 2, kv_heads, head_size]; index 0 of the fourth
dimension holds keys, 1 holds values, so that one copy fetches both. Its type may be narrower than the type attention is computed in:
a pool of float8_e4m3fn or int8 holds keys and values divided by the layer's `kv_cache_scaling_factor`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trtllm_workshop.reference.fp8 import to_e4m3

# torch.library's `custom_op` decorator wraps every call in checks that cost as much as a small model's attention itself;
# a plain schema and two plain implementations do not.
LIBRARY = torch.library.Library("trtllm_workshop", "DEF")
LIBRARY.define(
    "gpt_attention(Tensor qkv, Tensor rotary_cos, Tensor rotary_sin, Tensor(a!) kv_cache_pool, Tensor slot_mapping, "
    "Tensor kv_cache_block_offsets, Tensor sequence_length, Tensor host_request_types, Tensor host_query_lengths, "
    "Tensor host_sequence_lengths, int layer_idx, int num_heads, int num_kv_heads, Tensor? kv_cache_scaling_factor, "
    "bool paged_context_fmha) -> Tensor"
)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head (the `rope_gpt_neox` layout), computed in float32.

    x: [tokens, heads, head_size]; cos, sin: [tokens, 1, head_size] from `rotary.rotary_table`, where the sines of the
    first half are negative, so that the rotation is x * cos + (x with its halves swapped) * sin.
    """
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def _context_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
) -> torch.Tensor:
    """Causal attention of the new tokens of requests of equal length; `past` are cached keys and values before them.

    All tensors [requests, tokens, heads, head_size].
    """
    mask, causal = None, True
    if past is not None:
        k, v = torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1)
        new, total = q.shape[1], k.shape[1]
        mask, causal = torch.ones(new, total, dtype=torch.bool, device=q.device).tril_(total - new), False
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out.transpose(1, 2)


def context_groups(lengths: list[int], totals: list[int]) -> list[tuple[int, int, int]]:
    """Neighbouring requests that can be attended together: (first request, how many, tokens already cached).

    Requests without cached tokens and of equal length share one call; any other request has its own.
    """
    groups: list[tuple[int, int, int]] = []
    for row, (new, total) in enumerate(zip(lengths, totals, strict=True)):
        if groups and total == new:
            first, count, cached = groups[-1]
            if cached == 0 and lengths[first] == new:
                groups[-1] = (first, count + 1, 0)
                continue
        groups.append((row, 1, total - new))
    return groups


def quantize_kv(kv: torch.Tensor, pool_dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Keys and values as the pool holds them: [...] in `pool_dtype`, divided by `scale` ([1], float32) if there is one.

    Rounded to nearest even; what lies outside the range of the type is clamped, as torch's casts do not do.
    """
    if scale is None:
        return kv.to(pool_dtype)
    if pool_dtype == torch.int8:
        return (kv.float() * scale.reciprocal()).round().clamp(-128, 127).to(torch.int8)
    return to_e4m3(kv, scale)


def dequantize_kv(stored: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """The reverse of `quantize_kv`, in `dtype`."""
    return stored.to(dtype) if scale is None else (stored.float() * scale).to(dtype)


def as_plain_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that every indexing kernel knows; float8 has few of its own."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _gather(
    pool: torch.Tensor, blocks: torch.Tensor, tokens: int, dtype: torch.dtype, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first `tokens` tokens of several requests, each [requests, tokens, kv_heads, head_size].

    pool: [blocks, tokens_per_block, 2, kv_heads, head_size]; blocks: [requests, at least as many as the tokens fill].
    """
    requests, count = blocks.shape
    picked = as_plain_bytes(pool).index_select(0, blocks.reshape(-1)).view(pool.dtype)
    picked = picked.view(requests, count * pool.shape[1], *pool.shape[2:])
    keys, values = dequantize_kv(picked[:, :tokens], dtype, scale).unbind(2)
    return keys, values


def _generation_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor | None
) -> torch.Tensor:
    """Attention of one new token per request over its cached tokens.

    The query heads that share a KV head are laid along the query dimension, so that no key or value is repeated.
    q: [requests, heads, head_size]; keys, values: [requests, tokens, kv_heads, head_size]; lengths: [requests], or None
    when all tokens count.
    """
    requests, heads, size = q.shape
    span, kv_heads = keys.shape[1:3]
    mask = None
    if lengths is not None:
        seen = torch.arange(span, device=q.device)[None, :] < lengths[:, None]
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill_(~seen, float("-inf"))[
            :, None, None, :
        ]
    grouped = q.view(requests, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(grouped, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask)
    return out.reshape(requests, heads, size)


@torch.library.impl(LIBRARY, "gpt_attention", "CompositeExplicitAutograd")
def attend(
    qkv: torch.Tensor,
    rotary_cos: torch.Tensor,
    rotary_sin: torch.Tensor,
    kv_cache_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_block_offsets: torch.Tensor,
    sequence_length: torch.Tensor,
    host_request_types: torch.Tensor,
    host_query_lengths: torch.Tensor,
    host_sequence_lengths: torch.Tensor,
    layer_idx: int,
    num_heads: int,
    num_kv_heads: int,
    kv_cache_scaling_factor: torch.Tensor | None,
    paged_context_fmha: bool,
) -> torch.Tensor:
    """Rotate, write to the cache, attend.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_size], packed.
        rotary_cos, rotary_sin: [tokens, 1, head_size], float32, see `apply_rotary`.
        kv_cache_pool: see the module text; written in place.
        slot_mapping: [tokens], int64: block * tokens_per_block + position inside the block, where each token goes.
        kv_cache_block_offsets: [requests, max blocks], int64: the blocks of each request in order.
        sequence_length: [requests], int64: tokens in the cache after this step.
        host_request_types: [requests], int32 on the host: 0 context, 1 generation; context requests come first.
        host_query_lengths: [requests], int32 on the host: new tokens of each request.
        host_sequence_lengths: [requests], int32: sequence_length again, on the host, so that no copy is waited for.
        layer_idx, num_heads, num_kv_heads: of this layer.
        kv_cache_scaling_factor: [1], float32, for a quantized pool: value = stored · factor. None for a plain pool.
        paged_context_fmha: whether the context phase reads keys and values from the pool, that is quantized ones, as
            TensorRT-LLM's kernel of that name does. Without it only later tokens see what the quantization cost.

    Returns:
        [tokens, heads * head_size].
    """
    tokens, given = qkv.shape[0], qkv.dtype
    if qkv.device.type == "cpu":
        qkv = qkv.float()  # processors attend faster, and more exactly, in float32
    dtype = qkv.dtype
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(tokens, -1, size)
    rotated = apply_rotary(heads[:, : num_heads + num_kv_heads], rotary_cos, rotary_sin)
    q, k, v = rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]
    pool = kv_cache_pool[layer_idx]
    scale = kv_cache_scaling_factor
    stored = quantize_kv(torch.cat((k, v), dim=1), pool.dtype, scale)
    as_plain_bytes(pool).view(-1, 2 * num_kv_heads, size).index_copy_(0, slot_mapping, as_plain_bytes(stored))
    if scale is not None and paged_context_fmha:
        k, v = dequantize_kv(stored, dtype, scale).chunk(2, dim=1)
    requests = (kv_cache_block_offsets, sequence_length, host_request_types, host_query_lengths, host_sequence_lengths)
    return attend_packed(q, k, v, pool, scale, *requests).to(given)


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pool: torch.Tensor,
    scale: torch.Tensor | None,
    kv_cache_block_offsets: torch.Tensor,
    sequence_length: torch.Tensor,
    host_request_types: torch.Tensor,
    host_query_lengths: torch.Tensor,
    host_sequence_lengths: torch.Tensor,
) -> torch.Tensor:
    """Attention of a step's tokens, whose keys and values lie in the layer's `pool` already; the rest as for `attend`.

    q: [tokens, heads, head_size], rotated; k, v: [tokens, kv_heads, head_size]. Returns [tokens, heads * head_size].
    """
    tokens, dtype, per_block = q.shape[0], q.dtype, pool.shape[1]
    lengths, totals = host_query_lengths.tolist(), host_sequence_lengths.tolist()
    contexts = host_request_types.tolist().count(0)
    parts = []
    start = 0
    for row, count, cached in context_groups(lengths[:contexts], totals[:contexts]):
        end = start + count * lengths[row]
        past = None
        if cached:
            blocks = kv_cache_block_offsets[row : row + 1, : -(-cached // per_block)]
            past = _gather(pool, blocks, cached, dtype, scale)
        new_q, new_k, new_v = (t[start:end].unflatten(0, (count, lengths[row])) for t in (q, k, v))
        parts.append(_context_attention(new_q, new_k, new_v, past).flatten(0, 1))
        start = end
    if start < tokens:
        longest = max(totals[contexts:])
        blocks = kv_cache_block_offsets[contexts:, : -(-longest // per_block)]
        keys, values = _gather(pool, blocks, longest, dtype, scale)
        same = min(totals[contexts:]) == longest
        parts.append(_generation_attention(q[start:], keys, values, None if same else sequence_length[contexts:]))
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(tokens, -1)


@torch.library.impl(LIBRARY, "gpt_attention", "Meta")
def attend_shape(qkv: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The result's shape and type, which is all that graph capture needs."""
    heads, kv_heads = rest[-4:-2]
    return qkv.new_empty(qkv.shape[0], heads * (qkv.shape[1] // (heads + 2 * kv_heads)))


def gpt_attention(*arguments: torch.Tensor | int | None) -> torch.Tensor:
    """The operator as it sits in the graph; arguments as for `attend`."""
    return torch.ops.trtllm_workshop.gpt_attention(*arguments)
