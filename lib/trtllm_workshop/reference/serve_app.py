"""The routes of the server: OpenAI's completions and chat, health, models, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from trtllm_workshop.prompts import fresh_seeds
from trtllm_workshop.reference.serve_answer import Answer, Choice, sse
from trtllm_workshop.reference.serve_body import ApiError, parse_body
from trtllm_workshop.reference.serve_engine import EngineGone, EngineRefused, Stream
from trtllm_workshop.reference.serve_link import Message
from trtllm_workshop.reference.serve_metrics import ServeMetrics
from trtllm_workshop.reference.serve_protocol import ChatRequest, CompletionRequest, Sampling
from trtllm_workshop.reference.serve_state import ServerState
from trtllm_workshop.reference.version import VERSION

_SSE = "text/event-stream"
_SEEDS = 2**64
_DESCRIPTION = "OpenAI-compatible server of the reference toolchain of the TensorRT-LLM workshop"


class ClientGone(Exception):
    """Nobody reads the answer any more."""


def create_app(state: ServerState, model: str) -> FastAPI:
    """The application. `model`: the name that requests use."""
    app = FastAPI(
        title="trtllm-serve (reference)", version=VERSION, description=_DESCRIPTION, docs_url=None, redoc_url=None
    )
    metrics = ServeMetrics(model)
    created = int(time.time())
    app.state.metrics = metrics

    @app.exception_handler(ApiError)
    async def api_error(request: Request, problem: ApiError) -> JSONResponse:
        metrics.request(_route(request), problem.status)
        return error_response(problem)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, problem: HTTPException) -> JSONResponse:
        text = {404: f"there is no route {request.url.path}", 405: f"{request.method} is not a method of this route"}
        metrics.request(_route(request), problem.status_code)
        shown = text.get(problem.status_code, str(problem.detail))
        return error_response(ApiError(problem.status_code, shown[:300]), problem.headers)

    @app.get("/health", summary="200 while requests are taken, 503 otherwise", responses=_errors(503))
    async def health() -> Response:
        if state.healthy:
            return Response(status_code=200)
        return error_response(ApiError(503, state.engine.gone or "the server is ending", code="unhealthy"))

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": VERSION}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        entry = {"id": model, "object": "model", "created": created, "owned_by": "tensorrt_llm"}
        return {"object": "list", "data": [entry]}

    @app.get("/metrics", summary="statistics of the iterations since the last call", responses=_errors(503))
    async def statistics() -> Response:
        try:
            return JSONResponse(await state.engine.ask("stats"))
        except EngineGone as problem:
            raise ApiError(503, str(problem), code="engine_gone") from None

    @app.get("/prometheus/metrics", summary="Prometheus exposition format")
    async def prometheus() -> Response:
        gauges = None
        with contextlib.suppress(EngineGone):
            gauges = await state.engine.ask("gauges")
        return Response(metrics.text(gauges, state.healthy), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.post("/v1/completions", openapi_extra=_body_schema(CompletionRequest), responses=_errors(*_POST))
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=_body_schema(ChatRequest), responses=_errors(*_POST))
    async def chat(request: Request) -> Response:
        return await generate(request, ChatRequest)

    async def generate(request: Request, kind: type[CompletionRequest] | type[ChatRequest]) -> Response:
        data = await read_body(request, state.limits.body_bytes)
        body = parse_body(data, kind)
        if body.model != model:
            raise ApiError(404, f"the model {body.model[:80]!r} is not served here; this is {model!r}", param="model")
        prompts, choices_each = body.prompts(), body.n or 1
        state.check(len(prompts) * choices_each)
        run = _Run(state, metrics, body, Answer(body, model), prompts)
        leave = contextlib.AsyncExitStack()
        await leave.enter_async_context(state.one())
        handed_over = False
        try:
            await run.start()
            metrics.request(_route(request), 200)
            if body.stream:
                handed_over = True
                return _Streaming(run.events(), leave, media_type=_SSE, headers={"Cache-Control": "no-cache"})
            return JSONResponse(await until_gone(request, run.whole()))
        except EngineRefused as problem:
            raise ApiError(400, str(problem)[:600], param="messages" if run.answer.chat else "prompt") from None
        except EngineGone as problem:
            raise ApiError(503, f"{problem}; restart the server", code="engine_gone") from None
        except ClientGone:
            return Response(status_code=499)  # nobody reads it; the number is nginx's for this case
        finally:
            if not handed_over:
                run.cancel()
                await leave.aclose()

    return app


class _Run:
    """All choices of one request."""

    def __init__(
        self, state: ServerState, metrics: ServeMetrics, body: Sampling, answer: Answer, prompts: list[Message]
    ) -> None:
        self.state, self.metrics, self.body, self.answer, self.prompts = state, metrics, body, answer, prompts
        self.streams: list[Stream] = []
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        self._begun = time.monotonic()
        self._first: dict[int, float] = {}

    async def start(self) -> None:
        """Send every choice to the engine and wait until all are accepted."""
        each = self.body.n or 1
        for prompt in self.prompts:
            # TensorRT-LLM's own default seed is the same for every request, and all choices would be equal.
            first = fresh_seeds(1)[0] if self.body.seed is None else self.body.seed
            for place in range(each):
                params = {**self.body.params(), "seed": (first + place) % _SEEDS}
                self.streams.append(self.state.engine.submit(prompt, params))
                self.choices.append(Choice(len(self.choices)))
        counts = [await stream.accepted() for stream in self.streams]
        self.prompt_tokens = sum(counts[::each])

    def cancel(self) -> None:
        """Abort what has not ended."""
        running = [stream for stream in self.streams if not stream.ended]
        for stream in running:
            stream.cancel()
            self.metrics.cancelled()

    def take(self, place: int, news: Message) -> Choice:
        """Add one step's news to its choice, and to the metrics."""
        choice, now = self.choices[place], time.monotonic() - self._begun
        if news.get("error"):
            raise EngineGone(f"the engine could not go on: {news['error']}")
        choice.take(news)
        self._first.setdefault(place, now)
        if choice.finish_reason:
            read = self.streams[place].prompt_tokens
            self.metrics.answer(choice.finish_reason, read, choice.tokens, self._first[place], now)
        return choice

    async def whole(self) -> Message:
        """Wait for all choices; the answer."""
        for place, stream in enumerate(self.streams):
            async for news in stream:
                self.take(place, news)
        return self.answer.whole(self.choices, self.prompt_tokens)

    async def events(self) -> AsyncIterator[bytes]:
        """The stream. An engine that ends in the middle of it gives an error event, since the status is sent already."""
        try:
            for event in self.answer.first_events(len(self.choices)):
                yield event
            async for place, news in merged(self.streams):
                choice = self.take(place, news)
                counts = (self.prompt_tokens, sum(c.tokens for c in self.choices))
                yield self.answer.event(choice, news, counts)
            yield self.answer.last_events(self.prompt_tokens, sum(choice.tokens for choice in self.choices))
        except EngineGone as problem:
            yield sse(ApiError(503, str(problem), code="engine_gone").body())
        finally:
            self.cancel()


async def merged(streams: list[Stream]) -> AsyncIterator[tuple[int, Message]]:
    """The news of several streams as they come, each with the place of its stream."""
    if len(streams) == 1:
        async for news in streams[0]:
            yield 0, news
        return
    queue: asyncio.Queue[tuple[int, Message | BaseException | None]] = asyncio.Queue()

    async def follow(place: int, stream: Stream) -> None:
        try:
            async for news in stream:
                queue.put_nowait((place, news))
            queue.put_nowait((place, None))
        except EngineGone as problem:
            queue.put_nowait((place, problem))

    tasks = [asyncio.create_task(follow(place, stream)) for place, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            place, found = await queue.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                left -= 1
            else:
                yield place, found
    finally:
        for task in tasks:
            task.cancel()


class _Streaming(StreamingResponse):
    """Frees what belongs to the request when the stream has ended, however it ended, even before its first byte."""

    def __init__(self, events: AsyncIterator[bytes], leave: contextlib.AsyncExitStack, **kwargs: Any) -> None:
        super().__init__(events, **kwargs)
        self._events, self._leave = events, leave

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            with contextlib.suppress(Exception):
                await self._events.aclose()  # type: ignore[attr-defined]
            await self._leave.aclose()


async def until_gone(request: Request, work: Awaitable[Message]) -> Message:
    """The result of `work`, unless the client goes first.

    Raises:
        ClientGone: then; `work` was cancelled.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for other in (task, watch):
            other.cancel()


async def _disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(request: Request, limit: int) -> bytes:
    """The body of at most `limit` bytes.

    Raises:
        ApiError: 413 for a longer one, as soon as that is known.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and len(announced) < 19 and int(announced) > limit:
        raise ApiError(413, f"the body has {int(announced):,} bytes, at most {limit:,} are taken", code="too_large")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise ApiError(413, f"the body has more than {limit:,} bytes", code="too_large")
        parts.append(part)
    return b"".join(parts)


def error_response(problem: ApiError, headers: Any = None) -> JSONResponse:
    """OpenAI's error object with its status; who is to come back later is told when."""
    more = {"Retry-After": "1"} if problem.status in (429, 503) else {}
    return JSONResponse(problem.body(), problem.status, {**(headers or {}), **more})


_POST = (400, 404, 413, 429, 503)


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    names = {400: "bad request", 404: "unknown model", 413: "too large", 429: "queue full", 503: "not serving"}
    error = {"type": "object", "properties": {"error": {"type": "object"}}, "required": ["error"]}
    content = {"application/json": {"schema": error}}
    return {status: {"description": names[status], "content": content} for status in statuses}


def _body_schema(kind: type[Sampling]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: FastAPI collects only those of parameters that it parses itself."""
    parts = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(parts[value["$ref"].rsplit("/", 1)[1]])
            return {key: resolve(inner) for key, inner in value.items()}
        return [resolve(inner) for inner in value] if isinstance(value, list) else value

    found: dict[str, Any] = resolve(schema)
    return found


def _route(request: Request) -> str:
    """The route for the metrics; what is none counts as one, so that nobody can make new names without end."""
    path = request.url.path
    return path if path in {"/v1/completions", "/v1/chat/completions", "/health", "/metrics"} else "other"
