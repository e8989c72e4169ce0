"""News from the thread that runs the engine to whoever waits for it: a thread, or a task of an event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Generic, TypeVar

News = TypeVar("News")


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class UpdateQueue(Generic[News]):
    """First in, first out; `put` never waits."""

    def __init__(self) -> None:
        self._items: deque[News] = deque()
        self._changed = threading.Condition(threading.Lock())
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def put(self, item: News) -> None:
        """Add an item and wake everybody who waits."""
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # that event loop was closed: nobody waits there any more
                continue

    def get(self, timeout: float | None = None) -> News:
        """The next item.

        Raises:
            TimeoutError: when none came within `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._items:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"nothing new within {timeout} s; wait longer, or abort() the request")
                self._changed.wait(left)
            return self._items.popleft()

    async def aget(self) -> News:
        """The next item, without keeping the event loop from other tasks."""
        while True:
            with self._changed:
                if self._items:
                    return self._items.popleft()
                loop = asyncio.get_running_loop()
                future: asyncio.Future[None] = loop.create_future()
                self._waiting.append((loop, future))
            await future
