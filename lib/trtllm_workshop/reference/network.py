"""The decoder graph of Llama-family models, over packed tokens.

Parameter names are those of the TensorRT-LLM checkpoint, so weights load without a translation table. Note the naming
that surprises people: `mlp.fc` is Hugging Face's gate_proj (SiLU is applied to it), `mlp.gate` is up_proj.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.attention import gpt_attention

INPUT_NAMES = (
    "input_ids",
    "position_ids",
    "last_token_ids",
    "kv_cache_pool",
    "slot_mapping",
    "kv_cache_block_offsets",
    "sequence_length",
    "host_request_types",
    "host_query_lengths",
    "host_sequence_lengths",
)


class Linear(nn.Module):
    """y = x W^T + b with W of shape [out, in], as stored in checkpoints."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class RmsNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 for 16-bit inputs."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size, dtype=dtype), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer_idx: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer_idx, self.heads, self.kv_heads = layer_idx, spec.num_attention_heads, spec.num_key_value_heads
        width = spec.num_attention_heads * spec.head_size
        kv_width = spec.num_key_value_heads * spec.head_size
        self.qkv = Linear(spec.hidden_size, width + 2 * kv_width, dtype, bias=spec.attn_bias)
        self.dense = Linear(width, spec.hidden_size, dtype)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...], cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        context = gpt_attention(self.qkv(x), *rotary, *cache, self.layer_idx, self.heads, self.kv_heads)
        return self.dense(context)


class GatedMlp(nn.Module):
    """proj(silu(fc(x)) * gate(x)); fc and gate lie in one matrix, so that x is read once (--use_fused_mlp)."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        self.fused_fc = Linear(spec.hidden_size, 2 * spec.intermediate_size, dtype)
        self.proj = Linear(spec.intermediate_size, spec.hidden_size, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fc, gate = self.fused_fc(x).chunk(2, dim=-1)
        return self.proj(F.silu(fc) * gate)


class DecoderLayer(nn.Module):
    def __init__(self, spec: ModelSpec, layer_idx: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.attention = Attention(spec, layer_idx, dtype)
        self.post_layernorm = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.mlp = GatedMlp(spec, dtype)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...], cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), rotary, cache)
        return x + self.mlp(self.post_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, spec: ModelSpec, dtype: torch.dtype, positions: int) -> None:
        super().__init__()
        self.vocab_embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype)
        self.layers = nn.ModuleList(DecoderLayer(spec, i, dtype) for i in range(spec.num_hidden_layers))
        self.ln_f = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.rotary_table: torch.Tensor
        self.register_buffer("rotary_table", torch.empty(positions, 2, spec.head_size, dtype=torch.float32))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        rotary = self.rotary_table.index_select(0, positions).split(1, dim=1)
        x = self.vocab_embedding(ids)
        for layer in self.layers:
            x = layer(x, rotary, cache)
        return x


class DecoderForCausalLM(nn.Module):
    """Packed tokens in, logits of the chosen tokens out (in the compute type; sampling widens them to float32).

    forward: see INPUT_NAMES and `attention.gpt_attention`; `last_token_ids` [n] are the indices into the packed tokens
    whose logits are wanted (the last one of each request, or all of them for context logits).
    Returns [n, vocabulary].
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, positions: int) -> None:
        super().__init__()
        self.transformer = Transformer(spec, dtype, positions)
        self.lm_head = Linear(spec.hidden_size, spec.vocab_size, dtype)

    def forward(self, input_ids, position_ids, last_token_ids, *cache):  # type: ignore[no-untyped-def]
        hidden = self.transformer(input_ids, position_ids, cache)
        # The norm works row by row: taking the wanted rows first gives the same numbers for less work.
        picked = self.transformer.ln_f(hidden.index_select(0, last_token_ids))
        return self.lm_head(picked)
