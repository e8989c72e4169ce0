"""Whether the server takes requests, and how many at most."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from trtllm_workshop.reference.serve_body import ApiError
from trtllm_workshop.reference.serve_engine import EngineProcess


@dataclass(frozen=True)
class Limits:
    """What one server takes.

    Attributes:
        body_bytes: of a request body.
        queue: requests beyond those that the engine runs at once; more get status 429.
        grace_s: seconds that accepted requests have after the server was asked to end.
    """

    body_bytes: int = 8 * 2**20
    queue: int = 256
    grace_s: float = 30.0


class ServerState:
    """Counts accepted requests; says no when there are too many, when the server is ending, or without an engine."""

    def __init__(self, engine: EngineProcess, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self.draining = False
        self.accepted = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def healthy(self) -> bool:
        return not self.draining and not self.engine.gone

    @property
    def most(self) -> int:
        """Choices that may be under way or waiting at once."""
        return int(self.engine.info.get("max_batch_size", 1)) + self.limits.queue

    def check(self, choices: int) -> None:
        """Raise ApiError when this many further answers cannot be taken now: 503 or 429."""
        if self.draining:
            raise ApiError(503, "the server is ending and takes no new requests", code="server_ending")
        if self.engine.gone:
            raise ApiError(503, f"{self.engine.gone}; restart the server", code="engine_gone")
        if self.engine.active + choices > self.most:
            raise ApiError(
                429,
                f"{self.engine.active} answers are under way or waiting and this request wants {choices}: the limit is "
                f"{self.most}. Try again in a moment, or raise TRTLLM_SERVE_MAX_QUEUE",
                code="queue_full",
            )

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """An accepted request, from here to the last byte of its answer."""
        self.accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.accepted -= 1
            if not self.accepted:
                self._idle.set()

    async def drain(self) -> bool:
        """Take nothing new and wait for what was accepted; False when `grace_s` was not enough."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), self.limits.grace_s)
        except asyncio.TimeoutError:
            return False
        return True
