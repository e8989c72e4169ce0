"""Paged attention over packed tokens, as one custom operator.

TensorRT-LLM runs attention in a plugin (`gpt_attention`) that sits in the network as one opaque node. The reference does
the same with a PyTorch custom operator, so that one exported graph serves the context phase, the generation phase and
any mix of both: the graph never sees where one request ends and the next begins.

Packed tokens: the tokens of all requests of a step lie behind each other without padding, context requests first, then
generation requests (one token each), which is the layout of TensorRT-LLM's `remove_input_padding`.

The KV-cache pool has the shape [layers, blocks, 2, kv_heads, tokens_per_block, head_size]; index 0 of the third
dimension holds keys, 1 holds values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

OPERATOR = "trtllm_workshop::gpt_attention"


def apply_rotary(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head (the `rope_gpt_neox` layout), computed in float32.

    Args:
        x: [tokens, heads, head_size].
        cos_sin: [tokens, head_size]; the first half holds cosines, the second half sines, for each token's position.
    """
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _context_attention(q, k, v, past_k, past_v):
    """Causal attention of one request's new tokens; shapes [heads, new, head_size] and [kv_heads, past, head_size]."""
    if past_k is None:
        mask, causal = None, True
    else:
        k, v = torch.cat((past_k, k), dim=1), torch.cat((past_v, v), dim=1)
        new, total = q.shape[1], k.shape[1]
        mask, causal = torch.ones(new, total, dtype=torch.bool, device=q.device).tril_(total - new), False
    out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, is_causal=causal, enable_gqa=True)
    return out[0]


def _gather(pool_layer: torch.Tensor, kv: int, blocks: torch.Tensor) -> torch.Tensor:
    """Collect the blocks of several requests: [requests, blocks] -> [requests, kv_heads, tokens, head_size]."""
    requests, count = blocks.shape
    _, _, heads, per_block, size = pool_layer.shape
    picked = pool_layer[:, kv].index_select(0, blocks.reshape(-1)).view(requests, count, heads, per_block, size)
    return picked.transpose(1, 2).reshape(requests, heads, count * per_block, size)


def _generation_attention(q, pool_layer, blocks, lengths):
    """Attention of one new token per request over its cached tokens.

    The query heads that share a KV head are laid along the query dimension, so that no key or value is repeated.
    q: [requests, heads, head_size] -> [requests, heads, head_size].
    """
    requests, heads, size = q.shape
    keys, values = _gather(pool_layer, 0, blocks), _gather(pool_layer, 1, blocks)
    kv_heads, span = keys.shape[1], keys.shape[2]
    seen = torch.arange(span, device=q.device)[None, :] < lengths[:, None]
    mask = torch.zeros(requests, 1, 1, span, dtype=q.dtype, device=q.device).masked_fill_(
        ~seen[:, None, None, :], float("-inf")
    )
    grouped = q.view(requests, kv_heads, heads // kv_heads, size)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
    return out.reshape(requests, heads, size)


@torch.library.custom_op(OPERATOR, mutates_args={"kv_cache_pool"})
def gpt_attention(
    qkv: torch.Tensor,
    rotary_cos_sin: torch.Tensor,
    kv_cache_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_block_offsets: torch.Tensor,
    sequence_length: torch.Tensor,
    host_request_types: torch.Tensor,
    host_query_lengths: torch.Tensor,
    layer_idx: int,
    num_heads: int,
    num_kv_heads: int,
) -> torch.Tensor:
    """Rotate, write to the cache, attend.

    Args:
        qkv: [tokens, (heads + 2 * kv_heads) * head_size], packed.
        rotary_cos_sin: [tokens, head_size], float32.
        kv_cache_pool: see the module text; written in place.
        slot_mapping: [tokens], int64: block * tokens_per_block + position inside the block, where each token goes.
        kv_cache_block_offsets: [requests, max blocks], int64: the blocks of each request in order.
        sequence_length: [requests], int64: tokens in the cache after this step.
        host_request_types: [requests], int32 on the host: 0 context, 1 generation; context requests come first.
        host_query_lengths: [requests], int32 on the host: new tokens of each request.
        layer_idx, num_heads, num_kv_heads: of this layer.

    Returns:
        [tokens, heads * head_size].
    """
    tokens = qkv.shape[0]
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    q, k, v = qkv.view(tokens, -1, size).split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    q, k = apply_rotary(q, rotary_cos_sin), apply_rotary(k, rotary_cos_sin)
    pool_layer = kv_cache_pool[layer_idx]
    per_block = pool_layer.shape[3]
    block, offset = slot_mapping // per_block, slot_mapping % per_block
    pool_layer[block, 0, :, offset] = k.to(pool_layer.dtype)
    pool_layer[block, 1, :, offset] = v.to(pool_layer.dtype)

    lengths = host_query_lengths.tolist()
    contexts = host_request_types.tolist().count(0)
    out = torch.empty(tokens, num_heads, size, dtype=qkv.dtype, device=qkv.device)
    start = 0
    for row in range(contexts):
        end = start + lengths[row]
        past = int(sequence_length[row]) - lengths[row]
        past_k = past_v = None
        if past:
            blocks = kv_cache_block_offsets[row : row + 1, : -(-past // per_block)]
            past_k, past_v = (_gather(pool_layer, kv, blocks)[0, :, :past].to(q.dtype) for kv in (0, 1))
        part = (t[start:end].transpose(0, 1) for t in (q, k, v))
        out[start:end] = _context_attention(*part, past_k, past_v).transpose(0, 1)
        start = end
    if start < tokens:
        seen = sequence_length[contexts:]
        used = -(-int(seen.max()) // per_block)
        out[start:] = _generation_attention(q[start:], pool_layer, kv_cache_block_offsets[contexts:, :used], seen)
    return out.view(tokens, num_heads * size)


@gpt_attention.register_fake
def _(
    qkv,
    rotary_cos_sin,
    kv_cache_pool,
    slot_mapping,
    kv_cache_block_offsets,
    sequence_length,
    host_request_types,
    host_query_lengths,
    layer_idx,
    num_heads,
    num_kv_heads,
):
    size = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    return qkv.new_empty(qkv.shape[0], num_heads * size)
