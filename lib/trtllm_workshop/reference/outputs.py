"""What generation returns: RequestOutput and CompletionOutput, with TensorRT-LLM's field names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from trtllm_workshop.reference.request import Logprob, Request
from trtllm_workshop.reference.update_queue import UpdateQueue

Abort = Callable[[list[Request]], None]


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
        text: the decoded answer so far, without the prompt.
        token_ids: the answer's token ids; the end token is included when one was made.
        finish_reason: `stop` (end token, stop word), `length` (max_tokens reached) or `cancelled`; None while it runs.
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

    def __post_init__(self) -> None:
        # What was there at the streaming step before this one.
        self._seen_text = self._seen_tokens = 0

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def text_diff(self) -> str:
        """The text that the latest streaming step added. Empty when its token completes no character yet."""
        return self.text[self._seen_text :]

    @property
    def token_ids_diff(self) -> list[int]:
        """The tokens that the latest streaming step added."""
        return self.token_ids[self._seen_tokens :]

    @property
    def logprobs_diff(self) -> list[dict[int, Logprob]]:
        """The log probabilities that the latest streaming step added."""
        return self.logprobs[self._seen_tokens :]

    def advance(self, request: Request, tokens: int, characters: int) -> None:
        """Go on to the point at which the answer had so many tokens and characters."""
        self._seen_tokens, self._seen_text = len(self.token_ids), len(self.text)
        self.token_ids += request.token_ids[self._seen_tokens : tokens]
        self.text += request.text[self._seen_text : characters]
        self.logprobs += request.logprobs[len(self.logprobs) : tokens]

    def finish(self, request: Request) -> None:
        """Everything that is known once the request has ended."""
        self.finish_reason, self.stop_reason = request.finish_reason, request.stop_reason
        self.prompt_logprobs = list(request.prompt_logprobs)
        if request.generation_logits:
            self.generation_logits = torch.stack(request.generation_logits)
        chosen = [entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids, strict=False)]
        self.cumulative_logprob = sum(chosen) if chosen else None


class _Point(NamedTuple):
    """How far an answer was when its listener was called."""

    tokens: int
    characters: int
    finished: bool


@dataclass
class RequestOutput:
    """One request's result.

    What `LLM.generate` returns is complete. What `LLM.generate_async` returns may still be running: `await` it, call
    `result()`, or, with streaming, iterate over it (`for` or `async for`); every step yields this same object with one more
    token. A wait that is interrupted (Ctrl-C, a cancelled task) aborts the request, and so does dropping the last reference.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    context_logits: torch.Tensor | None = None

    @classmethod
    def of(cls, request: Request, prompt: str | None) -> RequestOutput:
        """The result of a request in its present state."""
        output = cls(request.request_id, prompt, request.prompt_token_ids, [CompletionOutput(0)], False)
        output._attach(request, None, False)
        output._reach(_Point(len(request.token_ids), len(request.text), request.finished))
        return output

    @classmethod
    def following(cls, request: Request, prompt: str | None, abort: Abort, streaming: bool) -> RequestOutput:
        """The result of a request that is about to be submitted; `abort` takes requests out of the executor."""
        output = cls(request.request_id, prompt, request.prompt_token_ids, [CompletionOutput(0)], False)
        output._attach(request, abort, streaming)
        return output

    def _attach(self, request: Request, abort: Abort | None, streaming: bool) -> None:
        self._request, self._abort, self._streaming = request, abort, streaming
        self._news: UpdateQueue[_Point] = UpdateQueue()
        if abort is None:
            return
        # The listener knows the queue and not this object, which may so be dropped while the request runs.
        put = self._news.put

        def listen(request: Request) -> None:
            if streaming or request.finished:
                put(_Point(len(request.token_ids), len(request.text), request.finished))

        request.listener = listen
        weakref.finalize(self, _drop, request, abort).atexit = False

    def _reach(self, point: _Point) -> None:
        request, completion = self._request, self.outputs[0]
        completion.advance(request, point.tokens, point.characters)
        if point.finished:
            self.finished = True
            self.context_logits = request.context_logits
            completion.finish(request)
            if request.error is not None:
                raise request.error

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait until the request has ended.

        Raises:
            TimeoutError: when that takes more than `timeout` seconds; the request goes on.
        """
        while not self.finished:
            self._wait(timeout)
        return self

    async def aresult(self) -> RequestOutput:
        """`result` for a task of an event loop."""
        while not self.finished:
            await self._await_news()
        return self

    def _wait(self, timeout: float | None = None) -> None:
        try:
            self._reach(self._news.get(timeout))
        except TimeoutError:
            raise
        except BaseException:
            self.abort()
            raise

    async def _await_news(self) -> None:
        try:
            self._reach(await self._news.aget())
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Cancel the request and give its KV-cache blocks back. An ended request stays as it is."""
        if self._abort is not None and not self._request.finished:
            self._abort([self._request])

    def aborted(self) -> bool:
        """Whether the request was cancelled."""
        return self._request.finish_reason == "cancelled"

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.aresult().__await__()

    def _need_streaming(self) -> None:
        if not self._streaming:
            raise RuntimeError(
                "this request does not stream: use generate_async(…, streaming=True) to iterate over it, or result()"
            )

    def __iter__(self) -> RequestOutput:
        self._need_streaming()
        return self

    def __next__(self) -> RequestOutput:
        if self.finished:
            raise StopIteration
        self._wait()
        return self

    def __aiter__(self) -> RequestOutput:
        self._need_streaming()
        return self

    async def __anext__(self) -> RequestOutput:
        if self.finished:
            raise StopAsyncIteration
        await self._await_news()
        return self


def _drop(request: Request, abort: Abort) -> None:
    if not request.finished:
        abort([request])
