"""Moving the bytes: the child process, its watchdog, and the way from the fast path to the plain one.

Measured with huggingface_hub 0.36.2: on a cut connection the plain path fails and resumes on the next call; hf_transfer
neither resumes nor notices a stall, and leaves a file of full size with holes, which the plain path would take for
complete. So what a fast path leaves behind is deleted, and a plain remainder is resumed by the plain path.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop.host import installed
from trtllm_workshop.hub_tokens import Token
from trtllm_workshop.processes import end_group

PLAIN_ATTEMPTS = 3
_YES = ("1", "true", "yes", "on")
_FAST_MARK = "fast-path-unfinished"


@dataclass(frozen=True)
class Route:
    """How to transfer: "hf_transfer", "xet" or "plain", and a remark on the user's settings."""

    name: str
    note: str = ""


def fast_path(environ: Mapping[str, str], hub_version: str | None = None) -> Route:
    """The fastest path that is installed and not switched off by the user's own variables."""
    version = hub_version or importlib.metadata.version("huggingface_hub")
    wish = environ.get("HF_HUB_ENABLE_HF_TRANSFER", "").lower()
    xet = installed("hf_xet") and environ.get("HF_HUB_DISABLE_XET", "").lower() not in _YES
    other = "xet" if xet else "plain"
    if int(version.split(".")[0]) >= 1:
        note = "huggingface_hub 1.x has no hf_transfer; its successor is HF_XET_HIGH_PERFORMANCE=1"
        return Route(other, note if wish in _YES else "")
    if installed("hf_transfer"):
        return Route("hf_transfer" if wish in ("", *_YES) else other)
    note = "HF_HUB_ENABLE_HF_TRANSFER is set, but the package hf_transfer is not installed: turned off"
    return Route(other, note if wish in _YES else "")


def child_environment(environ: Mapping[str, str], path: str, endpoint: str | None = None) -> dict[str, str]:
    """The environment of a child that transfers over `path`."""
    env = dict(environ)
    package = str(Path(__file__).parents[1])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (package, env.get("PYTHONPATH"))))
    env["HF_HUB_ENABLE_HF_TRANSFER"] = "1" if path == "hf_transfer" else "0"
    env["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    env.setdefault("HF_XET_CHUNK_CACHE_SIZE_BYTES", "0")  # a model is fetched once: do not store it twice
    if path == "plain":
        env["HF_HUB_DISABLE_XET"] = "1"
    if endpoint:
        env["HF_ENDPOINT"] = endpoint
    return env


def ask_child(
    request: Mapping[str, Any],
    env: Mapping[str, str],
    token: Token | None,
    *,
    timeout: float | None = None,
    stalled: Callable[[], str] | None = None,
) -> dict[str, Any]:
    """One answer of `hub_child`: its result, or {"error": ...}. The child is ended when `stalled` returns a reason."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-m", "trtllm_workshop.hub_child"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=err, env=dict(env), start_new_session=True
        )
        started, reason = time.monotonic(), ""
        try:
            assert process.stdin is not None
            line = json.dumps({**request, "token": token.reveal() if token else None}) + "\n"
            try:
                process.stdin.write(line.encode())
                process.stdin.flush()  # and left open: the child ends when this process does
            except BrokenPipeError:
                pass  # it died at start; its last words are below
            while process.poll() is None and not reason:
                time.sleep(0.1)
                if timeout and time.monotonic() - started > timeout:
                    reason = f"no answer in {timeout:g} s"
                elif stalled:
                    reason = stalled()
        finally:
            end_group(process, None)
        out.seek(0)
        err.seek(0)
        text = out.read().decode(errors="replace").strip()
        if text:
            answer: dict[str, Any] = json.loads(text.splitlines()[-1])
            return answer
        if reason:
            return {"error": {"kind": "stall" if stalled else "connection", "status": None, "text": reason}}
        words = err.read().decode(errors="replace").strip()[-400:] or f"the process ended with {process.returncode}"
        return {"error": {"kind": "other", "status": None, "text": words}}


class Progress:
    """Watches a folder grow: prints a line now and then, and reports a stall after `stall_seconds` without change."""

    def __init__(self, folder: Path, total: int, stall_seconds: float, say: Callable[[str], object]) -> None:
        self._folder, self._total, self._stall, self._say = folder, total, stall_seconds, say
        self._seen, self._changed = self._state(), time.monotonic()
        self._first, self._started = self._seen[0], time.monotonic()
        self._next_line, self._next_look = self._started + 2.0, self._started

    def _state(self) -> tuple[int, int, int]:
        """Bytes really on disk (a preallocated file does not count), bytes by length, newest change."""
        blocks = length = newest = 0
        for path in self._folder.rglob("*"):
            try:
                stat = path.stat()
            except OSError:
                continue
            if path.is_file():
                blocks += min(stat.st_size, stat.st_blocks * 512)
                length += stat.st_size
                newest = max(newest, stat.st_mtime_ns)
        return blocks, length, newest

    def __call__(self) -> str:
        """A reason to give up, or ''."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + 0.5
        state = self._state()
        if state != self._seen:
            self._seen, self._changed = state, now
        done = min(state[0], self._total)
        if now >= self._next_line and done < self._total:
            rate = max(state[0] - self._first, 0) / (now - self._started)
            left = f", about {(self._total - done) / rate:,.0f} s left" if rate > 0 else ""
            self._say(f"  {done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, {rate / 1e6:,.1f} MB/s{left}")
            self._next_line = now + max(5.0, (now - self._started) / 4)  # less and less often
        if now - self._changed > self._stall:
            return f"no byte arrived in {self._stall:g} s, {done:,} of {self._total:,} bytes are there"
        return ""


def transfer(
    request: Mapping[str, Any],
    total: int,
    first: Route,
    environ: Mapping[str, str],
    token: Token | None,
    *,
    endpoint: str | None = None,
    stall_seconds: float = 30.0,
    say: Callable[[str], object] = print,
) -> tuple[dict[str, Any] | None, list[str]]:
    """Runs the "fetch" request until it works: once over the fast path, then over the plain one, which resumes.

    Returns (the last error or None, remarks). Refusals of the Hub and a full disk are not tried again.
    """
    folder = Path(request["folder"])
    notes, state = [first.note] if first.note else [], folder / ".cache"
    state.mkdir(parents=True, exist_ok=True)
    mark, path = state / _FAST_MARK, first.name
    _drop_unfinished(folder, everything=mark.exists())
    mark.unlink(missing_ok=True)
    if path != "plain" and any(file.stat().st_size for file in folder.rglob("*.incomplete")):
        notes.append("an earlier download is resumed, over the plain path since the fast one cannot resume")
        path = "plain"
    error: dict[str, Any] | None = None
    plain = 0
    while plain < PLAIN_ATTEMPTS:
        plain += path == "plain"
        if path == "hf_transfer":
            mark.touch()
        watch = Progress(folder, total, stall_seconds, say)
        answer = ask_child(request, child_environment(environ, path, endpoint), token, stalled=watch)
        error = answer.get("error")
        if error:
            _drop_unfinished(folder, everything=path == "hf_transfer")
        mark.unlink(missing_ok=True)
        if error is None:
            return None, notes
        kind, text = error["kind"], " ".join(str(error["text"]).split())[:200]
        if path == "xet" and kind == "connection":  # a file that is not in xet's store went over plain HTTP
            path = "plain"
            notes.append(_tell(f"the connection was cut: {text}; resuming", token, say))
        elif path != "plain" and kind in ("fast path", "stall", "connection", "other"):
            notes.append(_tell(f"the fast path ({path}) failed: {text}; going on without it", token, say))
            path = "plain"
        elif kind in ("stall", "connection", "unreachable") and plain < PLAIN_ATTEMPTS:
            notes.append(_tell(f"the connection was cut: {text}; resuming", token, say))
            time.sleep(min(2.0, stall_seconds))
        else:
            break
    return error, notes


def _tell(text: str, token: Token | None, say: Callable[[str], object]) -> str:
    text = token.hide(text) if token else text
    say(f"  {text}")
    return text


def _drop_unfinished(folder: Path, everything: bool) -> None:
    """Deletes unfinished files; without `everything` only those with holes, whose length says nothing."""
    for file in folder.rglob("*.incomplete"):
        stat = file.stat()
        if everything or stat.st_blocks * 512 < stat.st_size:
            file.unlink(missing_ok=True)
