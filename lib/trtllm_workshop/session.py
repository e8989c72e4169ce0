"""`%%toolchain`: cells that run in one child interpreter of the toolchain, from the side of the notebook."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from trtllm_workshop import toolchain_child
from trtllm_workshop.live_output import Kept, LiveText
from trtllm_workshop.processes import MemoryPeak, end_group
from trtllm_workshop.shell import CommandResult, ShownError, advice_lines, closing_line, failure_text, show

if TYPE_CHECKING:
    from trtllm_workshop.toolchain import Toolchain

INTERRUPT_SECONDS = 10.0  # how long the child may take to react to Ctrl-C


class ToolchainError(ShownError):
    """A %%toolchain cell failed. `traceback_text` holds the child's whole traceback ('' when the child died)."""

    def __init__(self, message: str, traceback_text: str = ""):
        super().__init__(message)
        self.traceback_text = traceback_text


class _Child:
    """One running child: its process, its pipes and the thread that reads them in order."""

    def __init__(self, toolchain: Toolchain):
        pipes = [os.pipe() for _ in range(3)]
        (command_read, command_write), (reply_read, reply_write), (life_read, life_write) = pipes
        theirs = (command_read, reply_write, life_read)
        source = Path(toolchain_child.__file__).read_text(encoding="utf-8")
        try:
            self.process = subprocess.Popen(
                [str(toolchain.python), "-c", source, *map(str, theirs)],
                env=toolchain.environment(),
                cwd="/",  # its own imports must not find files of the notebook's folder; the first cell moves it there
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # one pipe, so that lines of both arrive in the order of writing
                pass_fds=theirs,
                start_new_session=True,
            )
        except OSError as problem:
            for descriptor in (command_write, reply_read, life_write):
                os.close(descriptor)
            raise ToolchainError(f"{toolchain.python} cannot be started: {problem}") from None
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.commands = os.fdopen(command_write, "wb")
        self.replies = os.fdopen(reply_read, "rb", buffering=0)
        self._life = life_write
        # Bounded: a background process that prints between cells is slowed down instead of filling the memory.
        self.events: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=256)
        self._stop = threading.Event()
        assert self.process.stdout is not None
        arguments = (self.process.stdout, self.replies, self.events, self._stop)
        self._reader = threading.Thread(target=_read, args=arguments, name="toolchain-reader", daemon=True)
        self._reader.start()

    def close(self, grace_s: float = 5.0) -> None:
        """End the child and its whole group: in good order when it is idle, by force after `grace_s`."""
        with contextlib.suppress(OSError):
            self.commands.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        end_group(self.process, first=None)
        self._stop.set()
        self._reader.join(5)
        with contextlib.suppress(OSError):
            os.close(self._life)
        self._life = -1
        self.replies.close()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _read(output: IO[bytes], replies: IO[bytes], events: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    """Pass on what the child writes. A reply counts only after everything that was printed before it."""

    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                return events.put((kind, value), timeout=0.5)

    os.set_blocking(output.fileno(), False)
    sources = [output, replies]
    while sources and not stop.is_set():
        ready, _, _ = select.select(sources, [], [], 0.5)
        if output in ready or replies in ready:
            with contextlib.suppress(BlockingIOError):
                while data := os.read(output.fileno(), 65536):
                    put("text", data)
                    if stop.is_set():
                        return
                if output in sources:
                    sources.remove(output)
        if replies in ready:
            message = toolchain_child.receive(_Whole(replies))
            if message is None:
                sources.remove(replies)
            else:
                put("reply", message)


class _Whole:
    """`read(n)` that waits for all n bytes of an unbuffered pipe; fewer only at its end."""

    def __init__(self, stream: IO[bytes]):
        self._stream = stream

    def read(self, size: int) -> bytes:
        parts = []
        while size > 0:
            part = self._stream.read(size)
            if not part:
                break
            parts.append(part)
            size -= len(part)
        return b"".join(parts)


class PythonSession:
    """The child interpreter of one notebook; started by the first `run`, started anew after it died.

    Raises ToolchainError when a cell fails, when a value cannot be copied, when the child dies, and when its
    `tensorrt_llm` is not the toolchain's.
    """

    def __init__(self, toolchain: Toolchain):
        self._toolchain = toolchain
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._busy = threading.Lock()
        self._cwd = ""
        self._count = 0
        self._lost = False
        self.identity: dict[str, Any] = {}

    @property
    def pid(self) -> int | None:
        """Process id of the child, None when none runs."""
        return self._child.process.pid if self._child and self._child.process.poll() is None else None

    def run(
        self,
        code: str,
        inputs: Mapping[str, Any] | None = None,
        outputs: Sequence[str] = (),
        *,
        name: str = "",
        quiet: bool = False,
    ) -> dict[str, Any]:
        """Run `code` in the child with `inputs` copied in; return the values of the names in `outputs`.

        `name` stands for the code in error messages; `quiet` leaves out the closing line with time and memory.
        """
        if not self._busy.acquire(blocking=False):
            raise ToolchainError("the child is still running another cell")
        try:
            values = {key: toolchain_child.encode(value, key) for key, value in (inputs or {}).items()}
            child = self._ready_child()
            self._count += 1
            here = os.getcwd()
            message = {
                "name": name or f"code {self._count}",
                "code": code,
                "inputs": values,
                "outputs": list(outputs),
                "cwd": here if here != self._cwd else "",
            }
            self._cwd = here
            reply = self._exchange(child, message, quiet)
        except toolchain_child.NotPlainData as problem:
            raise ToolchainError(str(problem)) from None
        finally:
            self._busy.release()
        return {key: toolchain_child.decode(value) for key, value in reply["outputs"].items()}

    def close(self) -> None:
        """End the child and everything that it started; the next `run` starts a new one."""
        self._lost = False
        self._end(5.0)

    def _end(self, grace_s: float) -> None:
        child, self._child = self._child, None
        if self._finalizer:
            self._finalizer.detach()
        if child:
            child.close(grace_s)

    def _ready_child(self) -> _Child:
        if self._child and self._child.process.poll() is not None:
            result = self._result(self._child, "", 0.0)
            ended = failure_text("the %%toolchain child ended between two cells", result)
            print(f"note: {ended}")
            self._lost = True
            self._end(0.0)
        if self._child is None:
            self._child = child = _Child(self._toolchain)
            self._finalizer = weakref.finalize(self, child.close, 1.0)
            self._cwd = ""
            kept = Kept()
            hello = self._wait(child, kept, time.monotonic(), LiveText(show=lambda _: None, keep=kept.add).feed)
            self.identity = {"python": hello["python"], **hello["tensorrt_llm"]}
            self._check_identity(hello["tensorrt_llm"])
            gone = "; the variables of earlier %%toolchain cells are gone" if self._lost else ""
            print(f"new child: Python {hello['python']}, tensorrt_llm {self.identity['version']}{gone}")
            self._lost = False
        return self._child

    def _check_identity(self, found: Mapping[str, Any]) -> None:
        from trtllm_workshop.toolchain import REFERENCE

        wanted, version, file = self._toolchain, found["version"], found["file"]
        place_fits = bool(file) and Path(file).resolve().is_relative_to(REFERENCE) == (wanted.name == "reference")
        if place_fits and (version == wanted.version or (version is None and wanted.name != "reference")):
            return
        self._end(0.0)
        raise ToolchainError(
            f"the child of the {wanted.name} toolchain would import tensorrt_llm {version} from {file}, "
            f"not {wanted.version}; look for another tensorrt_llm in PYTHONPATH, in .pth files and in {os.getcwd()}"
        )

    def _exchange(self, child: _Child, message: dict[str, Any], quiet: bool) -> dict[str, Any]:
        kept, started = Kept(), time.monotonic()
        with MemoryPeak(child.process.pid) as memory:
            text = LiveText(show=show, keep=kept.add)
            try:
                with contextlib.suppress(BrokenPipeError):  # a dead child is explained by _wait
                    toolchain_child.send(child.commands, message)
                reply = self._wait(child, kept, started, text.feed)
            finally:
                text.finish()
        if reply["tensorrt_llm"]:
            self.identity.update(reply["tensorrt_llm"])
            self._check_identity(reply["tensorrt_llm"])
        if reply["error"]:
            self._raise(reply["error"], kept)
        if not quiet:
            print(closing_line("done", time.monotonic() - started, memory.peak_mb))
        return reply

    def _wait(self, child: _Child, kept: Kept, started: float, feed: Any) -> dict[str, Any]:
        """Pass output to `feed` until the reply comes; explain a death, forward an interrupt."""
        give_up = float("inf")
        while True:
            try:
                kind, value = child.events.get(timeout=0.2)
                if kind == "reply":
                    return dict(value)
                feed(value)
            except queue.Empty:
                if child.process.poll() is not None:  # and nothing more to read
                    result = self._result(child, kept.text(), time.monotonic() - started)
                    self._lost = True
                    self._end(0.0)
                    raise ToolchainError(failure_text("the %%toolchain child died", result)) from None
                if time.monotonic() > give_up:
                    self._abandon(f"did not react to the interrupt within {INTERRUPT_SECONDS:.0f} s")
            except KeyboardInterrupt:
                if give_up < float("inf"):
                    self._abandon("was interrupted twice")
                give_up = time.monotonic() + INTERRUPT_SECONDS
                with contextlib.suppress(ProcessLookupError):
                    child.process.send_signal(signal.SIGINT)

    def _abandon(self, why: str) -> None:
        print(f"\nthe child {why} and was ended; its variables are gone")
        self._lost = True
        self._end(0.0)
        raise KeyboardInterrupt

    def _result(self, child: _Child, output: str, seconds: float) -> CommandResult:
        return CommandResult([str(self._toolchain.python)], child.process.returncode, seconds, output, None)

    def _raise(self, error: Mapping[str, Any], kept: Kept) -> None:
        if error["type"] == "KeyboardInterrupt":
            print("interrupted; the child and its variables live on")
            raise KeyboardInterrupt
        from trtllm_workshop.advice import first_error

        lines = [error["text"], *(f"  {frame}" for frame in error["frames"])]
        earlier = first_error(kept.text())
        if earlier and earlier not in error["traceback"]:
            lines.append(f"first error in the output: {earlier}")  # native code logs the reason, Python fails later
        lines += _own_advice(error) or advice_lines(kept.text() + "\n" + error["traceback"])
        raise ToolchainError("\n".join(lines), error["traceback"])


def _own_advice(error: Mapping[str, Any]) -> list[str]:
    """Advice for mistakes that belong to this way of running a cell."""
    text = error["text"]
    if error["type"] == "SystemExit":
        return ["  fix: a cell ends by reaching its last line; raise an exception to report a failure"]
    if "'await' outside" in text or "'async " in text:
        return ["  fix: the child has no running event loop, so call asyncio.run(...) instead of a bare await"]
    if error["type"] == "SyntaxError" and any(line.strip().startswith(("!", "%")) for line in text.splitlines()):
        return ["  fix: the cell is plain Python; use sh(...) in a cell of its own for commands, and no % magics"]
    if "pickle" in text and "__main__" in text:
        return ["  fix: other processes cannot see functions of a cell; put them into a .py file and import it here"]
    return []
