"""A running trtllm-serve of the reference toolchain over a tiny engine, for the tests of serving."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from trtllm_workshop.server_process import Server, start_server
from trtllm_workshop.toolchain import reference_toolchain

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def serve(engine: Path, tokenizer: Path, log: Path, flags: str = "", **options: Any) -> Server:
    """Start trtllm-serve quietly; one thread, since tiny models only lose time to more."""
    template = log.with_suffix(".jinja")
    template.write_text(CHAT_TEMPLATE)
    command = (
        f"trtllm-serve '{engine}' --backend tensorrt --tokenizer '{tokenizer}' --port {{port}} "
        f"--chat_template '{template}' {flags}"
    )
    values = {"log": log, "quiet": True, "timeout_s": 90, **options}
    values["env"] = {"OMP_NUM_THREADS": "1", **values.get("env", {})}
    return start_server(reference_toolchain("a test"), command, **values)


def call(
    server: Server, path: str, body: Any = None, method: str | None = None, timeout: float = 30
) -> tuple[int, Any]:
    """Status and JSON (or text) of one request; `body` may be bytes."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=timeout)
    try:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(
            method or ("GET" if body is None else "POST"), path, data, {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        text = answer.read().decode()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text
    finally:
        connection.close()


def gauges(server: Server) -> dict[str, float]:
    """The gauges and counters of /prometheus/metrics, by name without labels (labels are summed)."""
    status, text = call(server, "/prometheus/metrics")
    assert status == 200
    found: dict[str, float] = {}
    for line in str(text).splitlines():
        if line and not line.startswith("#"):
            name, _, value = (
                line.partition(" ") if "{" not in line else (line.split("{")[0], "", line.rsplit(" ", 1)[1])
            )
            found[name] = found.get(name, 0.0) + float(value)
    return found
