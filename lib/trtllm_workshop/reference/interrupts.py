"""Ctrl-C at a moment when everything adds up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C take effect when the block has ended, so that it never leaves books half-written.

    Python raises KeyboardInterrupt between any two lines of the main thread; in other threads, and where SIGINT is ignored,
    there is nothing to hold. A second Ctrl-C takes effect at once: whoever presses twice means it.
    """
    before = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
    if not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))
        if len(came) > 1:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(came) == 1:
            before(*came[0])
