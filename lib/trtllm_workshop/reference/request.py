"""One request on its way through the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer
from trtllm_workshop.reference.sampler import choose, is_plain_greedy
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules
from trtllm_workshop.reference.stop_text import StopTextFilter

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
    """State of one request: what was asked, what was made, why it ended.

    Attributes:
        token_ids, text: the answer so far; both only ever grow, so that a reader may remember how far it has read. Text
            that may be the start of a stop string is held back.
        finish_reason: `stop`, `length` or `cancelled`; None while it runs.
        error: what ended it, when that was no reason of its own.
        listener: called after every step that gave a token, and at the end, in the thread that ran the step.
    """

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
    error: BaseException | None = None
    listener: Callable[[Request], None] | None = None

    def __post_init__(self) -> None:
        self._context: list[torch.Tensor] = []
        params = self.params
        reads = self.reads_whole_context or params.logprobs is not None or params.return_generation_logits
        self._plain = is_plain_greedy(params, self.rules) and not reads
        self.generator = None
        if not self.params.greedy:
            seed = DEFAULT_SEED if self.params.seed is None else self.params.seed
            self.generator = torch.Generator().manual_seed(seed)
        self._stream = None
        if self.tokenizer is not None and self.params.detokenize:
            skip = self.params.skip_special_tokens
            self._stream = IncrementalDetokenizer(self.tokenizer, self.prompt_token_ids, skip)
        self._stops = None
        if self.rules.stop_texts:
            self._stops = StopTextFilter(self.rules.stop_texts, self.params.include_stop_str_in_output)

    @property
    def max_new_tokens(self) -> int:
        return self.params.max_tokens

    @property
    def plain(self) -> bool:
        """Whether the next token is the most likely one and nothing else is wanted of the logits."""
        return self._plain

    @property
    def reads_whole_context(self) -> bool:
        """Whether the logits of every prompt token are wanted: a cached prefix would leave some out."""
        return self.params.return_context_logits or self.params.prompt_logprobs is not None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def choose(self, logits: torch.Tensor) -> None:
        """Choose the next token from its logits ([vocabulary]) and accept it."""
        params, values = self.params, logits.float().cpu()
        token = choose(values, params, self.rules, self.prompt_token_ids, self.token_ids, self.generator)
        if params.logprobs is not None:
            self.logprobs.append(logprobs_of(values, token, params.logprobs))
        if params.return_generation_logits:
            self.generation_logits.append(values)
        self.accept(token)

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
            self._show(self._stream.add(token))
        if token in rules.end_ids:
            self._finish("stop", None)
        elif token in rules.stop_ids:
            self._finish("stop", token)
        elif self._stops is not None and self._stops.matched is not None:
            self.finish_reason, self.stop_reason = "stop", self._stops.matched
        elif any(self.token_ids[-len(s) :] == s for s in rules.stop_sequences):
            self._finish("stop", None)
        elif len(self.token_ids) >= self.params.max_tokens:
            self._finish("length", None)

    def _show(self, piece: str) -> None:
        self.text += piece if self._stops is None else self._stops.add(piece)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self._stream is not None:
            self._show(self._stream.flush())
        if self._stops is not None:
            if self._stops.matched is not None:  # only what was held back made it complete
                self.finish_reason, self.stop_reason = "stop", self._stops.matched
            else:
                self.text += self._stops.flush()

    def keep_context(self, logits: torch.Tensor, start: int, is_last: bool) -> None:
        """Keep the logits of the prompt tokens from `start` on. logits: [tokens of the chunk, vocabulary]."""
        if start == 0:
            self._context = []  # a request that was paused inside its prompt begins anew
        self._context.append(logits.float().cpu())
        if not is_last:
            return
        values = torch.cat(self._context)
        self._context = []
        if self.params.return_context_logits:
            self.context_logits = values
        if self.params.prompt_logprobs is not None:
            # The logits after token i judge token i + 1; the first token has none.
            following, count = self.prompt_token_ids[1:], self.params.prompt_logprobs
            self.prompt_logprobs = [logprobs_of(v, t, count) for v, t in zip(values, following, strict=False)]

    def cancel(self) -> bool:
        """End the request now; False when it had ended already. What was made so far stays."""
        if self.finished:
            return False
        self.finish_reason = "cancelled"
        return True

    def tell(self) -> bool:
        """Call the listener; False when it failed, with `error` set."""
        try:
            if self.listener is not None:
                self.listener(self)
        except Exception as error:
            self.error = error
            return False
        return True
