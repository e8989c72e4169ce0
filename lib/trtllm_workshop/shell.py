"""sh(): run one command line in a child process with live output, a time, a memory peak and an error that teaches."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from trtllm_workshop.command_line import CommandLineError, split_line
from trtllm_workshop.live_output import Kept, LiveText
from trtllm_workshop.processes import MemoryPeak, end_group

if TYPE_CHECKING:
    from trtllm_workshop.advice import Advice
    from trtllm_workshop.toolchain import Toolchain


# Command or script -> (ending of the files that it writes per rank, default of its --output_dir).
_RANK_FILES = {
    "trtllm-build": (".engine", "engine_outputs"),
    "convert_checkpoint.py": (".safetensors", "tllm_checkpoint"),
    "quantize.py": (".safetensors", "exported_model"),
}


@dataclass(frozen=True)
class CommandResult:
    """What a finished command left: wall time, merged output, peak memory of its process tree in MB (10^6 bytes)."""

    argv: list[str]
    returncode: int
    seconds: float
    output: str = field(repr=False)
    peak_memory_mb: float | None

    def _ipython_display_(self) -> None:
        """Nothing: as the last value of a cell it would only repeat what was shown live."""


class ShownError(RuntimeError):
    """An error whose text is the whole message: a notebook shows it without a traceback through this library."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class CommandFailed(ShownError):
    """A command ended badly. The message begins with its first error line; `result` holds the output."""

    def __init__(self, message: str, result: CommandResult):
        super().__init__(message)
        self.result = result


class CommandRefused(ShownError, CommandLineError):
    """The command line was not started, because it is known to be wrong."""


def run_line(
    toolchain: Toolchain,
    command: str,
    *,
    cwd: str | Path | None = None,
    check: bool = True,
    timeout: float | None = None,
    quiet: bool = False,
    env: Mapping[str, str] | None = None,
    log: str | Path | None = None,
) -> CommandResult:
    """Run `command`, exactly as a person would type it, in `toolchain`; the line never reaches a shell.

    cwd: folder to run in. check: raise CommandFailed for a bad end. timeout: seconds, after which the whole process
    group is ended. quiet: do not show the output. env: variables for the child only. log: file for the whole output.
    Raises CommandRefused when the line is known to be wrong; nothing has been started then.
    """
    try:
        extra = {key: str(value) for key, value in (env or {}).items()}
        assignments, words = split_line(command, toolchain.environment(extra))
        refuse_known_mistakes(words, toolchain.version)
        argv = toolchain.resolve(words)
    except CommandLineError as problem:
        raise CommandRefused(str(problem)) from None
    folder = Path(cwd) if cwd is not None else Path.cwd()
    if not folder.is_dir():
        raise CommandRefused(f"cwd is {str(folder)!r}, which is not a folder")
    started = time.time()
    result, ending = _run(argv, folder, toolchain.environment({**extra, **assignments}), timeout, quiet, log)
    if check and (ending or result.returncode != 0):
        raise CommandFailed(failure_text(words[0], result, ending, command), result)
    if check:
        missing = missing_files(words, folder, started)
        if missing:
            raise CommandFailed(f"{words[0]}: {missing[0].cause}\n  fix: {missing[0].fix}", result)
    return result


def refuse_known_mistakes(words: Sequence[str], version: str) -> None:
    """Check a command against the recorded facts: warnings go to standard error, errors raise CommandRefused.

    The facts are those of one release line; for a toolchain of another one they only warn.
    """
    from trtllm_workshop.commands import check_command

    problems = check_command(shlex.join(words))
    errors = [problem for problem in problems if problem.severity == "error" and version.startswith("1.2")]
    for problem in problems:
        if problem not in errors:
            print(f"warning: {problem.message}" + (f"; {problem.fix}" if problem.fix else ""), file=sys.stderr)
    if errors:
        lines = [f"{problem.message}\n  fix: {problem.fix}" if problem.fix else problem.message for problem in errors]
        raise CommandRefused("\n".join(lines))


def _run(
    argv: list[str],
    cwd: Path,
    environment: Mapping[str, str],
    timeout: float | None,
    quiet: bool,
    log: str | Path | None,
) -> tuple[CommandResult, str]:
    """Start, show, measure; the second value says how it was ended from here, if it was."""
    kept = Kept()
    started = time.monotonic()
    with ExitStack() as stack:
        record = None
        if log is not None:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            record = stack.enter_context(open(log, "wb"))
        try:
            process = subprocess.Popen(
                argv,
                cwd=cwd,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that all of it can be ended
            )
        except OSError as problem:
            raise CommandRefused(f"{argv[0]} cannot be started: {problem}") from None
        text = LiveText(show=_nothing if quiet else show, keep=kept.add)
        memory = stack.enter_context(MemoryPeak(process.pid))
        ending = ""
        try:
            deadline = None if timeout is None else started + timeout
            if not _follow(process, text, record, deadline):
                ending = f"timed out after {timeout:g} s; the command and everything that it started were ended"
        except KeyboardInterrupt:
            end_group(process, first=signal.SIGINT)
            raise
        finally:
            end_group(process, grace_s=2.0)
            assert process.stdout is not None
            process.stdout.close()
            text.finish()
    seconds = time.monotonic() - started
    peak = memory.peak_mb
    if not quiet:
        state = "done" if process.returncode == 0 and not ending else "ended"
        print(closing_line(state, seconds, peak), flush=True)
    return CommandResult(argv, process.returncode, seconds, kept.text(), peak), ending


def _follow(process: subprocess.Popen[bytes], text: LiveText, record: IO[bytes] | None, deadline: float | None) -> bool:
    """Pass output on until the process has ended; False when `deadline` came first."""
    assert process.stdout is not None
    source = process.stdout.fileno()
    exited = False
    while True:
        ready, _, _ = select.select([source], [], [], 0 if exited else 0.1)
        if ready:
            data = os.read(source, 65536)
            if not data:
                # Closed output is not the end: a program may go on silently.
                remaining = None if deadline is None else max(deadline - time.monotonic(), 0.0)
                return _wait(process, remaining)
            text.feed(data)
            if record:
                record.write(data)
        elif exited:
            # A process that the command left behind may hold the pipe open for ever; nothing more is waited for.
            return True
        exited = exited or process.poll() is not None
        if deadline is not None and time.monotonic() > deadline and not exited:
            return False


def _wait(process: subprocess.Popen[bytes], seconds: float | None) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def show(text: str) -> None:
    """Write to the running cell (or the terminal) at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def closing_line(state: str, seconds: float, peak_mb: float | None) -> str:
    """`done in 12.3 s, peak 812 MB`; the peak is left out when nothing was measured."""
    return f"{state} in {seconds:.1f} s" + (f", peak {peak_mb:,.0f} MB" if peak_mb and peak_mb >= 1 else "")


def _nothing(_: str) -> None:
    pass


def describe_exit(returncode: int) -> str:
    """How a process ended, in words: `exit code 2`, or the signal and its usual meaning."""
    number = -returncode if returncode < 0 else returncode - 128 if 128 < returncode < 160 else 0
    if not number:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exit code {returncode}"
    meaning = {
        "SIGSEGV": "a crash inside native code",
        "SIGABRT": "native code gave up; its reason is in the last lines",
        "SIGBUS": "a mapped file or shared memory was cut short: check the disk and /dev/shm",
        "SIGILL": "native code built for another processor",
        "SIGINT": "interrupted",
        "SIGTERM": "asked to end from outside",
    }.get(name, "")
    return f"signal {name}" + (f" ({meaning})" if meaning else "")


def failure_text(what: str, result: CommandResult, ending: str = "", command: str | None = None) -> str:
    """The message of a failure: first error line, how it ended, what to do, last lines."""
    from trtllm_workshop.advice import first_error

    error = first_error(result.output)
    lines = [error] if error else []
    # A process that was ended from here says nothing by its exit status.
    returncode = None if ending else result.returncode
    lines += [f"{what}: {ending or describe_exit(result.returncode)}"]
    lines += advice_lines(result.output, returncode, command)
    if ending:
        lines += hang_lines(command or what)
    last = [line for line in result.output.splitlines() if line.strip()][-5:]
    if last and last != [error]:
        lines += ["last lines of the output:", *(f"  {line}" for line in last)]
    return "\n".join(lines)


def advice_lines(text: str, returncode: int | None = None, command: str | None = None) -> list[str]:
    """Cause and fix for every known error in `text`."""
    from trtllm_workshop.advice import advise
    from trtllm_workshop.advice_mpi import visible_gpus

    found = advise(text, returncode, command, lambda: visible_gpus(os.environ))
    return [f"cause: {item.cause}\n  fix: {item.fix}" for item in found]


def hang_lines(command: str) -> list[str]:
    """What a command that had to be ended may have waited for; nothing for one without mpirun."""
    from trtllm_workshop.advice_mpi import hang_verdict, network_interfaces

    verdict = hang_verdict(command, network_interfaces())
    return [] if verdict is None else [f"perhaps: {verdict.cause}\n  fix: {verdict.fix}"]


def missing_files(words: list[str], cwd: Path, started: float) -> list[Advice]:
    """What a command that reported success has not written: its writer may have been killed late (P54)."""
    from trtllm_workshop.advice import check_artifacts

    writer = next((_RANK_FILES[Path(word).name] for word in words if Path(word).name in _RANK_FILES), None)
    if writer is None or {"-h", "--help", "--version"} & set(words) or "hf" in words:
        return []
    suffix, folder = writer
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--output_dir"):
            folder = word.partition("=")[2] or following
    return check_artifacts(cwd / folder, started, _world_size(cwd / folder), suffix)


def _world_size(folder: Path) -> int:
    """The number of ranks that config.json promises; one when it does not say."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return max(1, int(config.get("pretrained_config", config)["mapping"]["world_size"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 1
