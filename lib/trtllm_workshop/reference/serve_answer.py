"""From the engine's news to OpenAI's answers: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from trtllm_workshop.reference.serve_link import Message
from trtllm_workshop.reference.serve_protocol import ChatRequest, Sampling


@dataclass
class Choice:
    """One answer as far as it has come."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[Message] = field(default_factory=list)

    def take(self, news: Message) -> None:
        """Add what one step made."""
        self.text += news["text"]
        self.tokens = news["tokens"]
        self.logprobs += news.get("logprobs", [])
        self.finish_reason, self.stop_reason = news.get("finish_reason"), news.get("stop_reason")


class Answer:
    """The shape of the answers to one request.

    Args:
        body: the request.
        model: name in the answers.
    """

    def __init__(self, body: Sampling, model: str) -> None:
        self.chat = isinstance(body, ChatRequest)
        self.id = ("chatcmpl-" if self.chat else "cmpl-") + uuid.uuid4().hex
        self.created, self.model, self._wants_logprobs = int(time.time()), model, body.logprobs not in (None, False)  # type: ignore[attr-defined]
        options = body.stream_options
        self.include_usage = bool(options and options.include_usage)
        self.continuous_usage = bool(options and options.continuous_usage_stats)
        self._offsets: dict[int, int] = {}

    def _frame(self, kind: str, choices: list[Message], usage: Message | None) -> Message:
        frame = {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        return frame if usage is None else {**frame, "usage": usage}

    @staticmethod
    def usage(prompt_tokens: int, completion_tokens: int) -> Message:
        """Exact counts: prompt tokens as the engine read them, completion tokens as it made them, the end token included."""
        total = prompt_tokens + completion_tokens
        return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}

    def whole(self, choices: list[Choice], prompt_tokens: int) -> Message:
        """The answer to a request that does not stream."""
        shown = [self._whole_choice(choice) for choice in choices]
        usage = self.usage(prompt_tokens, sum(choice.tokens for choice in choices))
        return self._frame("chat.completion" if self.chat else "text_completion", shown, usage)

    def _whole_choice(self, choice: Choice) -> Message:
        end = {"finish_reason": _reason(choice.finish_reason), "stop_reason": choice.stop_reason}
        body: Message = (
            {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
        )
        logprobs = self._logprobs(choice.index, choice.logprobs) if self._wants_logprobs else None
        return {"index": choice.index, **body, "logprobs": logprobs, **end}

    # Streams

    def first_events(self, count: int) -> list[bytes]:
        """What comes before any text: a chat names the role of each choice."""
        if not self.chat:
            return []
        choices = range(count)
        return [self._event([self._delta(i, {"role": "assistant", "content": ""}, None, None, None)]) for i in choices]

    def event(self, choice: Choice, news: Message, counts: tuple[int, int]) -> bytes:
        """One chunk. `counts`: prompt and completion tokens so far, for those who asked for them in every event."""
        reason, stop = _reason(news.get("finish_reason")), news.get("stop_reason")
        logprobs = self._logprobs(choice.index, news.get("logprobs", [])) if self._wants_logprobs else None
        if self.chat:
            delta = {"content": news["text"]} if news["text"] or not reason else {}
            shown = self._delta(choice.index, delta, logprobs, reason, stop)
        else:
            end = {"finish_reason": reason, "stop_reason": stop}
            shown = {"index": choice.index, "text": news["text"], "logprobs": logprobs, **end}
        return self._event([shown], self.usage(*counts) if self.continuous_usage else None)

    def last_events(self, prompt_tokens: int, completion_tokens: int) -> bytes:
        """The usage, if asked for, and the mark that ends a stream."""
        usage = self._event([], self.usage(prompt_tokens, completion_tokens)) if self.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def _delta(self, index: int, delta: Message, logprobs: Any, reason: str | None, stop: Any) -> Message:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop}

    def _event(self, choices: list[Message], usage: Message | None = None) -> bytes:
        return sse(self._frame("chat.completion.chunk" if self.chat else "text_completion", choices, usage))

    def _logprobs(self, index: int, entries: list[Message]) -> Message:
        if self.chat:
            return {
                "content": [
                    {**_token(e["token"], e["logprob"]), "top_logprobs": [_token(*t) for t in e["top"]]}
                    for e in entries
                ]
            }
        offset, offsets = self._offsets.get(index, 0), []
        for entry in entries:
            offsets.append(offset)
            offset += len(entry["token"])
        self._offsets[index] = offset
        return {
            "tokens": [entry["token"] for entry in entries],
            "token_logprobs": [entry["logprob"] for entry in entries],
            "top_logprobs": [dict(entry["top"]) for entry in entries],
            "text_offset": offsets,
        }


def _token(text: str, logprob: float) -> Message:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def _reason(reason: str | None) -> str | None:
    """OpenAI's finish reasons; a cancelled request ends with none of them."""
    return {"stop": "stop", "length": "length"}.get(reason or "", reason)


def sse(value: Message) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8") + b"\n\n"
