"""The processes of ranks 1, 2, …: started, watched, and ended with the process of rank 0, whatever happens to it.

Two pipes lead to each process. One is its standard input, which nobody writes to: it ends when rank 0's process ends, even
by SIGKILL, and the process with it. Over the other it says how far it has come; that one ends when the process does, which
is how its end is noticed at once. What it prints goes to a file, whose last lines tell why it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

START_LIMIT_S = 120.0
START_LIMIT_NAME = "TRTLLM_WORKSHOP_RANK_START_S"
END_LIMIT_S = 3.0
LAST_LINES = 8
WORKER = "trtllm_workshop.reference.rank_worker"


class RankError(RuntimeError):
    """A rank of the engine has ended, does not answer, or did not come up; the text says which, how, and what to do."""


def start_limit_s() -> float:
    """How long ranks may take to come up: 120 s, or what TRTLLM_WORKSHOP_RANK_START_S says.

    Raises:
        ValueError: when that is no positive number.
    """
    text = os.environ.get(START_LIMIT_NAME, str(START_LIMIT_S))
    try:
        limit = float(text)
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ValueError(f"{START_LIMIT_NAME}={text!r} is no number of seconds above 0; 120 is usual")
    return limit


class _Follower:
    """One process, and what is known of it."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], log: Path, changed: threading.Condition) -> None:
        self.rank, self.process, self.log, self.changed = rank, process, log, changed
        self.said: list[str] = []
        self.ended = False

    def listen(self, pipe: int, on_end: Callable[[_Follower], None]) -> None:
        """Note what the process says until its end of the pipe is gone."""
        with os.fdopen(pipe, "r", encoding="utf-8", errors="replace") as stream:
            for line in stream:
                with self.changed:
                    self.said.append(line.strip())
                    self.changed.notify_all()
        # The pipe ends a moment before the process can be collected.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_LIMIT_S)
        on_end(self)

    def how_it_ended(self) -> str:
        code = self.process.poll()
        if code is None:
            return "closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
            return f"was ended by signal {-code}"
        return f"ended with exit code {code}"

    def last_lines(self) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
            if lines:
                return "\nIts last lines:\n" + "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
        return "\nIt printed nothing."

    def end(self, at_once: bool) -> None:
        process = self.process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        if not at_once:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_LIMIT_S)
        if process.poll() is None:
            process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)


class _Watch:
    """What the listening threads share: they must not keep `RankProcesses` alive, whose loss ends the processes."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.followers: list[_Follower] = []
        self.closing = False
        self.error: RankError | None = None
        self.on_loss: Callable[[], None] = lambda: None

    def note_end(self, follower: _Follower) -> None:
        with self.changed:
            follower.ended = True
            first = not self.closing and self.error is None
            if first:
                self.error = RankError(
                    f"rank {follower.rank} {follower.how_it_ended()}; an engine of several ranks cannot go on without it. "
                    f"The other ranks were ended too: make a new LLM to start again.{follower.last_lines()}"
                )
            self.changed.notify_all()
        if first:
            # Whoever waits for the lost rank, or for one that waits for it, is released.
            self.end(at_once=True)
            self.on_loss()

    def end(self, at_once: bool = False) -> None:
        with self.changed:
            self.closing = True
        for follower in self.followers:  # all pipes first: the processes end side by side
            if follower.process.stdin is not None:
                with contextlib.suppress(OSError):
                    follower.process.stdin.close()
        for follower in self.followers:
            follower.end(at_once)


class RankProcesses:
    """Starts the processes of the ranks after 0; each runs `rank_worker`.

    Args:
        jobs: for each rank from 1 on, what its process gets as JSON; see `rank_worker.Job`.
        threads: of each process, for computing on a processor.
        worker: the module they run.
    """

    def __init__(self, jobs: list[dict[str, Any]], threads: int | None, worker: str = WORKER) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="trtllm-ranks-")
        self._watch = watch = _Watch()
        # Runs when this object is lost, and at the end of the program.
        self._finalizer = weakref.finalize(self, _end_all, watch, self._folder)
        try:
            for rank, job in enumerate(jobs, 1):
                self._start(rank, job, threads, worker)
        except BaseException:
            self.end()
            raise

    @property
    def meeting(self) -> Path:
        """A file that all ranks can find each other by; see `Communicator`."""
        return Path(self._folder.name) / "meeting"

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks from 1 on."""
        return [follower.process.pid for follower in self._watch.followers]

    def _start(self, rank: int, job: dict[str, Any], threads: int | None, worker: str) -> None:
        watch, log = self._watch, Path(self._folder.name) / f"rank{rank}.log"
        environment = dict(os.environ)
        library = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (library, environment.get("PYTHONPATH"))))
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        reading, writing = os.pipe()
        # The kernel ends the process with the thread that made it, which is only right for one that lasts.
        dies_with = os.getpid() if threading.current_thread() is threading.main_thread() else None
        details = {**job, "rank": rank, "meeting": str(self.meeting), "said_to": writing, "parent": dies_with}
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", worker, json.dumps(details)],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for rank 0, which ends the step and then the others
                )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        follower = _Follower(rank, process, log, watch.changed)
        watch.followers.append(follower)
        threading.Thread(
            target=follower.listen, args=(reading, watch.note_end), name=f"rank{rank}-watch", daemon=True
        ).start()

    def on_loss(self, action: Callable[[], None]) -> None:
        """What to do, in another thread, when a rank ends that should not."""
        self._watch.on_loss = action

    @property
    def error(self) -> RankError | None:
        """What ended the ranks, if something did."""
        return self._watch.error

    def wait_for(self, word: str, until: float, limit_s: float) -> None:
        """Wait until every process has said this word.

        Args:
            until: when to give up, in seconds of time.monotonic.
            limit_s: the whole time that there was, for the message.

        Raises:
            RankError: when one ends, or the time is over.
        """
        watch = self._watch
        with watch.changed:
            watch.changed.wait_for(
                lambda: watch.error or all(word in f.said for f in watch.followers), max(until - time.monotonic(), 0)
            )
            late = [f for f in watch.followers if word not in f.said]
            error = watch.error
        if error is not None:
            raise error
        if late:
            raise self._late(late, limit_s)

    def _late(self, late: list[_Follower], limit_s: float) -> RankError:
        names = ", ".join(str(f.rank) for f in late)
        came = late[0].said[-1] if late[0].said else "nothing"
        return RankError(
            f"rank {names} did not come up within {limit_s:g} s (rank {late[0].rank} said last: {came}). Check free memory "
            f"and whether the machine is busy; {START_LIMIT_NAME}=… gives more seconds.{late[0].last_lines()}"
        )

    def wait_for_error(self, seconds: float) -> RankError | None:
        """The error of a rank that is just ending, if one is: its broken connection shows a moment earlier."""
        watch = self._watch
        with watch.changed:
            watch.changed.wait_for(lambda: watch.error is not None or watch.closing, seconds)
            return watch.error

    def end(self) -> None:
        """End all processes and remove their files. Safe to call twice."""
        self._finalizer()


def _end_all(watch: _Watch, folder: tempfile.TemporaryDirectory[str]) -> None:
    watch.end()
    folder.cleanup()
