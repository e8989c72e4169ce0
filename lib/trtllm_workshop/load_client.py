"""One request to an OpenAI-compatible server, timed: what was sent, when each piece of text came, what the server counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from trtllm_workshop.load_metrics import RequestRecord
from trtllm_workshop.load_sse import DONE, BadEvent, Event, SseParser, event_json

ENDPOINTS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
# What each kind of server needs so that an answer has the asked length; OpenAI's own API has no such field (P111).
SERVER_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "trtllm": {"ignore_eos": True},
    "vllm": {"ignore_eos": True},
    "sglang": {"ignore_eos": True},
    "tgi": {},
    "openai": {},
}
_READ_BUFFER = 2**20


@dataclass(frozen=True)
class Target:
    """Where and how requests are sent.

    Attributes:
        url: of the server, without a path.
        endpoint: `completions` or `chat`.
        model: the name the server knows the model by.
        server: kind of server, for the field that keeps answers from ending early.
        fields: further fields of every request body; they win over all others.
        api_key: sent as a bearer token, if there is one.
        timeout_s: limit of one request.
        count: counts the tokens of a text, for servers that report no usage.
    """

    url: str
    endpoint: str = "completions"
    model: str = ""
    server: str = "trtllm"
    fields: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout_s: float = 600.0
    count: Callable[[str], int] | None = None

    def __post_init__(self) -> None:
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint is {self.endpoint!r}, expected one of {', '.join(ENDPOINTS)}")
        if self.server not in SERVER_FIELDS:
            raise ValueError(f"server is {self.server!r}, expected one of {', '.join(SERVER_FIELDS)}")
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {self.url!r}, expected http://HOST:PORT")

    @property
    def address(self) -> str:
        return self.url.rstrip("/").removesuffix("/v1") + ENDPOINTS[self.endpoint]

    def body(self, prompt: str, max_tokens: int) -> dict[str, Any]:
        """The request body: greedy, streamed, with the server's own count of tokens at the end."""
        text = (
            {"prompt": prompt}
            if self.endpoint == "completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        return {
            "model": self.model,
            **text,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **SERVER_FIELDS[self.server],
            **self.fields,
        }


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: the default of 100 would queue in the client what the server should see."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        read_bufsize=_READ_BUFFER,
    )


async def send(
    session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int, due: float | None = None
) -> RequestRecord:
    """Send one request and follow its stream to the end. Errors end up in the record; nothing is raised but cancellation."""
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    body = target.body(prompt, max_tokens)
    record = RequestRecord(time.perf_counter(), due=due, asked_tokens=max_tokens)
    try:
        limit = aiohttp.ClientTimeout(total=target.timeout_s, sock_connect=30)
        async with session.post(target.address, json=body, headers=headers, timeout=limit) as response:
            record.status = response.status
            if response.status != 200:
                record.error = f"status {response.status}: {(await response.text())[:200]}"
            else:
                await _follow(response, record)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError, BadEvent) as problem:
        record.error = f"{type(problem).__name__}: {problem}"[:300]
    record.end = record.end if record.end == record.end else time.perf_counter()
    _settle(record, target, prompt)
    return record


async def _follow(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    parser, number, pieces = SseParser(), 0, []
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        for event in parser.feed(chunk):
            number += 1
            if event.data.strip() == DONE:
                record.end = now
                continue
            text = _take(event, number, record)
            if text:
                record.chunk_times.append(now)
                pieces.append(text)
    record.end = time.perf_counter()
    record.text = "".join(pieces)


def _take(event: Event, number: int, record: RequestRecord) -> str:
    """The text in one event; usage, finish reason and errors go into the record."""
    data = event_json(event, number)
    if event.type == "error" or data.get("error"):
        problem = data.get("error") or data
        message = problem.get("message", problem) if isinstance(problem, dict) else problem
        raise BadEvent(f"the server reported an error in event {number}: {message}")
    usage = data.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        record.input_tokens, record.output_tokens = usage.get("prompt_tokens"), usage["completion_tokens"]
        record.token_source = "usage"
    text = ""
    for choice in data.get("choices") or []:
        reason = choice.get("finish_reason")
        if reason and record.finish_reason == "unknown":
            record.finish_reason = str(reason)
        part = choice.get("text") if "text" in choice else (choice.get("delta") or {}).get("content")
        text += part or ""
    return text


def _settle(record: RequestRecord, target: Target, prompt: str) -> None:
    """Count what the server did not count, and refuse what cannot be counted rightly."""
    if record.error:
        return
    if not record.chunk_times and record.output_tokens is None:
        record.error = "the answer holds no text and no usage"
        return
    if prompt and record.text.startswith(prompt):
        # Its tokens would count as output, and the first of them as the first token (P109).
        record.error = "the answer begins with the prompt: switch the server's echo off"
        return
    if record.output_tokens is None and target.count is not None:
        record.output_tokens = target.count(record.text)
        record.input_tokens = target.count(prompt)
        record.token_source = "tokenizer"
