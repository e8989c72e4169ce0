"""The measuring client against a server whose truth is known."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from engines import Engines
from fake_openai import Script, chunk, fake_server
from trtllm_workshop.benchmark import LoadProblem, LoadResult, Slo, async_run_load, run_load, sweep
from trtllm_workshop.load_arrivals import Arrival, poisson, read_trace
from trtllm_workshop.load_client import SERVER_FIELDS
from trtllm_workshop.load_prompts import distinct_prompts, token_counter


@pytest.fixture(scope="module")
def tokenizer(engines: Engines) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(engines.hf())


def load(url: str, tokenizer: Any, **more: Any) -> LoadResult:
    values = {"input_tokens": 12, "output_tokens": 20, "concurrency": 2, "requests": 4, "measure_overhead": False}
    return run_load(url, tokenizer=tokenizer, **{**values, **more})


def near(value: float | None, truth: float, share: float = 0.02) -> bool:
    return value is not None and abs(value - truth) <= share * truth


def test_figures_agree_with_the_truth_within_two_percent(tokenizer) -> None:
    """TTFT 0.3 s, 19 gaps of 20 ms, four in flight: every figure follows by hand."""
    script = Script(ttft_s=0.3, gap_s=0.02)
    with fake_server(script) as url:
        found = load(url, tokenizer, concurrency=4, requests=12)
    e2e = 0.3 + 19 * 0.02
    assert found.errors == 0 and found.ttft.count == 12 and not found.warnings
    assert near(found.ttft.p50, 0.3) and near(found.itl.mean, 0.02) and near(found.tpot.mean, 0.02)
    assert near(found.e2e.p50, e2e) and near(found.tokens_per_s_per_user.p50, 50)
    assert near(found.output_tokens_per_s, 4 * 20 / e2e) and near(found.requests_per_s, 4 / e2e)
    assert near(found.total_tokens_per_s, 4 * 27 / e2e)
    assert found.output_tokens.mean == 20 and found.input_tokens == 7 and found.token_source == "usage"


def test_a_role_event_is_no_first_token(tokenizer) -> None:
    """P106: the role at once, text later; usage and comments do not count either."""
    script = Script(ttft_s=0.4, gap_s=0.01, role_first_s=0.05, before=[b": keep-alive\n\n"])
    with fake_server(script) as url:
        found = load(url, tokenizer, endpoint="chat", input_tokens=30, warm_up=0, requests=2)
    assert near(found.ttft.p50, 0.4, 0.03) and found.tokens_per_chunk == 1


def test_an_answer_without_text_has_no_ttft(tokenizer) -> None:
    """P106: nothing but a usage."""
    with fake_server(Script(pieces=0)) as url:
        found = load(url, tokenizer, warm_up=0)
    assert found.errors == 0 and found.ttft.p50 is None and found.ttft.count == 0
    assert any("no answer held any text" in warning for warning in found.warnings)


def test_tokens_come_from_the_usage_and_not_from_pieces(tokenizer) -> None:
    """P107: ten pieces of three tokens, one second after the first."""
    script = Script(ttft_s=0.1, gap_s=0.05, tokens_each=3)
    with fake_server(script) as url:
        found = load(url, tokenizer, output_tokens=30, warm_up=0, requests=2)
    assert found.tokens_per_chunk == 3 and found.output_tokens.mean == 30
    assert near(found.tpot.mean, 9 * 0.05 / 29, 0.03) and near(found.itl.mean, 0.05 / 3, 0.03)


def test_without_usage_the_tokenizer_counts_and_that_is_said(tokenizer) -> None:
    """P107: the source is named."""
    with fake_server(Script(usage=False, text=" the")) as url:
        found = load(url, tokenizer, warm_up=0)
    counted = len(tokenizer.encode(" the" * 20))
    assert found.token_source == "tokenizer" and found.output_tokens.mean == counted
    assert any("not counted by the server (source: tokenizer)" in warning for warning in found.warnings)


def test_an_echoed_prompt_fails_instead_of_counting(tokenizer) -> None:
    """P109."""
    with fake_server(Script(echo=True)) as url, pytest.raises(LoadProblem, match="begins with the prompt: switch the"):
        load(url, tokenizer)


def test_throughput_counts_real_tokens_only(tokenizer) -> None:
    """P110 and P111: answers of 5 tokens where 20 were asked."""
    with fake_server(Script(pieces=5, ttft_s=0.1)) as url:
        found = load(url, tokenizer, requests=4, concurrency=4)
    assert near(found.output_tokens_per_s, 4 * 5 / found.seconds, 1e-6)
    assert any("answers have 5.0 tokens on average (5 to 5), asked were 20" in warning for warning in found.warnings)


@pytest.mark.parametrize("server", SERVER_FIELDS)
def test_the_body_asks_each_kind_of_server_for_the_full_length(tokenizer, server: str) -> None:
    """P111: the field really is in the body."""
    script = Script()
    with fake_server(script) as url:
        load(url, tokenizer, server=server, requests=1, warm_up=0, extra_body={"top_k": 1})
    body = script.seen[0]
    assert body["max_tokens"] == 20 and body["stream_options"] == {"include_usage": True} and body["top_k"] == 1
    assert body.get("ignore_eos", False) is (server in ("trtllm", "vllm", "sglang"))


def test_150_requests_are_in_flight_at_once(tokenizer) -> None:
    """P113: no limit of the client's connection pool, and its own cost is reported."""
    script = Script(ttft_s=1.0)
    with fake_server(script) as url:
        found = load(url, tokenizer, concurrency=150, requests=150, output_tokens=2, warm_up=0, measure_overhead=True)
    assert script.most_in_flight == 150 and found.errors == 0
    assert found.client_overhead_ms is not None and 0 < found.client_overhead_ms < 200
    assert found.to_json()["client_overhead_ms"] == found.client_overhead_ms


@pytest.mark.parametrize("reason", ["own", "last", "twice", "missing"])
def test_a_finish_reason_may_come_anywhere(tokenizer, reason: str) -> None:
    """P119: the text is complete in all cases, the reason is the first one, or unknown; usage after it is accepted."""
    with fake_server(Script(reason=reason)) as url:
        found = load(url, tokenizer, requests=1, warm_up=0)
    record = found.records[0]
    assert record.text == " word" * 20 and record.output_tokens == 20
    assert record.finish_reason == ("unknown" if reason == "missing" else "length")


def test_errors_are_counted_and_left_out(tokenizer) -> None:
    """P115: failed requests appear nowhere but in the count of errors."""
    script = Script(ttft_s=0.1)
    with fake_server(script) as url:
        good = load(url, tokenizer, requests=2, warm_up=1)
        script.after = [{"error": {"message": "the engine process has ended"}}]
        bad = load(url, tokenizer, requests=3, warm_up=0)
    assert good.errors == 0 and bad.errors == 3 and bad.ttft.count == 0 and bad.output_tokens_per_s is None
    assert "the engine process has ended" in next(iter(bad.error_kinds))
    assert "3 of 3 requests failed" in bad.warnings[0]
    with (
        fake_server(Script(status=503)) as url,
        pytest.raises(LoadProblem, match="no request of the warm-up was answered"),
    ):
        load(url, tokenizer)
    with fake_server(Script(before=[b"data: {broken\n\n"])) as url:
        found = load(url, tokenizer, requests=1, warm_up=0)
        assert "event 1 is not JSON" in found.records[0].error


def test_a_server_that_is_not_there_is_said_before_anything_is_sent(tokenizer) -> None:
    with pytest.raises(LoadProblem, match=r"127.0.0.1:1/v1/models does not name a model"):
        load("http://127.0.0.1:1", tokenizer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": None}, "exactly one of concurrency"),
        ({"rate": 1.0}, "exactly one of concurrency"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"output_tokens": True}, "output_tokens is True"),
        ({"requests": 0}, "requests is 0"),
        ({"concurrency": None, "rate": -1.0}, "rate is -1.0"),
        ({"seconds": 0}, "seconds is 0"),
        ({"endpoint": "chats"}, "endpoint is 'chats'"),
        ({"server": "tensorrt"}, "server is 'tensorrt', expected one of"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(tokenizer, options: dict[str, Any], message: str) -> None:
    with fake_server(Script()) as url, pytest.raises(LoadProblem, match=message):
        load(url, tokenizer, model="fake", **options)


def test_an_open_loop_sends_on_time_whatever_the_server_does(tokenizer) -> None:
    script = Script(ttft_s=0.8)
    arrivals = [Arrival(0.1 * place, output_tokens=3 + place) for place in range(6)]
    with fake_server(script) as url:
        found = load(url, tokenizer, concurrency=None, trace=arrivals, requests=None, warm_up=0)
    sent = [record.sent - found.records[0].sent for record in found.records]
    assert all(abs(at - arrival.at_s) < 0.05 for at, arrival in zip(sent, arrivals, strict=True))
    assert script.most_in_flight == 6 and [r.output_tokens for r in found.records] == [3, 4, 5, 6, 7, 8]
    assert found.late_ms is not None and found.late_ms < 50


def test_poisson_arrivals_have_their_rate_and_repeat(tmp_path: Path) -> None:
    arrivals = poisson(10.0, 2000, seed=3)
    assert arrivals == poisson(10.0, 2000, seed=3) != poisson(10.0, 2000, seed=4)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(arrivals)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert abs(mean - 0.1) < 0.01 and abs(spread / mean - 1) < 0.1  # an exponential's deviation is its mean


def test_traces_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 2000, "input_length": 5}\n\n{"timestamp": 500, "output_length": 7}\n')
    assert read_trace(file) == [Arrival(0.0, None, 7), Arrival(1.5, 5, None)]
    for line in ('{"timestamp": -1}', "[1]", '{"timestamp": "1"}', '{"timestamp": 1, "input_length": 0}', "{"):
        file.write_text(f'{{"timestamp": 0}}\n{line}\n')
        with pytest.raises(ValueError, match="line 2"):
            read_trace(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="holds no request"):
        read_trace(file)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_prompts_are_exact_and_all_different(tokenizer, endpoint: str) -> None:
    count = token_counter(tokenizer, endpoint)
    least = count("a")
    lengths = [least + 3, least + 40, 200, 3 * least, 17 + least] * 4
    prompts = distinct_prompts(tokenizer, lengths, endpoint=endpoint, seed=5)
    assert [count(prompt.text) for prompt in prompts] == lengths == [prompt.tokens for prompt in prompts]
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert len({prompt.text.split()[0] for prompt in prompts}) > 5
    with pytest.raises(ValueError, match=r"no further prompt of exactly 1 tokens"):
        distinct_prompts(tokenizer, 1, 100, endpoint="chat")


def test_goodput_counts_only_what_kept_the_limits(tokenizer) -> None:
    with fake_server(Script(ttft_s=0.2, gap_s=0.01)) as url:
        kept = load(url, tokenizer, slo=Slo(ttft=0.4, tpot=0.05))
        missed = load(url, tokenizer, slo=Slo(ttft=0.1))
        none = load(url, tokenizer)
    assert kept.goodput == kept.requests_per_s and missed.goodput == 0 and none.goodput is None
    with pytest.raises(ValueError, match="slo ttft is -1"):
        Slo(ttft=-1)


def test_it_works_inside_a_running_loop_and_twice(tokenizer) -> None:
    """P125: a notebook already runs a loop."""
    with fake_server(Script()) as url:

        async def cell() -> tuple[LoadResult, LoadResult]:
            return load(url, tokenizer), await async_run_load(
                url,
                tokenizer=tokenizer,
                concurrency=1,
                requests=1,
                input_tokens=9,
                output_tokens=3,
                measure_overhead=False,
            )

        for _ in range(2):
            first, second = asyncio.run(cell())
            assert first.errors == second.errors == 0


def test_a_sweep_uses_other_prompts_each_time(tokenizer) -> None:
    script = Script()
    options: dict[str, Any] = dict(input_tokens=12, output_tokens=4, warm_up=0, measure_overhead=False)
    with fake_server(script) as url:
        found = sweep(url, [1, 2], tokenizer=tokenizer, requests=lambda n: 3 * n, **options)
    assert [result.concurrency for result in found] == [1, 2] and [len(r.records) for r in found] == [3, 6]
    prompts = [body["prompt"] for body in script.seen]
    assert len(set(prompts)) == len(prompts) == 9


def test_files_hold_figures_machine_and_every_request(tokenizer, tmp_path: Path) -> None:
    with fake_server(Script(ttft_s=0.05)) as url:
        found = load(url, tokenizer)
    file = found.save(tmp_path, "one")
    data = json.loads(file.read_text())
    assert data["config"]["seed"] == 0 and data["machine"]["cores"] and "python" in data["versions"] and data["made"]
    assert data["ttft_s"]["p50"] == found.ttft.p50 and "p99" not in data["ttft_s"]  # four samples have no p99
    rows = (tmp_path / "one.csv").read_text().splitlines()
    assert len(rows) == 5 and rows[0].startswith("sent_s,due_s,ttft_s")
    assert "2 in flight" in str(found) and sorted(p.name for p in tmp_path.iterdir()) == ["one.csv", "one.json"]
    assert chunk(True, "a")["choices"][0]["delta"] == {"content": "a"}
