"""A server of OpenAI's API whose truth is known: when each piece of text goes out, and how many tokens it holds."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from trtllm_workshop.ports import LOOPBACK, free_port


@dataclass
class Script:
    """How the server answers.

    Attributes:
        ttft_s: until the first piece of text. gap_s: between pieces.
        pieces, tokens_each: how many pieces, and tokens that each holds.
        text: of each piece.
        before, after: events (objects, or raw bytes) in front of the text and behind it.
        role_first_s: seconds until a chat's role event; None: none.
        usage: whether the usage is sent. status: of HTTP.
        reason: finish reason, in its own event (`own`), with the last text (`last`), `twice` or `missing`.
    """

    ttft_s: float = 0.0
    gap_s: float = 0.0
    pieces: int | None = None
    tokens_each: int = 1
    text: str = " word"
    echo: bool = False
    before: list[Any] = field(default_factory=list)
    after: list[Any] = field(default_factory=list)
    role_first_s: float | None = None
    usage: bool = True
    status: int = 200
    reason: str = "own"
    seen: list[dict[str, Any]] = field(default_factory=list)
    most_in_flight: int = 0
    in_flight: int = 0


def event(value: Any) -> bytes:
    return value if isinstance(value, bytes) else f"data: {json.dumps(value)}\n\n".encode()


def chunk(chat: bool, text: str | None = None, reason: str | None = None, role: str | None = None) -> dict[str, Any]:
    part: dict[str, Any] = {"delta": {k: v for k, v in (("role", role), ("content", text)) if v is not None}}
    return {"choices": [{"index": 0, **(part if chat else {"text": text or ""}), "finish_reason": reason}]}


async def _answer(request: web.Request, script: Script) -> web.StreamResponse:
    loop = asyncio.get_running_loop()
    begun = loop.time()
    body = await request.json()
    script.seen.append(body)
    if script.status != 200:
        return web.json_response({"error": {"message": "no"}}, status=script.status)
    chat = "messages" in body
    script.in_flight += 1
    script.most_in_flight = max(script.most_in_flight, script.in_flight)
    try:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for item in script.before:
            await response.write(event(item))
        if script.role_first_s is not None:
            await asyncio.sleep(script.role_first_s)
            await response.write(event(chunk(chat, "", role="assistant")))
        pieces = script.pieces if script.pieces is not None else body["max_tokens"] // script.tokens_each
        for place in range(pieces):
            # From the beginning of the request on, so that sleeping a little too long does not add up.
            due = begun + script.ttft_s + place * script.gap_s
            await asyncio.sleep(max(0.0, due - loop.time()))
            text = body.get("prompt", "") if script.echo and place == 0 else script.text
            last = place == pieces - 1 and script.reason in ("last", "twice")
            await response.write(event(chunk(chat, text, "length" if last else None)))
        if script.reason in ("own", "twice"):
            await response.write(event(chunk(chat, None, "length")))
        if script.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": pieces * script.tokens_each}
            await response.write(event({"choices": [], "usage": usage}))
        for item in script.after:
            await response.write(event(item))
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        script.in_flight -= 1


@contextmanager
def fake_server(script: Script) -> Iterator[str]:
    """Runs in a thread of its own; gives the URL."""
    loop, port, ready = asyncio.new_event_loop(), free_port(), threading.Event()

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def start() -> web.AppRunner:
        app = web.Application()

        async def answer(request: web.Request) -> web.StreamResponse:
            return await _answer(request, script)

        app.router.add_post("/v1/completions", answer)
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_get("/v1/models", models)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, LOOPBACK, port, backlog=1024).start()
        return runner

    def run() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield f"http://{LOOPBACK}:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
