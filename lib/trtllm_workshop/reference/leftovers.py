"""Whose leftovers may be removed: only those of processes that have ended."""

from __future__ import annotations

import os


def alive(pid: int) -> bool:
    """Whether another process of this host with this number runs; this process itself does not count."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
