"""The life of the server: engine first, then the port, and an end that finishes what was accepted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import uvicorn

from trtllm_workshop.ports import port_problem
from trtllm_workshop.reference.serve_app import create_app
from trtllm_workshop.reference.serve_engine import EngineNotStarted, EngineProcess
from trtllm_workshop.reference.serve_state import Limits, ServerState


def run(host: str, port: int, options: dict[str, Any], model: str, limits: Limits) -> int:
    """Serve until asked to end; returns the exit status: 0, or 1 when the engine was lost."""
    # Asked before minutes go into loading an engine; the port itself is taken when the engine is there.
    problem = port_problem(port, "127.0.0.1" if host == "localhost" else host)
    if problem and "in use" in problem:
        raise ValueError(f"{problem}; end it, or choose another --port")
    return asyncio.run(_run(host, port, options, model, limits))


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: ending begins with finishing, and the port stays open meanwhile."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(host: str, port: int, options: dict[str, Any], model: str, limits: Limits) -> int:
    engine = EngineProcess()
    asked = asyncio.Event()
    asked_again = asyncio.Event()

    def on_signal() -> None:
        (asked_again if asked.is_set() else asked).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    starting, waiting = asyncio.ensure_future(engine.start(options)), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 130
        info = starting.result()
        state = ServerState(engine, limits)
        listener = _listen(host, port)
        config = uvicorn.Config(
            create_app(state, model), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=3
        )
        server = _Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        print(
            f"[TRT-LLM] [I] engine process {info['pid']}: max_batch_size {info['max_batch_size']}, max_seq_len "
            f"{info['max_seq_len']}\n[TRT-LLM] [I] serving {model} at http://{host}:{port} (process {os.getpid()})",
            flush=True,
        )
        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(state, asked_again)
        server.should_exit = True
        await serving
        return 1 if engine.gone else 0
    except EngineNotStarted as problem:
        print(f"[TRT-LLM] [E] {problem}", file=sys.stderr)
        return 1
    finally:
        waiting.cancel()
        await engine.stop()


async def _drain(state: ServerState, asked_again: asyncio.Event) -> None:
    """Finish what was accepted, up to the limit or a second signal."""
    if state.accepted:
        print(
            f"[TRT-LLM] [I] ending: {state.accepted} accepted requests have {state.limits.grace_s:g} s to finish; a second "
            "signal aborts them",
            flush=True,
        )
    drained, hurried = asyncio.ensure_future(state.drain()), asyncio.ensure_future(asked_again.wait())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    if state.accepted:
        print(f"[TRT-LLM] [W] {state.accepted} requests are cut off", flush=True)
        state.engine.cut_off("the server has ended before this answer was complete")
    drained.cancel()
    hurried.cancel()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        OSError: when the address cannot be used, with the address in the message.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_UNSPEC, socket.SOCK_STREAM)[0]
        # localhost is 127.0.0.1 before it is ::1: that is what clients try.
        if host == "localhost":
            family, address = socket.AF_INET, ("127.0.0.1", port)
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as problem:
        raise OSError(f"cannot listen at {host}:{port}: {problem.strerror or problem}") from None
    listener.listen(2048)
    listener.setblocking(False)
    return listener
