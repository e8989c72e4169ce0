"""What generation returns: RequestOutput and CompletionOutput, with TensorRT-LLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from trtllm_workshop.reference.request import Logprob, Request


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        text: the decoded answer, without the prompt.
        token_ids: the answer's token ids; the end token is included when one was made.
        finish_reason: `stop` (end token, stop word) or `length` (max_tokens reached), or `cancelled`.
        stop_reason: the stop string or stop token that matched; None for the end token.
        generation_logits: [tokens, vocabulary] float32, when asked for.
        logprobs, prompt_logprobs: a dictionary token id -> Logprob per token, when asked for.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    generation_logits: torch.Tensor | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass
class RequestOutput:
    """One request's result."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    context_logits: torch.Tensor | None = None

    @classmethod
    def of(cls, request: Request, prompt: str | None) -> RequestOutput:
        """The result of a request in its present state."""
        chosen = [entry[token].logprob for entry, token in zip(request.logprobs, request.token_ids, strict=False)]
        completion = CompletionOutput(
            index=0,
            text=request.text,
            token_ids=list(request.token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            generation_logits=torch.stack(request.generation_logits) if request.generation_logits else None,
            logprobs=list(request.logprobs),
            prompt_logprobs=list(request.prompt_logprobs),
            cumulative_logprob=sum(chosen) if chosen else None,
        )
        return cls(
            request.request_id, prompt, request.prompt_token_ids, [completion], request.finished, request.context_logits
        )
