"""A small Hub on this machine: the part of the protocol that huggingface_hub uses to list and fetch a model.

Model info with commit and files for a revision; HEAD and GET of resolve/COMMIT/FILE with ETag, X-Repo-Commit,
X-Linked-Size and ranges. Faults are real ones on the wire: a connection closed after some bytes, silence, a refusal.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlparse

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fault:
    """What goes wrong with a file: the next `times` GETs deliver `after` bytes and then `kind` ("cut" or "stall")."""

    kind: str
    after: int = 0
    times: int = 1_000_000
    only_ranges: bool = (
        False  # only requests for a piece with an end, which hf_transfer makes and the plain path does not
    )


@dataclass
class FakeHub:
    """The state of the server: repositories, refusals and faults, and what was asked (`requests`)."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)  # repo -> (status, X-Error-Code)
    refuse_files_only: bool = False
    proxy_page: bool = False  # answer like a proxy in between: 403 without any of the Hub's headers
    faults: dict[str, Fault] = field(default_factory=dict)  # file name -> fault
    corrupt: dict[str, int] = field(default_factory=dict)  # file name -> how many GETs deliver a changed byte
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    tokens: list[str | None] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def add(self, name: str, folder: Any) -> None:
        """Publishes the files of a folder as a repository."""
        self.repos[name] = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    def ranges(self, name: str) -> list[str | None]:
        """The Range headers of all GETs of a file, in order."""
        return [span for method, path, span in self.requests if method == "GET" and path.endswith("/" + name)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str, message: str = "refused") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, {**headers, "X-Error-Message": message, "X-Request-Id": "1"}, b"{}")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlparse(self.path).path)
        hub.requests.append((self.command, path, self.headers.get("Range")))
        hub.tokens.append(self.headers.get("Authorization"))
        if hub.proxy_page:
            return self._send(403, {}, b"<html>blocked</html>")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(match[1], match[2] or "main")
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(match[1], match[2], match[3])
        self._refuse(404, "RepoNotFound")

    def _check(self, repo: str, revision: str, files: bool) -> bool:
        if repo in self.hub.refusals and (files or not self.hub.refuse_files_only):
            self._refuse(*self.hub.refusals[repo])
        elif repo not in self.hub.repos:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        else:
            return True
        return False

    def _info(self, repo: str, revision: str) -> None:
        if not self._check(repo, revision, files=False):
            return
        siblings = []
        for name, data in self.hub.repos[repo].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": hashlib.sha1(data).hexdigest()}
            if _is_lfs(name):
                entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
            siblings.append(entry)
        info = {"id": repo, "modelId": repo, "sha": COMMIT, "private": False, "siblings": siblings, "tags": []}
        self._send(200, {"Content-Type": "application/json"}, json.dumps(info).encode())

    def _file(self, repo: str, revision: str, name: str) -> None:
        if not self._check(repo, revision, files=True):
            return
        data = self.hub.repos[repo].get(name)
        if data is None:
            return self._refuse(404, "EntryNotFound")
        digest = (hashlib.sha256 if _is_lfs(name) else hashlib.sha1)(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if self.command == "HEAD":
            return self._send(200, {**headers, "X-Linked-Size": str(len(data))}, data)
        if self.hub.corrupt.get(name, 0) > 0:
            self.hub.corrupt[name] -= 1
            data = data[:-1] + bytes([data[-1] ^ 1])
        status, first, last = 200, 0, len(data) - 1
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            status, first = 206, int(match[1])
            last = min(int(match[2]) if match[2] else last, last)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        body = data[first : last + 1]
        fault = self.hub.faults.get(name)
        piece = match is not None and match[2] != ""
        if fault is None or fault.times <= 0 or (fault.only_ranges and not piece):
            return self._send(status, headers, body)
        fault.times -= 1
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: fault.after])
        self.wfile.flush()
        if fault.kind == "stall":
            self.hub.closing.wait(60)
        self.close_connection = True
        self.connection.shutdown(2)


def _is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".gguf"))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """A client that was ended on purpose is no news."""


@contextmanager
def serve(hub: FakeHub) -> Iterator[FakeHub]:
    """Runs the server on a free port of this machine while the block runs; `hub.url` is its address."""
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        server.shutdown()
        server.server_close()
        thread.join(5)
