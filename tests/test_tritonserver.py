"""A real Triton Inference Server (the one in nvidia-pytriton's wheel) over a real engine, through HTTP and gRPC."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from engines import Engines
from trtllm_workshop.deploy.triton import PYTHON_MODEL, write_python_model, write_repository
from trtllm_workshop.deploy.triton_check import check_repository
from trtllm_workshop.deploy.triton_metrics import NOT_REPORTED, latency_table
from trtllm_workshop.deploy.triton_server import find_tritonserver, start_tritonserver
from trtllm_workshop.reference.sampling_params import SamplingParams
from trtllm_workshop.server_process import Server, ServerFailed
from trtllm_workshop.toolchain import reference_toolchain

pytest.importorskip("pytriton", reason="nvidia-pytriton (Linux, x86_64) holds the server")
grpc = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.slow
PROMPT = "the river runs past the old house"
LONG = 300  # tokens of an answer that is under way for a while


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine(max_batch_size=8, max_seq_len=400)


@pytest.fixture(scope="module")
def server(engines: Engines, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("triton")
    write_python_model(folder / "models", engine, engines.hf())
    with start(folder / "models", folder / "server.log") as running:
        yield running


@pytest.fixture(scope="module")
def expected(engines: Engines) -> str:
    """What the engine itself answers."""
    llm = engines.llm(max_batch_size=8, max_seq_len=400)
    return llm.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)).outputs[0].text


def start(models: Path, log: Path, **options: Any) -> Server:
    values: dict[str, Any] = {"quiet": True, "timeout_s": 90, "env": {"OMP_NUM_THREADS": "1"}, **options}
    return start_tritonserver(reference_toolchain("a test"), models, log=log, **values)


def ask(server: Server, path: str, body: Any = None, port: int | None = None) -> tuple[int, str]:
    """Status and text of one request; its connection is closed, since a server that ends waits for open ones."""
    connection = http.client.HTTPConnection(server.host, port or server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def generate(server: Server, status: int = 200, model: str = PYTHON_MODEL, **more: Any) -> Any:
    """The answer's fields, or the text of the error when another status is due."""
    body = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, **more}
    got, text = ask(server, f"/v2/models/{model}/generate", body)
    assert got == status, text
    return json.loads(text) if status == 200 else json.loads(text)["error"]


def events(server: Server, model: str = PYTHON_MODEL, **more: Any) -> list[dict[str, Any]]:
    """The events of /generate_stream."""
    body = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, "stream": True, **more}
    status, text = ask(server, f"/v2/models/{model}/generate_stream", body)
    assert status == 200, text
    return [json.loads(line[len("data: ") :]) for line in text.splitlines() if line.startswith("data: ")]


def tensors(shape: list[int], **values: Any) -> list[Any]:
    """gRPC inputs of one value each; models with a batch size want shape [1, 1]."""
    import numpy as np

    kinds = {str: ("BYTES", object), bool: ("BOOL", bool), int: ("INT32", np.int32)}
    found = []
    for name, value in values.items():
        kind, array = kinds[type(value)]
        tensor = grpc.InferInput(name, shape, kind)
        tensor.set_data_from_numpy(
            np.array([value.encode() if isinstance(value, str) else value], dtype=array).reshape(shape)
        )
        found.append(tensor)
    return found


class Stream:
    """One gRPC stream; `pieces` holds (result, error) as they come."""

    def __init__(self, server: Server):
        self.pieces: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client = grpc.InferenceServerClient(f"{server.host}:{server.ports['grpc_port']}")
        self.client.start_stream(lambda result, error: self.pieces.put((result, error)))

    def send(self, name: str = "", model: str = PYTHON_MODEL, **more: Any) -> Stream:
        values = {"text_input": PROMPT, "max_tokens": 12, "end_id": -1, "stream": True, **more}
        self.client.async_stream_infer(
            model,
            tensors([1] if model == PYTHON_MODEL else [1, 1], **values),
            request_id=name,
            enable_empty_final_response=True,
        )
        return self

    def texts(self) -> Iterator[str]:
        """Pieces of text up to the final response."""
        while True:
            result, error = self.pieces.get(timeout=30)
            if error is not None:
                raise error
            array = result.as_numpy("text_output")
            if array is not None:
                yield array.reshape(-1)[0].decode()
            if result.get_response().parameters["triton_final_response"].bool_param:
                return

    def close(self, cancel: bool = False) -> None:
        self.client.stop_stream(cancel_requests=cancel)
        self.client.close()


def metric(server: Server, name: str) -> float:
    """One of the model's own metrics in /metrics."""
    _, text = ask(server, "/metrics", port=server.ports["metrics_port"])
    line = next(line for line in text.splitlines() if line.startswith(f"trtllm_python_{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def in_work(server: Server) -> float:
    return metric(server, "requests")


def wait_for(what: Any, seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_generate_gives_the_engines_own_answer_with_exact_counts(server, expected) -> None:
    answer = generate(server)
    assert answer["text_output"] == expected and answer["finish_reason"] == "length"
    assert answer["num_output_tokens"] == 12 and answer["num_input_tokens"] > 3
    echoed = generate(server, exclude_input_in_output=False)
    assert echoed["text_output"] == PROMPT + expected and echoed["num_output_tokens"] == 12


def test_a_stream_over_http_joins_to_the_same_answer(server, expected) -> None:
    found = events(server)
    assert len(found) > 3 and "".join(event["text_output"] for event in found) == expected
    assert [event["finish_reason"] for event in found if event["finish_reason"]] == ["length"]
    counts = [event["num_output_tokens"] for event in found]
    assert counts == sorted(counts) and counts[-1] == 12
    assert "".join(event["text_output"] for event in events(server, exclude_input_in_output=False)) == PROMPT + expected


def test_a_stream_over_grpc_joins_to_the_same_answer(server, expected) -> None:
    stream = Stream(server)
    with contextlib.closing(stream):
        pieces = list(stream.send().texts())
        assert len(pieces) > 3 and "".join(pieces) == expected
        assert "".join(stream.send(stream=False).texts()) == expected


def test_sampling_and_stop_words_reach_the_engine(server, expected) -> None:
    for stop in (expected[5:7], ["never to be met", expected[5:7]], ["", expected[5:7]]):
        answer = generate(server, stop_words=stop)
        assert answer["text_output"] == expected[: expected.index(expected[5:7])] and answer["finish_reason"] == "stop"
    assert generate(server, stop_words="")["text_output"] == expected
    hot = {"temperature": 2.0, "top_k": 0, "top_p": 0.99}
    first, again, old = (
        generate(server, **hot, **seed)["text_output"] for seed in ({"seed": 7}, {"seed": 7}, {"random_seed": 7})
    )
    assert first == again == old != generate(server, **hot, seed=8)["text_output"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 1000}, ["max_tokens (1000)", "max_seq_len (400)"]),
        ({"text_input": ""}, ["empty"]),
        ({"top_p": 1.5}, ["top_p=1.5", "between 0 and 1"]),
        ({"seed": 1, "random_seed": 2}, ["seed=1", "random_seed=2"]),
        ({"stop": True}, ["id of the request"]),
        ({"temprature": 0.5}, ["'temprature'", "did you mean 'temperature'"]),
    ],
)
def test_a_wrong_request_is_told_why_and_the_next_one_is_served(server, expected, more, words) -> None:
    message = generate(server, status=400, **more)
    assert all(word in message for word in words), message
    assert generate(server)["text_output"] == expected


def test_a_client_that_goes_away_ends_its_work(server) -> None:
    stream, before = Stream(server), metric(server, "cancelled")
    for _ in range(6):
        stream.send(max_tokens=LONG)
    stream.pieces.get(timeout=30)
    assert in_work(server) > 0
    stream.close(cancel=True)
    wait_for(lambda: in_work(server) == 0)
    assert metric(server, "cancelled") == before + 6


def test_stop_ends_the_running_request_with_that_id(server) -> None:
    running, stopper = Stream(server), Stream(server)
    with contextlib.closing(running), contextlib.closing(stopper):
        running.send("mine", max_tokens=LONG)
        running.pieces.get(timeout=30)
        list(stopper.send("mine", stop=True).texts())
        with pytest.raises(Exception, match="cancelled"):
            list(running.texts())


def test_more_requests_than_may_wait_are_refused_at_once(server, expected) -> None:
    stream = Stream(server)
    try:
        for _ in range(90):  # 8 run, 64 wait
            stream.send(max_tokens=LONG)
        error = None
        while error is None:
            _, error = stream.pieces.get(timeout=30)
        assert "72 requests are in work already" in str(error) and "try again later" in str(error)
    finally:
        stream.close(cancel=True)
    wait_for(lambda: in_work(server) == 0)
    assert generate(server)["text_output"] == expected


def test_ten_clients_at_once_get_the_answer_of_one(server, expected) -> None:
    with ThreadPoolExecutor(10) as pool:
        jobs = [pool.submit(generate, server) for _ in range(10)] + [pool.submit(events, server) for _ in range(10)]
        whole, streamed = [job.result() for job in jobs[:10]], [job.result() for job in jobs[10:]]
    assert {answer["text_output"] for answer in whole} == {expected}
    assert {"".join(event["text_output"] for event in found) for found in streamed} == {expected}


def test_statistics_and_metrics_count_the_requests(server) -> None:
    def successes() -> int:
        _, text = ask(server, f"/v2/models/{PYTHON_MODEL}/stats")
        return int(json.loads(text)["model_stats"][0]["inference_stats"]["success"]["count"])

    wait_for(lambda: in_work(server) == 0)
    before, (_, page) = successes(), ask(server, "/metrics", port=server.ports["metrics_port"])
    generate(server)
    wait_for(lambda: successes() == before + 1)
    _, text = ask(server, "/metrics", port=server.ports["metrics_port"])
    rows = {row["quantity"]: row["value"] for row in latency_table(page, text, PYTHON_MODEL)}
    assert rows["requests"] == "1" and rows["whole request"].endswith(" ms")
    assert rows["KV-cache blocks in use"] == NOT_REPORTED  # a figure of the C++ backend
    assert f'nv_inference_request_success{{model="{PYTHON_MODEL}"' in text
    tokens = metric(server, "output_tokens")
    generate(server)
    wait_for(lambda: in_work(server) == 0 and metric(server, "output_tokens") == tokens + 12)


def test_only_this_machine_can_reach_it(server) -> None:
    import psutil

    assert server.pid is not None
    listening = {c.laddr for c in psutil.Process(server.pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert {address.port for address in listening} == set(server.ports.values())
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}


def test_a_model_that_cannot_load_says_why_and_leaves_nothing(engine, engines, tmp_path) -> None:
    folder = write_python_model(tmp_path / "models", engine, engines.hf())
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace(str(engine), str(tmp_path / "nothing")))
    with pytest.raises(ServerFailed, match=r"^model tensorrt_llm_python did not load: .*gpt_model_path is .*nothing"):
        start(tmp_path / "models", tmp_path / "server.log", timeout_s=60)


def test_the_server_in_the_wheel_is_found_for_this_python() -> None:
    found = find_tritonserver(reference_toolchain("a test"))
    assert found.program.is_file() and found.backends.is_dir() and found.source


def test_a_server_that_loads_for_ever_is_ended_in_time_with_all_it_started(engine, engines, tmp_path) -> None:
    import psutil

    folder = write_python_model(tmp_path / "models", engine, engines.hf())
    (folder / "1" / "model.py").write_text("import time\ntime.sleep(1000)\n")
    before = time.monotonic()
    with pytest.raises(ServerFailed, match="not healthy after 3 s"):
        start(tmp_path / "models", tmp_path / "server.log", timeout_s=3)
    assert time.monotonic() - before < 15
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]


def test_the_chain_of_five_models_answers_like_the_engine(engine, engines, tmp_path, expected) -> None:
    models = write_repository(tmp_path / "chain", engine, engines.hf(), backend="python", instances=1)
    assert check_repository(models) == []
    with start(models, tmp_path / "chain.log") as chain:
        for model in ("ensemble", "tensorrt_llm_bls"):
            assert generate(chain, model=model)["text_output"] == expected
            assert generate(chain, model=model, exclude_input_in_output=False)["text_output"].endswith(expected)
            assert "max_seq_len (400)" in generate(chain, 400, model=model, max_tokens=1000)
            stopped = generate(chain, model=model, stop_words=[expected[5:7]], max_tokens=LONG)["text_output"]
            assert expected[5:7] not in stopped[:-2] and len(stopped) < 40
            assert len(events(chain, model=model)) > 3
        # Each response of an ensemble is decoded by itself, so only the loop gives whole characters.
        assert "".join(event["text_output"] for event in events(chain, model="tensorrt_llm_bls")) == expected
        stream = Stream(chain)
        with contextlib.closing(stream):
            assert "".join(stream.send(model="tensorrt_llm_bls").texts()) == expected
        going = Stream(chain).send(model="tensorrt_llm_bls", max_tokens=LONG)
        going.pieces.get(timeout=30)
        going.close(cancel=True)
        with ThreadPoolExecutor(10) as pool:
            jobs = [pool.submit(generate, chain, 200, "tensorrt_llm_bls") for _ in range(10)]
            assert {job.result()["text_output"] for job in jobs} == {expected}


def test_a_restart_loses_no_accepted_request(server) -> None:  # the last one: the module's server ends here
    with server.replacement() as second:
        whole = generate(second, max_tokens=LONG)["text_output"]
        streams = [Stream(server).send(max_tokens=LONG) for _ in range(12)]
        wait_for(lambda: all(not stream.pieces.empty() for stream in streams))
        ending = threading.Thread(target=server.stop)
        ending.start()
        assert ["".join(stream.texts()) for stream in streams] == [whole] * 12
        for stream in streams:
            stream.close()
        ending.join(30)
        assert not server.running and generate(second)["num_output_tokens"] == 12
