"""Starting and ending servers: health, ports, logs, whole groups, and a notebook that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
from trtllm_workshop.ports import free_port, port_problem
from trtllm_workshop.server_process import Server, ServerFailed, start_server
from trtllm_workshop.shell import CommandRefused
from trtllm_workshop.toolchain import reference_toolchain

LIB = Path(__file__).resolve().parents[1] / "lib"
SERVER = """
import http.server, os, signal, subprocess, sys, threading, time
port, behaviour = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
if behaviour == "dies":
    print("[TRT-LLM] [E] Tokenizer is not found", flush=True); sys.exit(3)
if behaviour == "child":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        ok = self.path == "/health" and behaviour != "never"
        if self.path == "/slow":
            ok = True; time.sleep(1.5)
        self.send_response(200 if ok else 503); self.end_headers(); self.wfile.write(b"done")
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
server.daemon_threads = False
if behaviour != "stubborn":
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
print("listening", flush=True)
server.serve_forever(); server.server_close()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "tiny server.py"
    file.write_text(SERVER)
    return file


def started(script: Path, behaviour: str = "", **options) -> Server:
    command = f"{sys.executable} '{script}' {{port}} {behaviour}"
    values = {"log": script.with_name("server.log"), "quiet": True, "timeout_s": 20, **options}
    return start_server(reference_toolchain("a test"), command, **values)


def gone(pid: int, limit_s: float = 10) -> bool:
    end = time.monotonic() + limit_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def test_a_server_is_healthy_when_start_returns_and_gone_after_the_block(script: Path, capfd) -> None:
    with started(script, quiet=False) as server:
        assert server.running and server.healthy() and 0 < server.ready_s < 20
        assert urllib.request.urlopen(server.url + "/health", timeout=5).status == 200
        pid, port = server.pid, server.port
        assert pid is not None and (server.memory_mb or 0) > 1
        assert "listening" in server.tail()
    assert gone(pid) and not server.running and server.health_status() is None
    assert port_problem(port) is None
    shown = capfd.readouterr().out
    assert "listening" in shown and f"healthy after {server.ready_s:.1f} s" in shown
    assert server.memory_after is not None and "main memory" in shown


def test_what_a_server_started_ends_with_it(script: Path) -> None:
    with started(script, "child") as server:
        child = int(server.tail().split("child")[1].split()[0])
        assert psutil.pid_exists(child)
    assert gone(child)


def test_a_server_that_ignores_the_request_to_end_is_killed(script: Path) -> None:
    server = started(script, "stubborn")
    pid = server.pid
    assert pid is not None and server.stop(grace_s=0.5) is not None
    assert gone(pid) and server.stop() is not None


def test_one_that_dies_at_start_is_reported_with_its_last_lines(script: Path) -> None:
    with pytest.raises(ServerFailed, match=r"Tokenizer is not found(?s:.*)exit code 3") as error:
        started(script, "dies")
    assert error.value.result is not None and error.value.result.returncode == 3


def test_one_that_never_becomes_healthy_is_ended_at_the_limit(script: Path) -> None:
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    with pytest.raises(ServerFailed, match=r"not healthy after 1 s \(/health at http://127"):
        started(script, "never", timeout_s=1)
    left = {p.pid for p in psutil.Process().children(recursive=True)} - before
    assert all(gone(pid) for pid in left)


def test_a_port_in_use_is_named_with_the_process_that_holds_it(script: Path) -> None:
    with (
        started(script) as first,
        pytest.raises(CommandRefused, match=rf"port {first.port} on 127.0.0.1 is in use by .*process {first.pid}"),
    ):
        started(script, port=first.port, log=script.with_name("second.log"))


def test_an_accepted_request_is_answered_when_the_server_is_replaced(script: Path) -> None:
    import threading

    answers: list[bytes] = []
    with started(script) as old:
        url = old.url
        request = threading.Thread(
            target=lambda: answers.append(urllib.request.urlopen(url + "/slow", timeout=10).read())
        )
        request.start()
        time.sleep(0.3)
        new = old.replacement()
        try:
            assert new.port != old.port and new.healthy() and old.healthy()
            old.stop()
            request.join(10)
            assert answers == [b"done"] and new.healthy()
        finally:
            new.stop()


def test_a_restart_keeps_the_port(script: Path) -> None:
    with started(script) as server:
        port, pid = server.port, server.pid
        assert server.restart().healthy() and server.port == port and server.pid != pid


def test_a_server_ends_when_the_program_that_started_it_is_killed(script: Path, tmp_path: Path) -> None:
    program = tmp_path / "notebook.py"
    program.write_text(
        "import sys, time\nfrom pathlib import Path\nfrom test_server_process import started\n"
        f"server = started(Path({str(script)!r}), 'child')\n"
        "print(server.pid, server.tail().split('child')[1].split()[0], flush=True)\ntime.sleep(600)\n"
    )
    path = os.pathsep.join([str(LIB), str(Path(__file__).parent)])
    kernel = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    try:
        assert kernel.stdout is not None
        pids = [int(word) for word in kernel.stdout.readline().split()]
        assert len(pids) == 2
    finally:
        kernel.send_signal(signal.SIGKILL)
        kernel.communicate()
    assert all(gone(pid) for pid in pids)


def test_a_command_without_a_port_and_a_bad_port_are_refused(script: Path) -> None:
    toolchain = reference_toolchain("a test")
    with pytest.raises(CommandRefused, match=r"write \{port\} where its number goes"):
        start_server(toolchain, f"{sys.executable} x.py", log=script.with_name("a.log"))
    with pytest.raises(CommandRefused, match="70000 is not a whole number from 1 to 65535"):
        start_server(toolchain, f"{sys.executable} x.py", log=script.with_name("a.log"), port=70000)


def test_further_ports_of_a_command_are_free_ones(script: Path) -> None:
    command = f"{sys.executable} '{script}' {{port}} plain {{grpc_port}} {{metrics_port}}"
    with start_server(reference_toolchain("t"), command, log=script.with_name("p.log"), quiet=True) as server:
        assert len(set(server.ports.values())) == 3 and set(server.ports) == {"port", "grpc_port", "metrics_port"}
        assert f"plain {server.ports['grpc_port']} {server.ports['metrics_port']}" in server.command


def test_a_free_port_can_be_listened_on() -> None:
    assert port_problem(free_port()) is None
