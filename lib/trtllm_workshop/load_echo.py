"""What the measuring client itself costs: the same requests to a server in this process that answers at once."""

from __future__ import annotations

import json
import statistics

from aiohttp import web

from trtllm_workshop.load_client import ENDPOINTS, Target, open_session, send
from trtllm_workshop.ports import LOOPBACK, free_port


async def client_overhead_ms(target: Target, prompt: str, tokens: int, requests: int = 12) -> float:
    """Median milliseconds of one request with `tokens` streamed tokens when the server needs no time.

    An upper limit: the answering side, in the same process, is part of it. The first two requests open connections and are
    left out.
    """
    app = web.Application()
    field = "text" if target.endpoint == "completions" else "delta"

    async def answer(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        piece = " word" if field == "text" else {"content": " word"}
        event = f"data: {json.dumps({'choices': [{'index': 0, field: piece}]})}\n\n".encode()
        for _ in range(tokens):
            await response.write(event)
        usage = {"prompt_tokens": 1, "completion_tokens": tokens}
        await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
        return response

    app.router.add_post(ENDPOINTS[target.endpoint], answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, LOOPBACK, port).start()
    here = Target(f"http://{LOOPBACK}:{port}", target.endpoint, target.model, target.server, target.fields)
    try:
        async with open_session() as session:
            seconds = []
            for number in range(requests + 2):
                record = await send(session, here, prompt, tokens)
                if number >= 2:
                    seconds.append(record.end - record.sent)
    finally:
        await runner.cleanup()
    return statistics.median(seconds) * 1e3
