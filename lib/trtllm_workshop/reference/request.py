"""One request on its way through the executor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer, find_stop
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules

# TensorRT-LLM's default random seed: without a seed of its own, a request gives the same tokens every time.
DEFAULT_SEED = 0


@dataclass(frozen=True)
class Logprob:
    """Natural logarithm of a token's probability, and its rank among all tokens (1 is the most likely)."""

    logprob: float
    rank: int


def logprobs_of(logits: torch.Tensor, chosen: int, count: int) -> dict[int, Logprob]:
    """The chosen token and the `count` most likely ones. logits: [vocabulary] float32, before any sampling change."""
    values = logits.log_softmax(-1)
    top = values.topk(min(count, len(values))).indices.tolist() if count else []
    found = {t: Logprob(float(values[t]), rank + 1) for rank, t in enumerate(top)}
    if chosen not in found:
        found[chosen] = Logprob(float(values[chosen]), int((values > values[chosen]).sum()) + 1)
    return found


@dataclass
class Request:
    """State of one request: what was asked, what was made, why it ended."""

    request_id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    rules: StopRules
    tokenizer: Any = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    context_logits: torch.Tensor | None = None
    generation_logits: list[torch.Tensor] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    text: str = ""

    def __post_init__(self) -> None:
        self.generator = None
        if not self.params.greedy:
            seed = DEFAULT_SEED if self.params.seed is None else self.params.seed
            self.generator = torch.Generator().manual_seed(seed)
        self._stream = None
        if self.tokenizer is not None and self.params.detokenize:
            skip = self.params.skip_special_tokens
            self._stream = IncrementalDetokenizer(self.tokenizer, self.prompt_token_ids, skip)

    @property
    def max_new_tokens(self) -> int:
        return self.params.max_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def accept(self, token: int) -> None:
        """Add a token and decide whether the request ends with it."""
        rules = self.rules
        if token in rules.stop_ids - rules.end_ids and not self.params.include_stop_str_in_output:
            # A stop token is no part of the answer, and so nothing that was kept about it is.
            del self.logprobs[len(self.token_ids) :], self.generation_logits[len(self.token_ids) :]
            self._finish("stop", token)
            return
        self.token_ids.append(token)
        if self._stream is not None:
            self.text += self._stream.add(token)
        if token in rules.end_ids:
            self._finish("stop", None)
        elif token in rules.stop_ids:
            self._finish("stop", token)
        elif rules.stop_texts and (hit := find_stop(self.text, rules.stop_texts)):
            end = hit[0] + (len(hit[1]) if self.params.include_stop_str_in_output else 0)
            self.text = self.text[:end]
            self.finish_reason, self.stop_reason = "stop", hit[1]
        elif any(self.token_ids[-len(s) :] == s for s in rules.stop_sequences):
            self._finish("stop", None)
        elif len(self.token_ids) >= self.params.max_tokens:
            self._finish("length", None)

    def _finish(self, reason: str, stop_reason: int | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self.text += self._stream.flush()
