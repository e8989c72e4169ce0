"""The decoder graph of Llama-family models, over packed tokens.

Parameter names are those of the TensorRT-LLM checkpoint, so weights load without a translation table. Note the naming
that surprises people: `mlp.fc` is Hugging Face's gate_proj (SiLU is applied to it), `mlp.gate` is up_proj.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.attention import gpt_attention
from trtllm_workshop.reference.quant_linear import make_linear, parameter

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


class RmsNorm(nn.Module):
    """Root-mean-square norm (arXiv 1910.07467), computed in float32 for 16-bit inputs."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Embedding(nn.Module):
    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = parameter(rows, size, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


@dataclass(frozen=True)
class NetworkConfig:
    """What a network is built from: the model, the type of unquantized tensors, the quantization, the position limit.

    `paged_context_fmha` as in `attention.attend`.
    """

    spec: ModelSpec
    dtype: torch.dtype
    positions: int
    mode: QuantMode
    paged_context_fmha: bool = True

    def linear(self, module: str, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
        return make_linear(self.mode, module, inputs, outputs, self.dtype, bias)


class Attention(nn.Module):
    def __init__(self, config: NetworkConfig, layer_idx: int) -> None:
        super().__init__()
        spec, name = config.spec, f"transformer.layers.{layer_idx}.attention"
        self.layer_idx, self.heads, self.kv_heads = layer_idx, spec.num_attention_heads, spec.num_key_value_heads
        self.paged_context_fmha = config.paged_context_fmha
        width = spec.num_attention_heads * spec.head_size
        kv_width = spec.num_key_value_heads * spec.head_size
        self.qkv = config.linear(f"{name}.qkv", spec.hidden_size, width + 2 * kv_width, bias=spec.attn_bias)
        self.dense = config.linear(f"{name}.dense", width, spec.hidden_size)
        quantized = bool(config.mode.kv_cache_quant_algo)
        self.kv_cache_scaling_factor = parameter(1, dtype=torch.float32) if quantized else None

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...], cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        sizes = (self.layer_idx, self.heads, self.kv_heads)
        options = (self.kv_cache_scaling_factor, self.paged_context_fmha)
        return self.dense(gpt_attention(self.qkv(x), *rotary, *cache, *sizes, *options))


class GatedMlp(nn.Module):
    """proj(silu(fc(x)) * gate(x)); fc and gate lie in one matrix where they can, so that x is read once (--use_fused_mlp)."""

    def __init__(self, config: NetworkConfig, layer_idx: int) -> None:
        super().__init__()
        spec, name = config.spec, f"transformer.layers.{layer_idx}.mlp"
        self.joined = config.mode.joins_fc_and_gate
        if self.joined:
            self.fused_fc = config.linear(f"{name}.fc", spec.hidden_size, 2 * spec.intermediate_size)
        else:
            self.fc = config.linear(f"{name}.fc", spec.hidden_size, spec.intermediate_size)
            self.gate = config.linear(f"{name}.gate", spec.hidden_size, spec.intermediate_size)
        self.proj = config.linear(f"{name}.proj", spec.intermediate_size, spec.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fc, gate = self.fused_fc(x).chunk(2, dim=-1) if self.joined else (self.fc(x), self.gate(x))
        return self.proj(F.silu(fc) * gate)


class DecoderLayer(nn.Module):
    def __init__(self, config: NetworkConfig, layer_idx: int) -> None:
        super().__init__()
        size, eps, dtype = config.spec.hidden_size, config.spec.norm_epsilon, config.dtype
        self.input_layernorm = RmsNorm(size, eps, dtype)
        self.attention = Attention(config, layer_idx)
        self.post_layernorm = RmsNorm(size, eps, dtype)
        self.mlp = GatedMlp(config, layer_idx)

    def forward(
        self, x: torch.Tensor, rotary: tuple[torch.Tensor, ...], cache: tuple[torch.Tensor, ...]
    ) -> torch.Tensor:
        x = x + self.attention(self.input_layernorm(x), rotary, cache)
        return x + self.mlp(self.post_layernorm(x))


class Transformer(nn.Module):
    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        spec, dtype = config.spec, config.dtype
        self.vocab_embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(spec.num_hidden_layers))
        self.ln_f = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.rotary_table: torch.Tensor
        table = torch.empty(config.positions, 2, spec.head_size, dtype=torch.float32)
        self.register_buffer("rotary_table", table)

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

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.transformer = Transformer(config)
        self.lm_head = config.linear("lm_head", config.spec.hidden_size, config.spec.vocab_size)

    def forward(self, input_ids, position_ids, last_token_ids, *cache):  # type: ignore[no-untyped-def]
        hidden = self.transformer(input_ids, position_ids, cache)
        # The norm works row by row: taking the wanted rows first gives the same numbers for less work.
        picked = self.transformer.ln_f(hidden.index_select(0, last_token_ids))
        return self.lm_head(picked)
