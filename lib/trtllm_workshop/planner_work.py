"""What one rank has to do in a step, counted from the model: operations, bytes moved, bytes sent. No time in here."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.planner import bytes_of
from trtllm_workshop.planner_gpus import Gpu
from trtllm_workshop.planner_memory import Split, head_rows, rank_kv_per_token, rank_matrices, rank_weights

# Which tensor-core rate the products of a weight type run at. INT8 and INT4 weights are widened to 16 bits first.
UNIT = {
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "fp16",
    "fp8": "fp8",
    "nvfp4": "fp4",
    "int8": "fp16",
    "int4": "fp16",
    "int4_awq": "fp16",
}

ONE_RANK = Split()


@dataclass(frozen=True)
class Work:
    """Seconds that a rank needs for each kind of work at the GPU's peak rates, and counts of what costs time each.

    `matrices`: operations of the matrix products. `weights`: reading the weights. `streams`: values that the small kernels
    (norms, rotary, activation) read and write. `cache`: reading the KV cache. `scores`: operations of the prompts' attention.
    `link`: bytes that the rank sends. `layers`: layers run.
    `messages`: times that ranks wait for each other.
    """

    matrices: float = 0
    weights: float = 0
    streams: float = 0
    cache: float = 0
    scores: float = 0
    link: float = 0
    layers: float = 0
    messages: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    def times(self, count: float) -> Work:
        return Work(*(count * getattr(self, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Engine:
    """A model in a precision, spread over ranks of one GPU type, as the planner sees it."""

    spec: ModelSpec
    gpu: Gpu
    dtype: str = "float16"
    kv_dtype: str = "float16"
    split: Split = ONE_RANK

    @property
    def weights(self) -> int:
        """Bytes of weights of the fullest rank."""
        return max(rank_weights(self.spec, self.dtype, self.split, stage) for stage in range(self.split.pp))

    @property
    def kv_per_token(self) -> int:
        """Bytes of KV cache per token on the rank with the most layers."""
        return rank_kv_per_token(self.spec, self.kv_dtype, self.split)

    def step(
        self,
        prompt_tokens: float = 0,
        answers: float = 0,
        cached_tokens: float = 0,
        score_pairs: float = 0,
        prompts: float = 0,
    ) -> Work:
        """One step of one stage (the first, which has the most layers; the last stage's lm_head is added to it).

        `prompt_tokens` are read, `answers` gain one token each and read `cached_tokens` of the cache together;
        `score_pairs` counts (query, key) pairs of the prompts; `prompts` of them end in this step and need logits.
        """
        spec, gpu, split = self.spec, self.gpu, self.split
        layers, tokens = split.layers(spec), prompt_tokens + answers
        matrices = rank_matrices(spec, split)
        values = sum(outputs * inputs for outputs, inputs in matrices)
        head = head_rows(spec, split) * spec.hidden_size
        # The embedding is not read, only rows of it are. With stages, the last one reads as much for lm_head.
        table = spec.vocab_size * spec.hidden_size * (2 if bytes_of(self.dtype) < 2 else bytes_of(self.dtype))
        read = self.weights - table + (0 if split.pp == 1 else table)
        head_unit = "fp32" if self.dtype == "float32" else "fp16"
        compute = 2 * layers * values * tokens / gpu.rate(UNIT[self.dtype])
        compute += 2 * head * (answers + prompts) / gpu.rate(head_unit)
        width = spec.num_attention_heads * spec.head_size // split.tp
        moved = 8 * spec.hidden_size + 2 * matrices[0][0] + 2 * width + 3 * matrices[2][0]
        return Work(
            matrices=compute,
            weights=max(read, 0) / gpu.bandwidth if tokens else 0,
            streams=2 * layers * moved * tokens / gpu.bandwidth,
            cache=self.kv_per_token * cached_tokens / gpu.bandwidth,
            scores=4 * layers * width * score_pairs / gpu.rate(head_unit),
            link=self._sent(tokens, layers) / gpu.link,
            layers=layers if tokens else 0,
            messages=(2 * layers + 1) * (split.tp > 1) + (split.pp > 1) if tokens else 0,
        )

    def _sent(self, tokens: float, layers: int) -> float:
        """Bytes that a rank sends: two all-reduces of [tokens, hidden] in 16 bits a layer, as a ring sends them, and the
        hidden states once to the next stage."""
        size = 2 * tokens * self.spec.hidden_size
        ring = 2 * (self.split.tp - 1) / self.split.tp
        return 2 * layers * ring * size + (size if self.split.pp > 1 else 0)
