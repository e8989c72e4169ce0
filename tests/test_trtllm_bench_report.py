"""trtllm-bench's figures: recomputed from the records in another way, and shown under TensorRT-LLM's labels."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
from trtllm_workshop.reference.bench_dataset import InferenceRequest
from trtllm_workshop.reference.bench_records import RequestRecord, percentiles
from trtllm_workshop.reference.bench_report import (
    RunSettings,
    dataset_section,
    dataset_text,
    report_text,
    statistics,
)
from trtllm_workshop.reference.bench_run import run_load

SECOND = 10**9
PRETRAINED = {"dtype": "bfloat16", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
BUILD = {"max_input_len": 100, "max_seq_len": 120}


def settings(streaming=True):
    return RunSettings(
        "org/model", None, "/engines/x", PRETRAINED, BUILD, 8, 512, "GUARANTEED_NO_EVICT", 0.9, streaming
    )


def record(number, start, first, end, tokens, prompt=10):
    return RequestRecord(number, prompt, start, list(range(tokens)), first, end)


REQUESTS = [InferenceRequest(0, [5] * 10, 5), InferenceRequest(1, [5] * 30, 1)]
# Two requests by hand: 5 tokens in 4 s after 1 s of waiting for the first, and one single token after 2 s.
RECORDS = [record(0, 0, SECOND, 5 * SECOND, 5), record(1, SECOND, 3 * SECOND, 3 * SECOND, 1, prompt=30)]


def test_figures_of_two_requests_by_hand():
    report = statistics(RECORDS, settings(), dataset_section(REQUESTS, "d.json"))
    figures, streaming = report["performance"], report["streaming_metrics"]
    assert figures["total_latency_ms"] == pytest.approx(5000)
    assert figures["avg_request_latency_ms"] == pytest.approx((5000 + 2000) / 2)
    assert figures["request_throughput_req_s"] == pytest.approx(2 / 5)
    assert figures["system_output_throughput_tok_s"] == pytest.approx(6 / 5)
    assert figures["system_total_throughput_tok_s"] == pytest.approx((6 + 40) / 5)
    assert figures["output_throughput_per_user_tok_s"] == pytest.approx((5 / 5 + 1 / 2) / 2)
    assert streaming["avg_ttft_ms"] == pytest.approx((1000 + 2000) / 2)
    assert streaming["avg_tpot_ms"] == pytest.approx((4000 / 4 + 0) / 2), "one token has no time per output token"
    assert streaming["token_output_speed_tok_s"] == pytest.approx((4 / 4 + 0) / 2)
    assert report["request_info"] == {
        "num_requests": 2,
        "avg_num_concurrent_requests": pytest.approx(7 / 5),
        "avg_input_length": 20,
        "avg_output_length": 3,
    }
    assert report["world_info"]["issue_rate"] == pytest.approx(1.0), "one more request a second after the first"
    assert report["engine"]["quantization"] == "FP8" and report["engine"]["kv_cache_dtype"] is None
    json.dumps(report, allow_nan=False)


def test_without_streaming_there_are_no_streaming_figures():
    report = statistics(RECORDS, settings(streaming=False), dataset_section(REQUESTS, "d.json"))
    assert "streaming_metrics" not in report and "[TTFT]" not in report_text(report)
    assert "Total Output Throughput (tokens/sec):" in report_text(report)


def test_nothing_is_said_about_a_gpu_without_one():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    report = statistics(RECORDS, settings(), dataset_section(REQUESTS, "d.json"))
    assert report["machine"] is None and report["performance"]["output_throughput_per_gpu_tok_s"] is None
    text = report_text(report)
    assert "No GPU info available" in text and "Per GPU Output Throughput (tps/gpu):              n/a" in text


def test_the_text_shows_the_figures_of_the_dictionary():
    report = statistics(RECORDS, settings(), dataset_section(REQUESTS, "d.json"))
    lines = report_text(report).splitlines()
    shown = dict(line.rsplit(": ", 1) for line in lines if ": " in line)
    values = {label.strip(" :"): value.strip() for label, value in shown.items()}
    assert values["Request Throughput (req/sec)"] == "0.4000"
    assert values["Average time-to-first-token [TTFT] (ms)"] == "1500.0000"
    assert values["[TTFT] MAXIMUM"] == "2000.0000" and values["[Latency] P50"] == "5000.0000"
    assert values["Max Runtime Tokens"] == "512" and values["KV Memory Percentage"] == "90.00%"


def test_lengths_of_the_data_set():
    section = dataset_section(REQUESTS, "d.json")
    assert (section["max_isl"], section["max_osl"], section["max_sequence_length"]) == (30, 5, 31)
    assert (section["avg_isl"], section["avg_osl"], section["avg_sequence_length"]) == (20, 3, 23)
    assert section["isl_stats"]["minimum"] == 10 and section["num_requests"] == 2
    table = dataset_text(section).splitlines()
    assert next(line for line in table if line.startswith("MAX:")).split()[1:] == ["30.0000", "5.0000", "31.0000"]


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=200))
def test_percentiles_are_values_that_occurred(values):
    found = percentiles(values)
    for name, share in (("p50", 50), ("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[name] in values
        # As many values lie below it as the share says, counted without sorting.
        below = sum(value < found[name] for value in values)
        not_above = sum(value <= found[name] for value in values)
        assert below <= len(values) * share // 100 < not_above
    assert found["minimum"] == min(values) and found["maximum"] == max(values)
    assert math.isclose(found["average"], sum(values) / len(values), rel_tol=1e-9)
    with pytest.raises(ValueError, match="at least one request"):
        percentiles([])


# The load -------------------------------------------------------------------------------------------------------------


class Counting:
    """An executor whose steps take a second of a clock of their own and give each running request one token."""

    def __init__(self, batch: int, fail_at: int = 0) -> None:
        self.batch, self.fail_at = batch, fail_at
        self.now = self.most = 0
        self.waiting, self.aborted = [], []
        self.left_over = False  # as a device that was given its next step early

    def submit(self, request):
        self.waiting.append(request)

    def abort(self, requests):
        self.aborted += [r.request_id for r in requests]

    @property
    def busy(self):
        return bool(self.waiting or self.left_over)

    def step(self):
        if not self.waiting:
            self.left_over = False
            return []
        self.left_over = True
        self.now += SECOND
        if self.fail_at and self.now >= self.fail_at * SECOND:
            raise KeyboardInterrupt
        self.most = max(self.most, len(self.waiting))
        active = self.waiting[: self.batch]
        for request in active:
            request.accept(7)
        self.waiting = [r for r in self.waiting if not r.finished]
        return active


def load(executor, lengths, concurrency=-1, **more):
    wanted = [InferenceRequest(n, [1, 2, 3], length) for n, length in enumerate(lengths)]
    return run_load(executor, wanted, concurrency, clock=lambda: executor.now, **more)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    concurrency=st.integers(-1, 5),
    batch=st.integers(1, 4),
)
def test_every_request_ends_with_its_tokens_and_times(lengths, concurrency, batch):
    executor = Counting(batch)
    records = load(executor, lengths, concurrency)
    assert [len(r.tokens) for r in records] == lengths and [r.id for r in records] == list(range(len(lengths)))
    assert executor.most <= (concurrency if concurrency > 0 else len(lengths)) and not executor.aborted
    assert not executor.busy
    for r in records:
        assert 0 <= r.start_timestamp < r.first_token_timestamp <= r.end_timestamp <= executor.now
        assert r.generation_time == (len(r.tokens) - 1) * SECOND, "first come, first served: nothing comes between"


def test_one_after_the_other_and_all_at_once():
    alone = load(Counting(8), [3, 2, 4], concurrency=1)
    assert [r.start_timestamp // SECOND for r in alone] == [0, 3, 5]
    assert [r.end_timestamp // SECOND for r in alone] == [3, 5, 9]
    together = load(Counting(8), [3, 2, 4])
    assert {r.start_timestamp for r in together} == {0} and max(r.end_timestamp for r in together) == 4 * SECOND


def test_an_end_token_ends_an_answer_early():
    assert [len(r.tokens) for r in load(Counting(8), [3, 5], end_id=7)] == [1, 1]
    assert [len(r.tokens) for r in load(Counting(8), [3, 5], end_id=8)] == [3, 5]


def test_a_run_that_is_stopped_takes_its_requests_out():
    executor = Counting(8, fail_at=3)
    with pytest.raises(KeyboardInterrupt):
        load(executor, [1, 5, 5, 5], concurrency=3)
    assert sorted(executor.aborted) == [1, 2, 3], "those that were running; the first had ended"
