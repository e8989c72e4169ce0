"""Parsing of event streams, and the formulas, by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.load_metrics import RequestRecord, Slo, Summary, lengths_of, throughput
from trtllm_workshop.load_sse import BadEvent, Event, SseParser, event_json

STREAM = (
    '\ufeffdata: {"text": "Grüße 🦙"}\n\n: a comment\n\nevent: error\ndata: one\ndata:two\n\ndata\n\nid: 7\r\ndata: x\r\n\r\n'
    "data: last\r\rdata: [DONE]\n\ndata: never ended"
).encode()
EVENTS = [
    Event('{"text": "Grüße 🦙"}'),
    Event("one\ntwo", "error"),
    Event(""),
    Event("x"),
    Event("last"),
    Event("[DONE]"),
]


def parsed(pieces: list[bytes]) -> list[Event]:
    parser = SseParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_a_stream_cut_at_any_place_gives_the_same_events() -> None:
    """P117: every cut, and one byte at a time."""
    assert parsed([STREAM]) == EVENTS
    assert parsed([bytes([byte]) for byte in STREAM]) == EVENTS
    for cut in range(len(STREAM)):
        assert parsed([STREAM[:cut], STREAM[cut:]]) == EVENTS, cut


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_a_stream_cut_at_many_places(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    assert parsed([STREAM[a:b] for a, b in itertools.pairwise(places)]) == EVENTS


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_give_events_or_bad_event(data: bytes) -> None:
    try:
        for event in SseParser().feed(data):
            event_json(event, 1)
    except BadEvent:
        pass


def test_broken_json_is_named_with_its_event() -> None:
    """P117."""
    with pytest.raises(BadEvent, match="event 3 is not JSON"):
        event_json(Event("{"), 3)
    with pytest.raises(BadEvent, match="event 4 is not a JSON object"):
        event_json(Event("[]"), 4)
    with pytest.raises(BadEvent, match="not UTF-8"):
        SseParser().feed(b"data: \xff\n\n")


def record(times: list[float], tokens: int | None, asked: int = 128, **more: object) -> RequestRecord:
    end = times[-1] if times else 9.0
    return RequestRecord(0.0, times, end, asked_tokens=asked, input_tokens=10, output_tokens=tokens, **more)  # type: ignore[arg-type]


def test_ttft_is_not_divided_by_anything() -> None:
    """P115: a batch of ten whose first token comes after one second."""
    assert Summary.of(record([1.0, 2.0], 2).ttft for _ in range(10)).mean == 1.0


def test_one_token_has_no_tpot_and_two_have_one() -> None:
    """P115."""
    assert record([1.0], 1).tpot is None and record([1.0], 1).itl == []
    assert record([1.0, 1.5], 2).tpot == 0.5
    assert record([], 0).tpot is None and record([], 0).ttft is None


def test_percentiles_appear_only_where_the_count_supports_them() -> None:
    """P115: one sample has a median and nothing beyond it."""
    one = Summary.of([3.0])
    assert (one.count, one.p50, one.mean, one.std, one.p90) == (1, 3.0, 3.0, None, None)
    assert Summary.of([]).p50 is None and Summary.of([None, 2.0]).count == 1
    assert Summary.of(range(10)).p90 is not None and Summary.of(range(10)).p95 is None  # type: ignore[arg-type]
    assert Summary.of(range(99)).p99 is None and Summary.of(range(100)).p99 is not None  # type: ignore[arg-type]
    assert math.isclose(Summary.of([0.0, 10.0]).p50 or 0, 5.0)


def test_throughput_has_no_padding_in_it() -> None:
    """P110: four rows asked for 128 tokens made 7, 128, 64 and 30."""
    rows = [record([0.5, 2.0], tokens) for tokens in (7, 128, 64, 30)]
    found = throughput(rows)
    assert found["output_tokens_per_s"] == 229 / 2.0 and found["total_tokens_per_s"] == (229 + 40) / 2.0
    lengths = lengths_of(rows)
    assert lengths is not None and (lengths.mean, lengths.min, lengths.max) == (229 / 4, 7, 128) and lengths.off > 0.5


def test_failed_requests_have_no_part_in_throughput() -> None:
    rows = [record([0.5, 2.0], 8), record([0.1], 100, error="gone")]
    assert throughput(rows)["output_tokens_per_s"] == 4.0
    assert throughput(rows[1:])["output_tokens_per_s"] is None
    assert throughput([record([0.5, 2.0], None)])["output_tokens_per_s"] is None  # not known is not zero


def test_goodput_limits() -> None:
    slow_start, fine = record([2.0, 2.1], 2), record([0.2, 0.3], 2)
    slo = Slo(ttft=1.0, tpot=0.2)
    assert slo.kept_by(fine) and not slo.kept_by(slow_start) and not slo.kept_by(record([], 0))
    assert slo.kept_by(record([0.5], 1)) and not Slo(e2e=0.25).kept_by(fine)
    assert str(slo) == "TTFT ≤ 1 s, TPOT ≤ 0.2 s"
