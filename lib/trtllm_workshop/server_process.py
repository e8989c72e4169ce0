"""A server in a process group of its own: start it, wait until it is healthy, end all of it.

Works for any command line that listens on a port: `trtllm-serve` of either toolchain, Triton's `tritonserver`, another
server of the same API. A guard process (`server_guard`) ends the server when the notebook's kernel goes.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from trtllm_workshop import server_guard
from trtllm_workshop.command_line import CommandLineError, split_line
from trtllm_workshop.live_output import Kept, LiveText
from trtllm_workshop.ports import LOOPBACK, free_port, port_problem
from trtllm_workshop.processes import MemoryPeak, end_group, tree_mb
from trtllm_workshop.shell import (
    CommandRefused,
    CommandResult,
    ShownError,
    describe_exit,
    failure_text,
    refuse_known_mistakes,
    show,
)
from trtllm_workshop.toolchain import Toolchain

_PLACE = re.compile(r"\{((?:[a-z]+_)?port)\}")
_PAUSE_S = 0.1


class ServerFailed(ShownError):
    """A server that did not come up, or went away. `result` holds the command, its exit status and its log."""

    def __init__(self, message: str, result: CommandResult | None = None):
        super().__init__(message)
        self.result = result


@dataclass(frozen=True)
class MemoryUse:
    """Memory of the machine that is free, in MB (10^6 bytes): main memory, and each GPU by name."""

    available_mb: float | None
    gpus_free_mb: tuple[tuple[str, float], ...] = ()

    @classmethod
    def now(cls) -> MemoryUse:
        """What the machine says at this moment."""
        from trtllm_workshop.gpu import read_nvml

        available = None
        with contextlib.suppress(ImportError):
            import psutil

            available = psutil.virtual_memory().available / 1e6
        gpus = [(gpu.name, gpu.memory_free_mib * 2**20 / 1e6) for gpu in read_nvml().gpus if gpu.memory_free_mib]
        return cls(available, tuple(gpus))

    def __str__(self) -> str:
        parts = [] if self.available_mb is None else [f"{self.available_mb / 1e3:.1f} GB of main memory available"]
        return ", ".join([*parts, *(f"{free / 1e3:.1f} GB free on {name}" for name, free in self.gpus_free_mb)])


class Server:
    """A running server; made by `start_server`. A `with` block ends it and everything that it started.

    Attributes:
        url: `http://host:port`.
        port, ports: the port that is asked for its health; all ports that were put into the command, by name.
        pid: of the server's main process.
        log_path: the file with everything it printed.
        ready_s: seconds from start to the first healthy answer.
        memory_before, memory_after: the machine's free memory before the start and after the end (None until then).
    """

    def __init__(self, toolchain: Toolchain, command: str, options: Mapping[str, Any], ports: dict[str, int]):
        self.toolchain, self.template, self._options, self.ports = toolchain, command, dict(options), ports
        self.command = _PLACE.sub(lambda place: str(ports[place.group(1)]), command)
        self.host, self.port = self._options["host"], ports["port"]
        self.log_path = Path(self._options["log"])
        self.ready_s = 0.0
        self.memory_before = MemoryUse.now()
        self.memory_after: MemoryUse | None = None
        self._argv: list[str] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def running(self) -> bool:
        """Whether the server's process is there; see `healthy` for whether it answers."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def pid(self) -> int | None:
        """The server's main process; None when it has ended."""
        import psutil

        if not self.running:
            return None
        assert self._guard is not None
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(self._guard.pid).children()
            return int(children[0].pid) if children else None
        return None

    @property
    def memory_mb(self) -> float | None:
        """Memory of the server with all it started, in MB (10^6 bytes); shared pages count once. None when it has ended."""
        return tree_mb(self._guard.pid) if self.running and self._guard is not None else None

    def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether the health address answers with status 200 within `timeout_s`."""
        return self.health_status(timeout_s) == 200

    def health_status(self, timeout_s: float = 2.0) -> int | None:
        """The status of the health address; None without an answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)
        try:
            connection.request("GET", self._options["health"])
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def tail(self, lines: int = 20) -> str:
        """The last lines of the log."""
        kept = Kept()
        text = LiveText(show=lambda _: None, keep=kept.add)
        with contextlib.suppress(OSError):
            text.feed(self.log_path.read_bytes()[-200_000:])
        text.finish()
        return "\n".join(kept.last(lines))

    # Start and end

    def start(self) -> Server:
        """Start and wait until it is healthy.

        Raises:
            CommandRefused: for a line that is known to be wrong, or a port that is in use.
            ServerFailed: when it ends before it is healthy, or does not become healthy in time; nothing of it is left then.
        """
        if self.running:
            raise ServerFailed(f"this server runs already, at {self.url}; stop() it first")
        for name, port in self.ports.items():
            problem = port_problem(port, self.host)
            if problem:
                raise CommandRefused(
                    f"{problem}\n  fix: end that process, or leave the number to the course with {{{name}}} in the command"
                )
        try:
            extra = {key: str(value) for key, value in (self._options["env"] or {}).items()}
            assignments, words = split_line(self.command, self.toolchain.environment(extra))
            refuse_known_mistakes(words, self.toolchain.version)
            self._argv = self.toolchain.resolve(words)
        except CommandLineError as problem_:
            raise CommandRefused(str(problem_)) from None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guard = [sys.executable, "-I", "-S", str(Path(server_guard.__file__)), "10", *self._argv]
        self._started = time.monotonic()
        with open(self.log_path, "wb") as log:
            self._guard = subprocess.Popen(
                guard,
                env=self.toolchain.environment({**extra, **assignments}),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            with open(self.log_path, "rb") as record:
                self._wait_until_healthy(record)
        except BaseException:
            self._end(grace_s=2.0)
            raise
        return self

    def _wait_until_healthy(self, record: IO[bytes]) -> None:
        quiet, limit = self._options["quiet"], self._options["timeout_s"]
        kept = Kept()
        text = LiveText(show=(lambda _: None) if quiet else show, keep=kept.add)
        assert self._guard is not None
        asked, ended, late = 0.0, False, False
        with MemoryPeak(self._guard.pid) as memory:
            while not ended and not late:
                ended = self._guard.poll() is not None
                text.feed(record.read())
                now = time.monotonic()
                if not ended and now - asked > 2 * _PAUSE_S:
                    if self.healthy():
                        break
                    asked = now
                late = now - self._started > limit
                time.sleep(_PAUSE_S)
        text.feed(record.read())
        text.finish()
        seconds = time.monotonic() - self._started
        ending = (
            f"not healthy after {limit:g} s ({self._options['health']} at {self.url}); it was ended" if late else ""
        )
        if ended or late:
            code = self._guard.returncode if ended else -15
            result = CommandResult(self._argv, code if code is not None else -15, seconds, kept.text(), memory.peak_mb)
            name = self.command.split()[0]
            raise ServerFailed(failure_text(f"{name} did not start", result, ending, self.command), result)
        self.ready_s = seconds
        if not quiet:
            print(f"healthy after {seconds:.1f} s at {self.url}; its log goes to {self.log_path}", flush=True)

    def stop(self, grace_s: float = 35.0) -> int | None:
        """Ask the server to end, wait for it, and kill what is left after `grace_s` seconds. Safe to call twice.

        Returns:
            Its exit status (negative: the signal that ended it), None when it had not been started.
        """
        if self._guard is None:
            return None
        code = self._end(grace_s)
        if self.memory_after is None:
            self.memory_after = MemoryUse.now()
        return code

    def kill(self) -> None:
        """End the whole group at once, without asking."""
        self._end(grace_s=0.0)

    def _end(self, grace_s: float) -> int | None:
        guard = self._guard
        if guard is None:
            return None
        assert guard.stdin is not None
        if guard.poll() is None and grace_s > 0:
            with contextlib.suppress(OSError):
                guard.stdin.write(b"T")
                guard.stdin.flush()
            with contextlib.suppress(subprocess.TimeoutExpired):
                guard.wait(grace_s)
        end_group(guard, first=None)
        with contextlib.suppress(OSError):
            guard.stdin.close()
        code = guard.returncode
        return 128 - code if code is not None and 128 < code < 160 else code

    def wait(self, timeout_s: float) -> int | None:
        """Wait until the server has ended by itself; its exit status, None when it still runs after `timeout_s`."""
        assert self._guard is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout_s)
        return None if self.running else self._end(0.0)

    def restart(self, grace_s: float = 35.0) -> Server:
        """End this server, letting it finish what it accepted, and start it again on the same ports. New requests are refused
        meanwhile; see `replacement` for a restart without that gap."""
        self.stop(grace_s)
        self.memory_after = None
        return self.start()

    def replacement(self) -> Server:
        """A second server of the same command on other ports, healthy when this returns. Send new requests there, then `stop`
        the old one, which finishes what it accepted. Both hold their memory meanwhile."""
        names = [name for name in self.ports if f"{{{name}}}" in self.template]
        if "port" not in names:
            raise ServerFailed("a replacement needs another port: write {port} into the command instead of a number")
        log = self.log_path.with_name(f"{self.log_path.stem}-replacement{self.log_path.suffix}")
        ports = {**self.ports, **{name: free_port(self.host) for name in names}}
        return Server(self.toolchain, self.template, {**self._options, "log": log}, ports).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
        if not self._options["quiet"]:
            print(f"server ended; before it: {self.memory_before}; after it: {self.memory_after}", flush=True)

    def __repr__(self) -> str:
        state = f"running at {self.url}" if self.running else "ended"
        return f"<Server {self.command.split()[0]}, {state}>"

    def describe_end(self) -> str:
        """How the server ended, in words; for one that still runs, that it does."""
        code = None if self._guard is None or self.running else self._guard.poll()
        return "it runs" if code is None else describe_exit(code)


def start_server(
    toolchain: Toolchain,
    command: str,
    *,
    log: str | Path,
    port: int | None = None,
    host: str = LOOPBACK,
    health: str = "/health",
    timeout_s: float = 180.0,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
) -> Server:
    """Start a server and wait until it answers.

    Args:
        toolchain: whose commands and Python are meant.
        command: the line as a person would type it, with `{port}` where the port goes, and `{grpc_port}`, `{metrics_port}` …
            for further ones; free ports are put in.
        log: file for its output.
        port: this port instead of a free one; needed when the command does not hold `{port}`.
        host: where it is asked for its health.
        health: path that answers with status 200 when it serves.
        timeout_s: seconds until it must be healthy.
        env: variables for the server only.
        quiet: do not show its output while it starts.

    Raises:
        CommandRefused: for a line that is known to be wrong, or a port that is in use. Nothing has been started then.
        ServerFailed: when it ends or does not become healthy in time, with its last lines and advice. Nothing is left of it.
    """
    names = list(dict.fromkeys(_PLACE.findall(command)))
    if port is None and "port" not in names:
        raise CommandRefused("no port in this command: write {port} where its number goes, or name it with port=…")
    ports = {"port": port if port is not None else free_port(host)}
    for name in names:
        while name not in ports or list(ports.values()).count(ports[name]) > 1:
            ports[name] = free_port(host)
    options = dict(log=log, host=host, health=health, timeout_s=timeout_s, env=dict(env or {}), quiet=quiet)
    return Server(toolchain, command, options, ports).start()
