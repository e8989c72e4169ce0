"""How trtllm-serve starts and ends: wrong command lines, a full queue, SIGTERM under load, an engine process that is killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import Engines
from serving import call, gauges, serve
from test_server_process import gone
from trtllm_workshop.reference.serve_cli import IMPLEMENTED, SERVE, engine_options, make_parser, parse
from trtllm_workshop.server_process import Server, ServerFailed

LONG = {"prompt": "the river runs", "max_tokens": 1900, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine(max_batch_size=2, max_seq_len=2000, max_num_tokens=2048)


class Reader(threading.Thread):
    """Posts one request and reads its answer; `status`, `events` (the data of each), `text` when it does not stream."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.server, self.body = server, body
        self.status, self.events, self.begun = 0, [], threading.Event()
        self.text = ""

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.server.host, self.server.port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(self.body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        self.status = answer.status
        if self.body.get("stream"):
            for line in answer:
                if line.startswith(b"data: "):
                    self.events.append(line[6:].decode().strip())
                    self.begun.set()
        else:
            self.text = answer.read().decode()
        self.begun.set()
        connection.close()


def model_of(server: Server) -> str:
    return str(call(server, "/v1/models")[1]["data"][0]["id"])


def stream(server: Server, **more: Any) -> Reader:
    reader = Reader(server, {"model": model_of(server), **LONG, "stream": True, **more})
    reader.start()
    return reader


# Command line -----------------------------------------------------------------------------------------------------------


def test_every_flag_is_official_and_the_default_backend_is_refused_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    from trtllm_workshop.commands import command

    official = command(SERVE).flags
    assert all(name in official for name in IMPLEMENTED) and make_parser().get_default("port") == 8000
    for words in (["engine"], ["serve", "engine", "--backend", "pytorch"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert "Add --backend tensorrt" in capsys.readouterr().err
    assert parse(["serve", "engine", "--backend", "trt"]).model == "engine"
    assert parse(["engine", "--backend", "tensorrt", "--tp_size", "2"]).tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["disaggregated", "-c", "x"],
            "disaggregated is an official sub-command that the reference toolchain does not",
        ),
        (["e", "--backend", "tensorrt", "--port", "0"], "--port 0 is not from 1 to 65535"),
        (["e", "--backend", "tensorrt", "--free_gpu_memory_fraction", "90"], "90.0 is not above 0 and at most 1"),
        (["e", "--backend", "tensorrt", "--reasoning_parser", "qwen3"], "does not implement"),
        (["e", "--backend", "tensorrt", "--prot", "1"], "--port"),
    ],
)
def test_a_wrong_command_line_is_refused_by_name(words: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert message in capsys.readouterr().err


def test_the_options_file_wins_over_the_command_line(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "more.yml"
    file.write_text("max_batch_size: 1\nkv_cache_config:\n  free_gpu_memory_fraction: 0.5\n")
    words = [str(engine), "--backend", "tensorrt", "--tokenizer", "t", "--max_batch_size", "2"]
    options = engine_options(parse([*words, "--extra_llm_api_options", str(file)]))
    assert options["max_batch_size"] == 1 and options["kv_cache_config"] == {"free_gpu_memory_fraction": 0.5}
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match="holds no mapping of LLM arguments"):
        engine_options(parse([*words, "--config", str(file)]))
    with pytest.raises(ValueError, match="which has no tokenizer: add --tokenizer FOLDER"):
        engine_options(parse([str(engine), "--backend", "tensorrt"]))


def test_an_engine_that_cannot_be_loaded_ends_the_server_with_the_reason(engine: Path, tmp_path: Path) -> None:
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(engine, broken)
    (broken / "rank0.engine").write_bytes(b"nothing")
    with pytest.raises(ServerFailed, match=r"\[TRT-LLM\] \[E\](?s:.*)exit code 1"):
        serve(broken, tmp_path, tmp_path / "serve.log")


# Under load ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_full_queue_is_said_and_sigterm_finishes_what_was_accepted(
    engines: Engines, engine: Path, tmp_path: Path
) -> None:
    limits = {"TRTLLM_SERVE_MAX_QUEUE": "1", "TRTLLM_SERVE_GRACE_S": "40"}
    with serve(engine, engines.hf(), tmp_path / "serve.log", env=limits) as server:
        readers = [stream(server, max_tokens=400) for _ in range(3)]
        assert all(reader.begun.wait(20) for reader in readers[:2])
        end = time.monotonic() + 10
        while gauges(server)["trtllm_requests_waiting"] < 1 and readers[2].is_alive():
            assert time.monotonic() < end
        body = {"model": model_of(server), **LONG}
        status, answer = call(server, "/v1/completions", body)
        assert status == 429 and "the limit is 3" in answer["error"]["message"]
        pid = server.pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        while server.health_status() == 200:
            assert time.monotonic() < end + 10
        assert server.health_status() == 503
        status, answer = call(server, "/v1/completions", body)
        assert status == 503 and answer["error"]["code"] == "server_ending"
        for reader in readers:
            reader.join(60)
            assert reader.status == 200 and reader.events[-1] == "[DONE]"
            assert json.loads(reader.events[-2])["choices"][0]["finish_reason"] == "length"
        assert server.wait(20) == 0 and gone(pid)


@pytest.mark.slow
def test_requests_that_do_not_finish_in_time_are_cut_off(engines: Engines, engine: Path, tmp_path: Path) -> None:
    limits = {"TRTLLM_SERVE_GRACE_S": "0.2"}
    with serve(engine, engines.hf(), tmp_path / "serve.log", env=limits) as server:
        reader = stream(server)
        assert reader.begun.wait(20)
        children = [p.pid for p in psutil.Process(server.pid).children(recursive=True)]
        os.kill(server.pid or 0, signal.SIGTERM)
        assert server.wait(20) is not None
        reader.join(10)
        assert "before this answer was complete" in json.loads(reader.events[-1])["error"]["message"]
        assert "1 requests are cut off" in server.tail() and "Traceback" not in server.tail(100)
        assert children and all(gone(pid) for pid in children)


@pytest.mark.slow
def test_a_killed_engine_process_is_told_to_every_client_and_the_server_stays_up(
    engines: Engines, engine: Path, tmp_path: Path
) -> None:
    with serve(engine, engines.hf(), tmp_path / "serve.log") as server:
        model = model_of(server)
        streaming = [stream(server) for _ in range(2)]
        whole = Reader(server, {"model": model, **LONG})
        whole.start()
        assert all(reader.begun.wait(20) for reader in streaming)
        worker = psutil.Process(server.pid).children()[0]
        worker.kill()
        for reader in streaming:
            reader.join(15)
            error = json.loads(reader.events[-1])["error"]
            assert error["code"] == "engine_gone" and "signal SIGKILL" in error["message"]
        whole.join(15)
        assert whole.status == 503 and json.loads(whole.text)["error"]["code"] == "engine_gone"
        assert server.health_status() == 503 and server.running
        status, answer = call(server, "/v1/completions", {"model": model, **LONG})
        assert status == 503 and "restart the server" in answer["error"]["message"]
        assert call(server, "/metrics")[0] == 503 and gauges(server)["trtllm_healthy"] == 0
        assert "trtllm_requests_running" not in gauges(server)  # not known any more, and not zero
        assert server.stop() == 1


@pytest.mark.slow
def test_the_engine_process_ends_with_a_killed_http_process(engines: Engines, engine: Path, tmp_path: Path) -> None:
    with serve(engine, engines.hf(), tmp_path / "serve.log") as server:
        front = psutil.Process(server.pid)
        worker = front.children()[0].pid
        front.kill()
        assert gone(worker, 15)


def test_the_http_process_needs_no_torch() -> None:
    code = "import sys, trtllm_workshop.reference.serve_run; print('torch' in sys.modules or 'transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
