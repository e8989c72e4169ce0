"""Process groups of this library's children: end them whole, and measure the memory of their tree."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time


def group_alive(pid: int) -> bool:
    """Whether a process of the group that `pid` leads still runs (ended but uncollected ones do not count)."""
    try:
        os.killpg(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        import psutil
    except ImportError:
        return True
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def end_group(process: subprocess.Popen[bytes], first: int | None = signal.SIGTERM, grace_s: float = 5.0) -> None:
    """End the group of `process` (started with start_new_session) and collect it; descendants that left the group too.

    `first` is sent to the group, which then has `grace_s` seconds before SIGKILL; None kills at once.
    """
    family = _descendants(process.pid)
    if first is not None and process.poll() is None:
        _signal_group(process.pid, first)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    _signal_group(process.pid, signal.SIGKILL)
    for other in family:  # a launcher may give its workers groups of their own
        with contextlib.suppress(Exception):  # psutil's errors: it is gone, or another process has its number now
            other.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    end = time.monotonic() + 5  # a kill takes effect a moment later, longer for a process with much memory
    while group_alive(process.pid) and time.monotonic() < end:
        time.sleep(0.02)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _descendants(pid: int) -> list:  # type: ignore[type-arg]  # of psutil.Process, which is imported late
    try:
        import psutil
    except ImportError:
        return []
    with contextlib.suppress(psutil.Error):
        return list(psutil.Process(pid).children(recursive=True))
    return []


class MemoryPeak:
    """Samples the memory of a process and all its descendants while the `with` block runs.

    `peak_mb` is in MB (10^6 bytes), None when it could not be measured. Linux gives the proportional share of each page
    (PSS), so that memory shared by parent and child counts once; elsewhere resident memory is summed. A peak shorter
    than the sampling interval (at least 0.05 s) can be missed.
    """

    def __init__(self, pid: int):
        self._pid = pid
        self._stop = threading.Event()
        self._peak = 0
        self._thread = threading.Thread(target=self._watch, name="memory-peak", daemon=True)

    def __enter__(self) -> MemoryPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    @property
    def peak_mb(self) -> float | None:
        return self._peak / 1e6 if self._peak else None

    def _watch(self) -> None:
        try:
            import psutil
        except ImportError:
            return
        pause = 0.05
        while True:
            started = time.monotonic()
            self._peak = max(self._peak, _tree_bytes(psutil, self._pid))
            # Walking the page tables of a big process takes time: never spend more than a tenth of a core on it.
            pause = max(min(pause * 1.2, 0.5), 10 * (time.monotonic() - started))
            if self._stop.wait(pause):
                return


def tree_mb(pid: int) -> float | None:
    """Memory of a process and all its descendants now, in MB (10^6 bytes); None when it could not be measured."""
    try:
        import psutil
    except ImportError:
        return None
    total = _tree_bytes(psutil, pid)
    return total / 1e6 if total else None


def _tree_bytes(psutil, pid: int) -> int:  # type: ignore[no-untyped-def]
    total = 0
    with contextlib.suppress(psutil.Error):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error, OSError):
                total += _bytes(psutil, process)
    return total


def _bytes(psutil, process) -> int:  # type: ignore[no-untyped-def]
    with contextlib.suppress(psutil.AccessDenied):
        pss = getattr(process.memory_full_info(), "pss", 0)
        if pss:
            return int(pss)
    return int(process.memory_info().rss)
