"""Fewer threads for this process while ranks share its processor, and as many as before when the last engine ends.

The number of threads belongs to the whole process, so what is kept of it does too: engines that live side by side, and end
in any order, must not restore each other's numbers.
"""

from __future__ import annotations

import threading
from typing import ClassVar

import torch


class FewerThreads:
    """Holds torch's number of threads at `count` until `end`.

    With more ranks than cores, threads that wait for each other take the time of those that compute.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _held: ClassVar[list[FewerThreads]] = []
    _before: ClassVar[int] = 0

    def __init__(self, count: int) -> None:
        kind = type(self)
        with kind._lock:
            if not kind._held:
                kind._before = torch.get_num_threads()
            kind._held.append(self)
            torch.set_num_threads(count)

    def end(self) -> None:
        """Give the threads back, if nobody else holds them. Safe to call twice."""
        kind = type(self)
        with kind._lock:
            if self in kind._held:
                kind._held.remove(self)
                if not kind._held:
                    torch.set_num_threads(kind._before)
