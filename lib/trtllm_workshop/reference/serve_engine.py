"""The HTTP process's side of the engine process: start it, send requests, hand news to who waits for them, notice its end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

from trtllm_workshop.reference.serve_link import HEAD, Message, length_of, pack

_WORKER = "import sys; from trtllm_workshop.reference.serve_worker import main; sys.exit(main(int(sys.argv[1])))"
_STOP_S = 10.0


class EngineGone(RuntimeError):
    """The engine process has ended; no request can be answered any more."""


class EngineRefused(ValueError):
    """The engine process did not take the request; the message says what is wrong with it."""


class EngineNotStarted(RuntimeError):
    """The engine could not be loaded; the message is its own."""


class Stream:
    """The news of one request, in order. Iterate over it; `cancel` frees what it holds in the engine."""

    def __init__(self, process: EngineProcess, number: int) -> None:
        self._process, self.number = process, number
        self._news: asyncio.Queue[Message] = asyncio.Queue()
        self.prompt_tokens = 0
        self.ended = False

    def put(self, message: Message) -> None:
        self._news.put_nowait(message)

    async def accepted(self) -> int:
        """Wait for the engine's answer to the request; the number of tokens of its prompt.

        Raises:
            EngineRefused: when something is wrong with it.
            EngineGone: when the engine process ends first.
        """
        message = await self._next()
        if message["op"] == "refused":
            self.close()
            raise EngineRefused(message["message"])
        self.prompt_tokens = int(message["prompt_tokens"])
        return self.prompt_tokens

    async def __aiter__(self) -> AsyncIterator[Message]:
        while not self.ended:
            message = await self._next()
            if message.get("finish_reason") or message.get("error"):
                self.close()
            yield message

    async def _next(self) -> Message:
        message = await self._news.get()
        if message["op"] == "gone":
            self.close()
            raise EngineGone(message["message"])
        return message

    def close(self) -> None:
        """Nothing more is expected."""
        self.ended = True
        self._process.forget(self.number)

    def cancel(self) -> None:
        """Nobody waits for this any more: abort it, unless it has ended."""
        if not self.ended:
            self.close()
            self._process.send({"op": "abort", "id": self.number})


class EngineProcess:
    """One engine process. Attributes: `info` (what `serve_worker.describe` says), `gone` (why it ended; empty while it runs)."""

    def __init__(self) -> None:
        self.info: Message = {}
        self.gone = ""
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._ready: asyncio.Future[Message] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self, options: Message) -> Message:
        """Start the process and wait until the engine is loaded.

        Raises:
            EngineNotStarted: with the reason.
        """
        mine, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WORKER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        finally:
            theirs.close()
        reader, self._writer = await asyncio.open_connection(sock=mine)
        self._ready = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(reader))
        self.send({"op": "start", "options": options})
        self.info = await self._ready
        return self.info

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def active(self) -> int:
        """Requests that are not answered to the end."""
        return len(self._streams)

    def send(self, message: Message) -> None:
        if self._writer is not None and not self.gone:
            self._writer.write(pack([message]))

    def submit(self, what: Message, params: Message) -> Stream:
        """Send one request: `what` has prompt, prompt_token_ids or messages.

        Raises:
            EngineGone: when there is no engine to send it to.
        """
        if self.gone:
            raise EngineGone(self.gone)
        stream = Stream(self, next(self._numbers))
        self._streams[stream.number] = stream
        self.send({"op": "submit", "id": stream.number, **what, "params": params})
        return stream

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    async def ask(self, what: str, timeout_s: float = 5.0) -> Any:
        """`stats` or `gauges` from the engine.

        Raises:
            EngineGone: when the engine has ended, or does not answer in time.
        """
        if self.gone:
            raise EngineGone(self.gone)
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self.send({"op": "ask", "id": number, "what": what})
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except asyncio.TimeoutError:
            raise EngineGone(f"the engine process did not answer within {timeout_s:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError, ValueError):
            while True:
                size = length_of(await reader.readexactly(HEAD.size))
                for message in json.loads(await reader.readexactly(size)):
                    self._take(message)
        await self._note_end()

    def _take(self, message: Message) -> None:
        operation = message["op"]
        if operation in ("ready", "failed") and self._ready is not None and not self._ready.done():
            if operation == "ready":
                self._ready.set_result({key: value for key, value in message.items() if key != "op"})
            else:
                self._ready.set_exception(EngineNotStarted(message["message"]))
        elif operation == "answer":
            waiting = self._answers.get(message["id"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message["value"])
        elif (stream := self._streams.get(message.get("id", 0))) is not None:
            stream.put(message)

    async def _note_end(self) -> None:
        process = self._process
        assert process is not None
        for _ in range(100):  # the link ends a moment before the process does
            if process.poll() is not None:
                break
            await asyncio.sleep(0.02)
        self.gone = f"the engine process has ended ({_how(process.poll())})"
        if not self._stopping:
            print(f"[TRT-LLM] [E] {self.gone}; restart the server", file=sys.stderr, flush=True)
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineNotStarted(self.gone))
        for stream in list(self._streams.values()):
            stream.put({"op": "gone", "message": self.gone})
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineGone(self.gone))

    def cut_off(self, message: str) -> None:
        """Abort every request; who waits for one is told the message."""
        for stream in list(self._streams.values()):
            self.send({"op": "abort", "id": stream.number})
            stream.put({"op": "gone", "message": message})

    async def stop(self) -> None:
        """End the engine process; kill it when it takes longer than ten seconds. Safe to call twice."""
        process, self._stopping = self._process, True
        if process is None:
            return
        self.send({"op": "stop"})
        for _ in range(int(_STOP_S / 0.05)):
            if process.poll() is not None:
                break
            await asyncio.sleep(0.05)
        else:
            process.kill()
        if self._writer is not None:
            self._writer.close()
        if self._reading is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._reading, 3)
        process.wait(5)


def _how(code: int | None) -> str:
    if code is None:
        return "its link is closed"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
