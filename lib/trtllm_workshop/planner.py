"""Memory predicted before anything runs: weights and KV cache, from a model's description alone. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_workshop.model_spec import ModelSpec

BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1, "int4": 0.5, "int4_awq": 0.5, "nvfp4": 0.5}
NVFP4_BLOCK = 16  # inputs that share one FP8 scale
AWQ_GROUP = 128  # the default of quantize.py: input channels that share a scale


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that an engine takes on a GPU: its weights, and the KV cache for `tokens` tokens of all requests together.

    What comes on top (activations, CUDA's own context, buffers that grow with max_batch_size and max_num_tokens) is not
    counted, so a model that does not fit here does not fit at all, and one that barely fits may still fail.
    """

    weights: int
    kv_per_token: int
    tokens: int

    @property
    def kv_cache(self) -> int:
        return self.kv_per_token * self.tokens

    @property
    def total(self) -> int:
        return self.weights + self.kv_cache


def bytes_of(kind: str) -> float:
    """Bytes of one value. Raises ValueError for an unknown type, listing the known ones."""
    if kind not in BYTES:
        raise ValueError(f"{kind!r} is no type that is planned for: choose one of {', '.join(BYTES)}")
    return BYTES[kind]


def memory_need(
    spec: ModelSpec, dtype: str = "float16", tokens: int = 0, kv_dtype: str | None = None, group: int = AWQ_GROUP
) -> MemoryNeed:
    """What a model of this description needs on one GPU.

    The KV cache of a token is 2 (key and value) x layers x KV heads x head size x bytes; weights are counted as stored in
    an engine, where a tied head is a matrix of its own. `kv_dtype` is `dtype`, or float16 under quantized weights. Below
    16 bits only the matrices of the layers shrink: embedding, head, norms and biases stay 16-bit, and scales are added
    (`group` is the block size of int4_awq).
    """
    head = spec.vocab_size * spec.hidden_size if spec.tie_word_embeddings else 0
    kv = kv_dtype or (dtype if bytes_of(dtype) >= 2 else "float16")
    weights = (spec.parameter_count() + head) * bytes_of(dtype)
    if bytes_of(dtype) < 2:
        matrices = layer_matrices(spec)
        small = spec.num_hidden_layers * sum(outputs * inputs for outputs, inputs in matrices)
        scales = spec.num_hidden_layers * sum(scale_bytes(dtype, *shape, group) for shape in matrices)
        weights = small * bytes_of(dtype) + (spec.parameter_count() + head - small) * 2 + scales
    return MemoryNeed(int(weights), spec.kv_bytes_per_token(bytes_of(kv)), tokens)


def layer_matrices(spec: ModelSpec) -> list[tuple[int, int]]:
    """[outputs, inputs] of the five matrices of one layer: qkv, dense, fc, gate, proj."""
    width, hidden, inner = spec.num_attention_heads * spec.head_size, spec.hidden_size, spec.intermediate_size
    return [(spec.qkv_rows, hidden), (hidden, width), (inner, hidden), (inner, hidden), (hidden, inner)]


def scale_bytes(kind: str, outputs: int, inputs: int, group: int = AWQ_GROUP) -> int:
    """Bytes of one matrix's scales in an engine: two float32 for FP8 and FP4, otherwise 16-bit ones."""
    if kind == "fp8":
        return 2 * 4
    if kind == "nvfp4":
        return outputs * -(-inputs // NVFP4_BLOCK) + 2 * 4
    if kind == "int4_awq":  # per group of inputs, and one factor per input before the product
        return 2 * outputs * -(-inputs // group) + 2 * inputs
    return 2 * outputs


def verdict(need: MemoryNeed, memory_bytes: float) -> str:
    """One sentence: whether it fits into so many bytes, which part does not, and how many tokens of KV cache remain."""
    size = f"{memory_bytes / 1e9:.1f} GB"
    if need.weights > memory_bytes:
        return (
            f"the weights alone do not fit: {need.weights / 1e9:.1f} GB into {size}; take fewer bytes per weight (FP8, INT4), "
            "a smaller model, or several GPUs"
        )
    left = int((memory_bytes - need.weights) // need.kv_per_token)
    if need.total > memory_bytes:
        return (
            f"the weights fit, the KV cache does not: {need.tokens} tokens need {need.kv_cache / 1e9:.1f} GB, and {left} tokens "
            f"are left in {size}; lower max_batch_size or max_seq_len"
        )
    return f"fits: {need.total / 1e9:.1f} GB of {size}; at most {left} tokens of KV cache"
