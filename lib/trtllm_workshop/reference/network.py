"""The decoder graph of Llama-family models, over packed tokens.

Parameter names are those of the TensorRT-LLM checkpoint, so weights load without a translation table. Note the naming
that surprises people: `mlp.fc` is Hugging Face's gate_proj (SiLU is applied to it), `mlp.gate` is up_proj.

A graph is that of one rank. With several ranks it holds the rank's heads, its part of the MLP and its pipeline stage's
layers, and `collectives` where ranks meet; a graph of a single rank has none of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from trtllm_workshop.checkpoint import RankMapping, padded_vocabulary
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.attention import gpt_attention
from trtllm_workshop.reference.collectives import HIDDEN_INPUT, allgather, allreduce, rank_spec
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


def input_names(place: RankMapping) -> tuple[str, ...]:
    """INPUT_NAMES of one rank: later pipeline stages take hidden states, earlier ones give those of all tokens."""
    first = INPUT_NAMES[0] if place.is_first_stage else HIDDEN_INPUT
    return (first, INPUT_NAMES[1], *INPUT_NAMES[2 if place.is_last_stage else 3 :])


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


class EmbeddingOfRows(Embedding):
    """A rank's rows of the table: tokens of other ranks count as zeros, and the ranks' results are added.

    first_row: [1], int64: the vocabulary's row that the rank's table begins with.
    """

    first_row: torch.Tensor

    def __init__(self, rows: int, size: int, dtype: torch.dtype) -> None:
        super().__init__(rows, size, dtype)
        self.register_buffer("first_row", torch.empty(1, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        local, rows = ids - self.first_row, self.weight.shape[0]
        found = F.embedding(local.clamp(0, rows - 1), self.weight)
        return allreduce(found.masked_fill(((local < 0) | (local >= rows))[:, None], 0.0))


class EmbeddingOfColumns(Embedding):
    """A rank's columns of the table, looked up and laid side by side."""

    def __init__(self, rows: int, size: int, dtype: torch.dtype, ranks: int) -> None:
        super().__init__(rows, size, dtype)
        self.ranks = ranks

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return allgather(super().forward(ids), self.ranks)


@dataclass(frozen=True)
class NetworkConfig:
    """What a network is built from: the model, the type of unquantized tensors, the quantization, the position limit.

    `paged_context_fmha` as in `attention.attend`; `place` is the rank's; `embedding_dim` is how tensor-parallel ranks
    split the embedding: 0 by rows, 1 by columns, None not at all.
    """

    spec: ModelSpec
    dtype: torch.dtype
    positions: int
    mode: QuantMode
    paged_context_fmha: bool = True
    place: RankMapping = field(default_factory=RankMapping)
    embedding_dim: int | None = None

    @property
    def local(self) -> ModelSpec:
        """The sizes of this rank, see `collectives.rank_spec`."""
        return rank_spec(self.spec, self.place)

    @property
    def meets(self) -> bool:
        """Whether the rank shares its layers with others."""
        return self.place.tp_size > 1

    def embedding(self) -> Embedding:
        rows, size, tp = self.spec.vocab_size, self.spec.hidden_size, self.place.tp_size
        if not self.meets or self.embedding_dim is None:
            return Embedding(rows, size, self.dtype)
        if self.embedding_dim == 1:
            return EmbeddingOfColumns(rows, size // tp, self.dtype, tp)
        return EmbeddingOfRows(padded_vocabulary(rows, tp) // tp, size, self.dtype)

    def linear(self, module: str, inputs: int, outputs: int, bias: bool = False) -> nn.Module:
        return make_linear(self.mode, module, inputs, outputs, self.dtype, bias)


class Attention(nn.Module):
    def __init__(self, config: NetworkConfig, layer_idx: int) -> None:
        super().__init__()
        spec, name = config.local, f"transformer.layers.{layer_idx}.attention"
        self.meets = config.meets
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
        out = self.dense(gpt_attention(self.qkv(x), *rotary, *cache, *sizes, *options))
        return allreduce(out) if self.meets else out


class GatedMlp(nn.Module):
    """proj(silu(fc(x)) * gate(x)); fc and gate lie in one matrix where they can, so that x is read once (--use_fused_mlp)."""

    def __init__(self, config: NetworkConfig, layer_idx: int) -> None:
        super().__init__()
        spec, name = config.local, f"transformer.layers.{layer_idx}.mlp"
        self.meets = config.meets
        self.joined = config.mode.joins_fc_and_gate
        if self.joined:
            self.fused_fc = config.linear(f"{name}.fc", spec.hidden_size, 2 * spec.intermediate_size)
        else:
            self.fc = config.linear(f"{name}.fc", spec.hidden_size, spec.intermediate_size)
            self.gate = config.linear(f"{name}.gate", spec.hidden_size, spec.intermediate_size)
        self.proj = config.linear(f"{name}.proj", spec.intermediate_size, spec.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fc, gate = self.fused_fc(x).chunk(2, dim=-1) if self.joined else (self.fc(x), self.gate(x))
        out = self.proj(F.silu(fc) * gate)
        return allreduce(out) if self.meets else out


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
    """The layers of one pipeline stage, local numbers from 0; the embedding only on the first, the norm on the last."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        spec, dtype = config.local, config.dtype
        if config.place.is_first_stage:
            self.vocab_embedding = config.embedding()
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(spec.num_hidden_layers))
        if config.place.is_last_stage:
            self.ln_f = RmsNorm(spec.hidden_size, spec.norm_epsilon, dtype)
        self.rotary_table: torch.Tensor
        table = torch.empty(config.positions, 2, spec.head_size, dtype=torch.float32)
        self.register_buffer("rotary_table", table)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """x: token ids [tokens] on the first stage, hidden states [tokens, hidden] on the others."""
        rotary = self.rotary_table.index_select(0, positions).split(1, dim=1)
        if not x.is_floating_point():
            x = self.vocab_embedding(x)
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
        self.ranks, self.vocab_size = config.place.tp_size, config.spec.vocab_size
        if config.place.is_last_stage:
            rows = padded_vocabulary(self.vocab_size, self.ranks) // self.ranks
            self.lm_head = config.linear("lm_head", config.spec.hidden_size, rows)

    def forward(self, input_ids, position_ids, last_token_ids, *cache):  # type: ignore[no-untyped-def]
        return self.head(self.transformer(input_ids, position_ids, cache), last_token_ids)

    def head(self, hidden: torch.Tensor, last_token_ids: torch.Tensor) -> torch.Tensor:
        """[n, vocabulary]: each rank multiplies its rows of lm_head; what pads the vocabulary is cut off again."""
        # The norm works row by row: taking the wanted rows first gives the same numbers for less work.
        logits = self.lm_head(self.transformer.ln_f(hidden.index_select(0, last_token_ids)))
        if self.ranks == 1:
            return logits
        logits = allgather(logits, self.ranks)
        return logits if logits.shape[1] == self.vocab_size else logits[:, : self.vocab_size]


class FirstStage(DecoderForCausalLM):
    """The first of several pipeline stages: packed tokens in, hidden states of all of them out, [tokens, hidden]."""

    def forward(self, input_ids, position_ids, *cache):  # type: ignore[no-untyped-def]
        return self.transformer(input_ids, position_ids, cache)


class MiddleStage(DecoderForCausalLM):
    """A stage between others: hidden states in and out, [tokens, hidden]."""

    def forward(self, hidden_states_input, position_ids, *cache):  # type: ignore[no-untyped-def]
        return self.transformer(hidden_states_input, position_ids, cache)


class LastStage(DecoderForCausalLM):
    """The last of several stages: hidden states in, [tokens, hidden], logits out as of the whole model."""

    def forward(self, hidden_states_input, position_ids, last_token_ids, *cache):  # type: ignore[no-untyped-def]
        return self.head(self.transformer(hidden_states_input, position_ids, cache), last_token_ids)


def make_network(config: NetworkConfig) -> DecoderForCausalLM:
    """The module of one rank, whose forward takes `input_names(config.place)`."""
    first, last = config.place.is_first_stage, config.place.is_last_stage
    kinds = {(True, True): DecoderForCausalLM, (True, False): FirstStage, (False, False): MiddleStage}
    return kinds.get((first, last), LastStage)(config)
