"""Memory of one rank of several: weights as the split files hold them, KV cache per token, buffers, and what fits.

The weights and the KV cache are exact. Buffers are an estimate: how many values are alive at once depends on the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner import AWQ_GROUP, bytes_of, scale_bytes
from trtllm_workshop.planner_gpus import PlanProblem

# What a process took on an H200 beside weights and pool, before the first step: CUDA's own context and libraries
# (datasets/measurements/2026-12-03-h200-engine.json: 143,155 MiB - 120,484 / 0.9 MiB - 8,662 MiB of engine).
CONTEXT_BYTES = 622 * 2**20


@dataclass(frozen=True)
class Split:
    """How a model is spread: `tp` ranks share every layer, `pp` stages hold some layers each."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp

    def check(self, spec: ModelSpec) -> None:
        """Raises PlanProblem with both numbers where the model cannot be split so."""
        for value, flag in ((self.tp, "--tp"), (self.pp, "--pp")):
            if value < 1:
                raise PlanProblem(f"{flag} {value} is no number of ranks: it must be at least 1")
        heads, kv = spec.num_attention_heads, spec.num_key_value_heads
        possible = [n for n in range(1, heads + 1) if _divides(spec, n)]
        advice = f"this model can be split by {', '.join(map(str, possible))}"
        if heads % self.tp:
            raise PlanProblem(f"--tp {self.tp}: {heads} attention heads cannot be shared by {self.tp} ranks; {advice}")
        if kv % self.tp and self.tp % kv:
            raise PlanProblem(
                f"--tp {self.tp}: {kv} KV heads can neither be shared by {self.tp} ranks nor be copied to them evenly; {advice}"
            )
        if spec.intermediate_size % self.tp:
            raise PlanProblem(
                f"--tp {self.tp}: intermediate_size {spec.intermediate_size} is no multiple of {self.tp}; {advice}"
            )
        if self.pp > spec.num_hidden_layers:
            raise PlanProblem(
                f"--pp {self.pp}: {spec.num_hidden_layers} layers cannot fill {self.pp} stages; choose at most that many"
            )

    def layers(self, spec: ModelSpec, stage: int = 0) -> int:
        """Layers of a stage: the first stages take one more where the division leaves some over."""
        whole, over = divmod(spec.num_hidden_layers, self.pp)
        return whole + (stage < over)

    def kv_heads(self, spec: ModelSpec) -> int:
        """KV heads of one rank: below one a rank, each head is copied to several ranks."""
        return max(1, spec.num_key_value_heads // self.tp)


def _divides(spec: ModelSpec, tp: int) -> bool:
    kv = spec.num_key_value_heads
    return not (spec.num_attention_heads % tp or spec.intermediate_size % tp or (kv % tp and tp % kv))


def rank_matrices(spec: ModelSpec, split: Split) -> list[tuple[int, int]]:
    """[outputs, inputs] of one rank's five matrices of a layer: qkv, dense, fc, gate, proj."""
    width = spec.num_attention_heads * spec.head_size // split.tp
    inner, hidden = spec.intermediate_size // split.tp, spec.hidden_size
    qkv = width + 2 * split.kv_heads(spec) * spec.head_size
    return [(qkv, hidden), (hidden, width), (inner, hidden), (inner, hidden), (hidden, inner)]


def head_rows(spec: ModelSpec, split: Split) -> int:
    """Rows of lm_head on one rank: the vocabulary is padded to a multiple of the ranks."""
    return -(-spec.vocab_size // split.tp)


def rank_weights(
    spec: ModelSpec, dtype: str = "float16", split: Split | None = None, stage: int = 0, group: int = AWQ_GROUP
) -> int:
    """Bytes of the weights of one rank of a stage. The embedding is on the first stage and is not split; norms and the
    biases of row-split matrices are on every rank; lm_head and the last norm are on the last stage."""
    split = split or Split()
    matrices, layers = rank_matrices(spec, split), split.layers(spec, stage)
    other = 2.0 if bytes_of(dtype) < 2 else bytes_of(dtype)  # quantized engines keep everything else in 16 bits
    layer = sum(outputs * inputs * bytes_of(dtype) for outputs, inputs in matrices)
    layer += other * (2 * spec.hidden_size + (matrices[0][0] if spec.attn_bias else 0))
    if bytes_of(dtype) < 2:
        layer += sum(scale_bytes(dtype, *shape, group) for shape in matrices)
    total = layers * layer
    if stage == 0:
        total += other * spec.vocab_size * spec.hidden_size
    if stage == split.pp - 1:
        total += other * (head_rows(spec, split) * spec.hidden_size + spec.hidden_size)
    return int(total)


def rank_kv_per_token(spec: ModelSpec, kv_dtype: str = "float16", split: Split | None = None, stage: int = 0) -> int:
    """Bytes of KV cache that one token takes on one rank of a stage."""
    split = split or Split()
    return int(2 * split.layers(spec, stage) * split.kv_heads(spec) * spec.head_size * bytes_of(kv_dtype))


def buffer_bytes(spec: ModelSpec, split: Split, max_num_tokens: int, max_batch_size: int) -> int:
    """Estimate of what a step needs beside weights and cache: activations in 16 bits of max_num_tokens tokens (residual,
    normed input and output of `hidden`, the widest pair of a layer) and float32 logits of max_batch_size tokens."""
    (qkv, hidden), (inner, _) = rank_matrices(spec, split)[0], rank_matrices(spec, split)[2]
    return 2 * max_num_tokens * (3 * hidden + max(qkv, 3 * inner)) + 4 * max_batch_size * spec.vocab_size


@dataclass(frozen=True)
class KvPool:
    """The KV cache that a server takes when it starts: `bytes`, the `tokens` that fit, and a `warning` or None."""

    bytes: int
    tokens: int
    warning: str | None = None


def kv_pool(
    memory: float,
    weights: float,
    kv_per_token: int,
    fraction: float = 0.9,
    used_by_others: float = 0,
    buffers: float = 0,
) -> KvPool:
    """The pool that TensorRT-LLM takes: `fraction` of the memory that is FREE once the weights are loaded (bytes).

    A second process on the same GPU gets its fraction of what the first one left. Raises PlanProblem for a fraction that is
    none; a pool of 0 bytes says that nothing is left.
    """
    if not 0 < fraction <= 1:
        raise PlanProblem(f"the fraction of free memory is {fraction}: it must be above 0 and at most 1")
    free = memory - used_by_others - weights - buffers
    size = int(max(0.0, free) * fraction)
    warning = None
    if used_by_others > 0:
        warning = (
            f"{used_by_others / 1e9:.1f} GB of this GPU are held by another process already (a notebook's kernel or a first "
            f"server?): the KV cache is {fraction:.0%} of what is free after the weights, {size / 1e9:.1f} GB. End that process, "
            "or give the first server a smaller free_gpu_memory_fraction"
        )
    return KvPool(size, size // kv_per_token, warning)


def largest_batch(tokens: int, length: int) -> int:
    """Requests of so many tokens (prompt and answer together) that fit into a pool at once."""
    return tokens // max(1, length)
