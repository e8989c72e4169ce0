"""trtllm-serve through OpenAI's own client, on a real engine, and what it does with requests that are wrong."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import Engines
from serving import call, gauges, serve
from trtllm_workshop.reference.sampling_params import SamplingParams
from trtllm_workshop.server_process import Server

pytestmark = pytest.mark.slow
PROMPT = "the river runs past the old house"


@pytest.fixture(scope="module")
def engine(engines: Engines) -> Path:
    return engines.engine(max_batch_size=8, max_seq_len=128)


@pytest.fixture(scope="module")
def server(engines: Engines, engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(engine, engines.hf(), tmp_path_factory.mktemp("serve") / "serve.log") as running:
        yield running


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    return str(call(server, "/v1/models")[1]["data"][0]["id"])


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def expected(engines: Engines) -> str:
    """What the engine itself answers."""
    llm = engines.llm(max_batch_size=8, max_seq_len=128)
    return llm.generate(PROMPT, SamplingParams(max_tokens=12, ignore_eos=True)).outputs[0].text


def complete(client: openai.OpenAI, model: str, **more: Any) -> Any:
    extra = {"ignore_eos": True, **more.pop("extra_body", {})}
    values = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0.0, **more}
    return client.completions.create(model=model, extra_body=extra, **values)


def settled(server: Server) -> dict[str, float]:
    """The gauges once nothing runs any more."""
    end = time.monotonic() + 10
    while (found := gauges(server))["trtllm_requests_running"] or found["trtllm_requests_waiting"]:
        assert time.monotonic() < end, found
        time.sleep(0.05)
    return found


# The openai client ------------------------------------------------------------------------------------------------------


def test_a_completion_is_the_engines_own_answer_with_exact_usage(client, model, expected, engines) -> None:
    answer = complete(client, model)
    assert answer.choices[0].text == expected and answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.model == model
    usage = answer.usage
    assert usage.completion_tokens == 12 and usage.total_tokens == usage.prompt_tokens + 12
    from transformers import AutoTokenizer

    assert usage.prompt_tokens == len(AutoTokenizer.from_pretrained(engines.hf()).encode(PROMPT))


def test_a_stream_joins_to_the_same_answer_and_ends_with_the_usage(client, model, expected) -> None:
    events = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    assert "".join(event.choices[0].text for event in events if event.choices) == expected
    assert [e.choices[0].finish_reason for e in events if e.choices and e.choices[0].finish_reason] == ["length"]
    assert not events[-1].choices and events[-1].usage.completion_tokens == 12
    plain = list(complete(client, model, stream=True))
    assert all(event.choices for event in plain) and len(plain) > 3


def test_a_chat_begins_with_the_role_and_gives_the_same_text_streamed(client, model) -> None:
    messages = [
        {"role": "system", "content": "Answer shortly."},
        {"role": "user", "content": [{"type": "text", "text": "What is a river?"}]},
    ]
    values: dict[str, Any] = dict(model=model, messages=messages, temperature=0, extra_body={"ignore_eos": True})
    whole = client.chat.completions.create(max_completion_tokens=9, **values)
    assert whole.choices[0].message.role == "assistant" and whole.usage.completion_tokens == 9
    events = list(client.chat.completions.create(max_tokens=9, stream=True, **values))
    first = events[0].choices[0].delta
    assert first.role == "assistant" and first.content == ""
    text = "".join(event.choices[0].delta.content or "" for event in events)
    assert text == whole.choices[0].message.content and events[-1].choices[0].finish_reason == "length"


def test_a_stop_text_ends_the_answer_before_it(client, model, expected) -> None:
    stop = expected[5:8]
    answer = complete(client, model, stop=[stop, "never to be met"])
    assert answer.choices[0].text == expected[: expected.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    events = list(complete(client, model, stop=stop, stream=True))
    assert "".join(e.choices[0].text for e in events) == answer.choices[0].text


def test_a_seed_repeats_an_answer_and_without_one_answers_differ(client, model) -> None:
    hot: dict[str, Any] = {"temperature": 2.0}
    first, again = (complete(client, model, seed=7, **hot).choices[0].text for _ in range(2))
    other = complete(client, model, seed=8, **hot).choices[0].text
    assert first == again != other
    assert len({complete(client, model, **hot).choices[0].text for _ in range(3)}) == 3


def test_n_choices_of_several_prompts_keep_their_order(client, model, expected) -> None:
    answer = complete(client, model, prompt=[PROMPT, "a stone in the sun"], n=2, temperature=0)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] == expected and texts[2] == texts[3] and answer.usage.completion_tokens == 48
    drawn = complete(client, model, n=3, temperature=2.0, seed=1)
    assert len({choice.text for choice in drawn.choices}) == 3
    again = complete(client, model, n=3, temperature=2.0, seed=1, stream=True)
    streamed = ["", "", ""]
    for event in again:
        streamed[event.choices[0].index] += event.choices[0].text
    assert streamed == [choice.text for choice in drawn.choices]


def test_logprobs_name_the_chosen_token_and_the_best(client, model, expected) -> None:
    found = complete(client, model, logprobs=3, max_tokens=5).choices[0]
    logprobs = found.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 5
    for token, value, best in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert value <= 0 and best[token] == max(best.values()) == value  # greedy takes the best
    chat = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert len(content) == 3 and all(len(entry.top_logprobs) >= 2 for entry in content)
    assert bytes(content[0].bytes).decode() == content[0].token


def test_token_ids_are_a_prompt_too(client, model, expected, engines) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(engines.hf()).encode(PROMPT)
    assert complete(client, model, prompt=ids).choices[0].text == expected
    assert [c.text for c in complete(client, model, prompt=[ids, ids]).choices] == [expected] * 2


def test_without_max_tokens_the_answer_may_fill_the_sequence(client, model) -> None:
    answer = client.completions.create(model=model, prompt=PROMPT, temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == 128


def test_errors_have_openais_shape(client, model) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'gpt-9' is not served here; this is"):
        complete(client, "gpt-9")
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, model, temperature=-1)
    assert error.value.param == "temperature" and error.value.type == "invalid_request_error"
    assert "temperature is -1" in str(error.value)
    with pytest.raises(openai.BadRequestError, match=r"exceeds max(imum input length|_seq_len)"):
        complete(client, model, prompt="river " * 400)
    with pytest.raises(
        openai.BadRequestError, match="suffix is an official field that the reference toolchain does not"
    ):
        complete(client, model, suffix="end")
    with pytest.raises(openai.BadRequestError, match="no_such_field is not a field of this request"):
        complete(client, model, extra_body={"no_such_field": 1})


# Bad bodies -----------------------------------------------------------------------------------------------------------

BAD: list[tuple[bytes, str]] = [
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"[]", "a JSON array, expected an object"),
    (b"null", "a JSON null"),
    (b"\xff\xfe", "not UTF-8"),
    (b'{"model": "M", "prompt": "a", "temperature": NaN}', "NaN is not a JSON number"),
    (b'{"model": "M", "prompt": "a", "temperature": 1e999}', "temperature"),
    (b'{"model": "M", "prompt": "a", "seed": 1' + b"0" * 400 + b"}", "seed"),
    (b'{"model": "M", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "not JSON"),
    (b'{"model": "M", "prompt": "\\ud800"}', "surrogate"),
    (b'{"model": "M", "prompt": ""}', "prompt"),
    (b'{"model": "M", "prompt": []}', "prompt"),
    (b'{"model": "M", "prompt": [[]]}', "prompt"),
    (b'{"model": "M", "prompt": ["a", [1]]}', "prompt"),
    (b'{"model": "M", "prompt": [1, true]}', "prompt"),
    (b'{"model": "M", "prompt": [-1]}', "prompt"),
    (b'{"model": "M", "prompt": [99999999]}', "outside the vocabulary"),
    (b'{"model": "M", "prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
    (b'{"model": "M", "prompt": "a", "max_tokens": 1.5}', "max_tokens"),
    (b'{"model": "M", "prompt": "a", "max_tokens": true}', "max_tokens"),
    (b'{"model": "M", "prompt": "a", "max_tokens": 100000}', "exceeds max_seq_len"),
    (b'{"model": "M", "prompt": "a", "n": 1000}', "n is 1000"),
    (b'{"model": "M", "prompt": "a", "stop": [""]}', "stop"),
    (b'{"model": "M", "prompt": "a", "stream_options": {}}', "only for stream"),
    (b'{"model": "M", "prompt": "a", "min_tokens": 9, "max_tokens": 2}', "min_tokens 9 is above max_tokens 2"),
    (b'{"model": "M"}', "prompt is missing"),
    (b'{"prompt": "a"}', "model is missing"),
    (b'{"a":' * 20000 + b"1" + b"}" * 20000, "nested too deeply"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[body[:50].decode("latin-1") for body, _ in BAD])
def test_a_bad_body_gets_400_with_its_reason(server: Server, model: str, body: bytes, message: str) -> None:
    status, answer = call(server, "/v1/completions", body.replace(b'"M"', json.dumps(model).encode()))
    assert status == 400, answer
    assert message in answer["error"]["message"] and set(answer["error"]) == {"message", "type", "param", "code"}


def test_wrong_routes_methods_and_sizes(server: Server) -> None:
    assert call(server, "/v1/nothing")[0] == 404
    assert call(server, "/v1/completions", method="GET")[0] == 405
    status, answer = call(server, "/v1/completions", b"x" * (9 * 2**20))
    assert status == 413 and "8,388,608" in answer["error"]["message"]


def test_raw_sockets_cannot_disturb_it(server: Server, model: str) -> None:
    pieces = [b"nonsense\r\n\r\n", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n{", b"\x16\x03\x01\x02\x00",
              b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n"]  # fmt: skip
    for piece in pieces:
        with socket.create_connection((server.host, server.port), timeout=10) as raw:
            raw.sendall(piece)
            raw.settimeout(0.3)
            with contextlib.suppress(OSError):
                raw.recv(100)
    assert server.healthy() and settled(server)["trtllm_requests_running"] == 0


def test_schemathesis_finds_no_server_error(server: Server) -> None:
    """Requests made from the server's own OpenAPI schema, right and wrong ones."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, settings

    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    seen: list[int] = []

    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=25,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @schemathesis_case(operation)
        def check(case: Any) -> None:
            if case.body.__class__ is dict:
                case.body.pop("stream", None)
                case.body["max_tokens"] = 2
            answer = case.call(timeout=30)
            seen.append(answer.status_code)
            assert answer.status_code < 500, answer.text

        check()
    assert len(seen) > 50 and server.healthy()


def schemathesis_case(operation: Any) -> Any:
    from hypothesis import given

    return given(case=operation.as_strategy())


# Load, disconnects, limits ----------------------------------------------------------------------------------------------


def test_a_client_that_goes_away_frees_its_blocks(server: Server, model: str) -> None:
    for stream in (True, False):
        body = json.dumps({"model": model, "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True, "stream": stream})
        before = gauges(server).get("trtllm_request_cancelled_total", 0)
        raws = [socket.create_connection((server.host, server.port), timeout=10) for _ in range(4)]
        for raw in raws:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}"
            raw.sendall(head.encode())
        if stream:
            for raw in raws:
                assert b"200 OK" in raw.recv(4000)
        else:
            time.sleep(0.05)
        for raw in raws:
            raw.close()
        found = settled(server)
        assert found["trtllm_request_cancelled_total"] > before
        assert found["trtllm_requests_running"] == 0


def test_ten_clients_at_once_get_what_one_gets(client: openai.OpenAI, model: str, expected: str) -> None:
    texts: list[str] = []

    def one() -> None:
        events = complete(client, model, stream=True)
        texts.append("".join(event.choices[0].text for event in events))

    threads = [threading.Thread(target=one) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert texts == [expected] * 10


def test_iteration_statistics_and_prometheus_metrics(server: Server, client: openai.OpenAI, model: str) -> None:
    call(server, "/metrics")
    before = gauges(server)
    complete(client, model)
    status, iterations = call(server, "/metrics")
    assert status == 200 and {"iter", "numActiveRequests", "kvCacheStats"} <= set(iterations[0])
    after = gauges(server)
    assert after["trtllm_generation_tokens_total"] - before["trtllm_generation_tokens_total"] == 12
    assert after["trtllm_time_to_first_token_seconds_count"] - before["trtllm_time_to_first_token_seconds_count"] == 1
    assert after["trtllm_healthy"] == 1 and after["trtllm_kv_blocks_free"] > 0
    assert call(server, "/version")[1] == {"version": "1.2.1+reference"}
