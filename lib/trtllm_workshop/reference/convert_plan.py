"""Which pieces of which Hugging Face tensors make up each tensor of each rank.

Names and split rules: tensorrt_llm/models/model_weights_loader.py and tensorrt_llm/models/llama/convert.py. A plan is
data only, so it can be checked and tested without weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_workshop.checkpoint import RankMapping, padded_vocabulary
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_source import ConversionError

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True)
class Part:
    """Rows [start, stop) of a source tensor, all its columns or the range `columns`; source "" means rows of zeros."""

    source: str
    rows: tuple[int, int]
    columns: tuple[int, int] | None = None


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of a rank's file: its parts lie below each other."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Sharding:
    """How a model is spread: tensor and pipeline parallel sizes, and whether the embedding table is split (and how)."""

    tp_size: int = 1
    pp_size: int = 1
    use_parallel_embedding: bool = False
    embedding_sharding_dim: int = 0


def check_sharding(spec: ModelSpec, sharding: Sharding) -> None:
    """Raises ConversionError when the model cannot be split like this; the message has both numbers."""
    tp, pp = sharding.tp_size, sharding.pp_size
    for flag, size in (("--tp_size", tp), ("--pp_size", pp)):
        if size < 1:
            raise ConversionError(f"{flag} is {size}, expected at least 1")
    fitting = [n for n in range(1, spec.num_attention_heads + 1) if not _tp_problem(spec, n)]
    if problem := _tp_problem(spec, tp):
        raise ConversionError(f"--tp_size {tp} does not fit: {problem}. Possible are {', '.join(map(str, fitting))}")
    if pp > spec.num_hidden_layers:
        raise ConversionError(f"--pp_size {pp} is more than the {spec.num_hidden_layers} layers; choose fewer stages")
    if sharding.use_parallel_embedding and sharding.embedding_sharding_dim == 1 and spec.hidden_size % tp:
        raise ConversionError(
            f"--embedding_sharding_dim 1 cannot split hidden size {spec.hidden_size} over --tp_size {tp}; use 0"
        )


def _tp_problem(spec: ModelSpec, tp: int) -> str:
    heads, kv_heads = spec.num_attention_heads, spec.num_key_value_heads
    if heads % tp:
        return f"{heads} attention heads cannot be shared by {tp} ranks"
    if kv_heads % tp and tp % kv_heads:
        return f"{kv_heads} KV heads and {tp} ranks: one must be a multiple of the other"
    if spec.intermediate_size % tp:
        return f"intermediate size {spec.intermediate_size} cannot be shared by {tp} ranks"
    return ""


def source_tensors(spec: ModelSpec, with_head: bool = True) -> dict[str, tuple[int, ...]]:
    """{Hugging Face name: shape} that a model with this spec must have; `with_head` False when lm_head is tied."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    width, kv_width = spec.num_attention_heads * spec.head_size, spec.num_key_value_heads * spec.head_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}
    for layer in range(spec.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        for letter, rows in (("q", width), ("k", kv_width), ("v", kv_width)):
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (rows, hidden)
            if spec.attn_bias:
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, width)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = (inner, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, inner)
    shapes[NORM] = (hidden,)
    if with_head:
        shapes[HEAD] = (spec.vocab_size, hidden)
    return shapes


def _share(size: int, place: RankMapping) -> tuple[int, int]:
    part = size // place.tp_size
    return place.tp_rank * part, (place.tp_rank + 1) * part


def kv_rows(spec: ModelSpec, place: RankMapping) -> tuple[int, int]:
    """Rows of k_proj (and v_proj) for this rank; with fewer KV heads than ranks, neighbours hold the same head."""
    if spec.num_key_value_heads >= place.tp_size:
        return _share(spec.num_key_value_heads * spec.head_size, place)
    head = place.tp_rank // (place.tp_size // spec.num_key_value_heads)
    return head * spec.head_size, (head + 1) * spec.head_size


def _vocabulary_rows(source: str, spec: ModelSpec, place: RankMapping) -> tuple[Part, ...]:
    start, stop = _share(padded_vocabulary(spec.vocab_size, place.tp_size), place)
    real = min(stop, spec.vocab_size)
    parts = (Part(source, (start, real)), Part("", (0, stop - max(start, real))))
    return tuple(part for part in parts if part.rows[1] > part.rows[0])


def plan_rank(spec: ModelSpec, sharding: Sharding, rank: int, head: str = HEAD) -> Iterator[OutputTensor]:
    """Yields the tensors of rankN.safetensors; `head` names the source of lm_head (the embedding when tied).

    q, k and v are split each for itself and joined per rank: cutting the fused matrix would hand the first ranks only
    queries. Layer numbers start at 0 on every pipeline stage.
    """
    place = RankMapping(sharding.tp_size, sharding.pp_size, rank)
    hidden, tp = spec.hidden_size, sharding.tp_size
    if place.is_first_stage:
        parts: tuple[Part, ...] = (Part(EMBEDDING, (0, spec.vocab_size)),)
        shape: tuple[int, ...] = (spec.vocab_size, hidden)
        if sharding.use_parallel_embedding and tp > 1:
            if sharding.embedding_sharding_dim == 1:
                parts = (Part(EMBEDDING, (0, spec.vocab_size), _share(hidden, place)),)
                shape = (spec.vocab_size, hidden // tp)
            else:
                parts = _vocabulary_rows(EMBEDDING, spec, place)
                shape = (padded_vocabulary(spec.vocab_size, tp) // tp, hidden)
        yield OutputTensor("transformer.vocab_embedding.weight", shape, parts)
    for local, layer in enumerate(place.layers(spec.num_hidden_layers)):
        yield from _plan_layer(spec, place, f"transformer.layers.{local}.", f"model.layers.{layer}.")
    if place.is_last_stage:
        yield OutputTensor("transformer.ln_f.weight", (hidden,), (Part(NORM, (0, hidden)),))
        rows = padded_vocabulary(spec.vocab_size, tp) // tp
        yield OutputTensor("lm_head.weight", (rows, hidden), _vocabulary_rows(head, spec, place))


def _plan_layer(spec: ModelSpec, place: RankMapping, target: str, source: str) -> Iterator[OutputTensor]:
    hidden = spec.hidden_size
    width = spec.num_attention_heads * spec.head_size
    queries, keys, inner = _share(width, place), kv_rows(spec, place), _share(spec.intermediate_size, place)
    sections = (("q", queries), ("k", keys), ("v", keys))
    qkv = sum(stop - start for _, (start, stop) in sections)
    columns = None if place.tp_size == 1 else queries
    inner_columns = None if place.tp_size == 1 else inner

    def norm(name: str, origin: str) -> OutputTensor:
        return OutputTensor(target + name, (hidden,), (Part(source + origin, (0, hidden)),))

    def fused(kind: str, shape: tuple[int, ...]) -> OutputTensor:
        parts = tuple(Part(f"{source}self_attn.{letter}_proj.{kind}", rows) for letter, rows in sections)
        return OutputTensor(f"{target}attention.qkv.{kind}", shape, parts)

    def by_rows(name: str, origin: str) -> OutputTensor:
        return OutputTensor(target + name, (inner[1] - inner[0], hidden), (Part(source + origin, inner),))

    yield norm("input_layernorm.weight", "input_layernorm.weight")
    yield fused("weight", (qkv, hidden))
    if spec.attn_bias:
        yield fused("bias", (qkv,))
    dense = Part(source + "self_attn.o_proj.weight", (0, hidden), columns)
    yield OutputTensor(target + "attention.dense.weight", (hidden, queries[1] - queries[0]), (dense,))
    yield norm("post_layernorm.weight", "post_attention_layernorm.weight")
    # The names look swapped and are right: SiLU is applied to fc, which is Hugging Face's gate_proj.
    yield by_rows("mlp.fc.weight", "mlp.gate_proj.weight")
    yield by_rows("mlp.gate.weight", "mlp.up_proj.weight")
    down = Part(source + "mlp.down_proj.weight", (0, hidden), inner_columns)
    yield OutputTensor(target + "mlp.proj.weight", (hidden, inner[1] - inner[0]), (down,))
