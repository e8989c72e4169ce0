"""Starts the process that executes one notebook, follows its events and its memory, and ends everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_workshop.lesson import HEADLESS_VARIABLE
from trtllm_workshop.processes import MemoryPeak
from trtllm_workshop.run_child import KERNEL

MARK = "TRTLLM_WORKSHOP_RUN"  # every process of one notebook carries it, also those that left its process tree
POLL_SECONDS = 0.5


@dataclass
class Outcome:
    """What the process of one notebook did. ``cell`` is the last code cell that started, as its event."""

    status: str = "running"
    error: dict[str, str] | None = None
    cells: int = 0
    cell: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_mb: float = 0.0
    left_behind: list[str] = field(default_factory=list)


def write_kernel(folder: Path) -> Path:
    """A kernel specification of the running interpreter below ``folder``, to be put on JUPYTER_PATH.

    The user's own kernels are not used: a kernel named python3 may be another Python without this package.
    """
    place = folder / "kernels" / KERNEL
    place.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": arguments, "display_name": "Python 3 (workshop)", "language": "python"}
    (place / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def environment(kernel_path: Path, mark: str) -> dict[str, str]:
    """The environment of a notebook's process: our kernel first, no personal IPython start-up files, and the mark."""
    paths = [str(kernel_path), os.environ.get("JUPYTER_PATH", "")]
    return {
        **os.environ,
        "JUPYTER_PATH": os.pathsep.join(path for path in paths if path),
        "IPYTHONDIR": str(kernel_path / "ipython"),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        HEADLESS_VARIABLE: "1",
        MARK: mark,
    }


def run_notebook(
    job: dict[str, Any],
    kernel_path: Path,
    log: Path,
    timeout: float | None,
    progress: Callable[[Outcome], None],
) -> Outcome:
    """Executes ``job`` (notebook, output, parameters, cwd) and returns its outcome; ``progress`` is called as it goes.

    Status is ``done``, ``failed``, ``kernel died`` or ``timed out``. Whatever happens, also when interrupted from the
    keyboard, no process of the notebook is alive afterwards.
    """
    mark, outcome = uuid.uuid4().hex, Outcome()
    started = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    with log.open("wb") as stream, os.fdopen(reading, "rb") as events:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", "trtllm_workshop.run_child"],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                env=environment(kernel_path, mark),
                start_new_session=True,
            )
        finally:
            os.close(writing)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(json.dumps({**job, "events_fd": writing}).encode())
            _follow(process, events, outcome, started, timeout, progress)
        finally:
            outcome.seconds = time.monotonic() - started
            left = end_processes(process, mark, patience=0 if outcome.status in ("running", "timed out") else 10)
            outcome.left_behind = left if outcome.status == "done" else []
    return outcome


def _follow(
    process: subprocess.Popen[bytes],
    events: Any,
    outcome: Outcome,
    started: float,
    timeout: float | None,
    progress: Callable[[Outcome], None],
) -> None:
    pending, ended = b"", False
    os.set_blocking(events.fileno(), False)
    with selectors.DefaultSelector() as selector, MemoryPeak(process.pid) as memory:
        selector.register(events, selectors.EVENT_READ)
        while True:
            ready = selector.select(POLL_SECONDS)
            outcome.peak_memory_mb = memory.peak_mb or 0.0
            if ready:
                chunk = events.read() or b""
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    ended |= _note(json.loads(line), outcome)
                if ended or not chunk:  # finished, or the writer is gone
                    break
            outcome.seconds = time.monotonic() - started
            progress(outcome)
            if timeout is not None and outcome.seconds > timeout and not ended:
                outcome.status = "timed out"
                outcome.error = {"name": "Timeout", "message": f"the notebook ran longer than {timeout:g} s"}
                return
    if not ended:
        code, outcome.status = process.wait(), "failed"
        outcome.error = {
            "name": "RunnerDied",
            "message": f"the process that executes the notebook ended with code {code}",
        }


def _note(event: dict[str, Any], outcome: Outcome) -> bool:
    """Takes one event into the outcome; True for the last one."""
    if event["event"] == "start":
        outcome.cells = event["cells"]
    elif event["event"] == "cell":
        outcome.cell = event
    else:
        outcome.status, outcome.error = event["status"], event["error"]
        return True
    return False


def end_processes(process: subprocess.Popen[bytes], mark: str, patience: float) -> list[str]:
    """Ends ``process`` and everything that carries ``mark``; returns the names of what had to be ended besides it.

    ``process`` gets ``patience`` seconds to end by itself.

    The kernel and the servers that a cell starts have sessions of their own, and their parents may be gone, so neither
    the process group nor the process tree is enough to find them.
    """
    import psutil

    own = process.pid
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=patience)
    found = _marked(mark)
    names = [_name(item) for item in found if item.pid != own]
    for item in found:
        with contextlib.suppress(psutil.Error):
            item.terminate()
    _, alive = psutil.wait_procs(found, timeout=3)
    for item in [*alive, *_marked(mark)]:
        with contextlib.suppress(psutil.Error):
            item.kill()
    psutil.wait_procs(alive, timeout=3)
    process.wait()
    return [name for name in names if name]


def _marked(mark: str) -> list[Any]:
    import psutil

    found = []
    for item in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if item.environ().get(MARK) == mark and item.status() != psutil.STATUS_ZOMBIE:
                found.append(item)
    return found


def _name(item: Any) -> str:
    import psutil

    with contextlib.suppress(psutil.Error):
        return f"{' '.join(item.cmdline())[:80]} (process {item.pid})"
    return ""
