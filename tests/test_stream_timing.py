"""Times of a stream: what counts as first, as between, and as nothing at all; and which slot a request held."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.stream_timing import Stream, busy_share, slot_spans, throughput


def test_P106_the_time_to_first_token_waits_for_a_token_and_not_for_an_empty_chunk() -> None:
    stream = Stream.of(10.0, [(10.9, 0), (12.2, 1), (12.5, 2), (12.5, 2)])
    assert stream.time_to_first_token == pytest.approx(2.2)
    assert stream.moments == (12.2, 12.5) and stream.tokens == 2
    silent = Stream.of(10.0, [(10.9, 0)])
    assert silent.time_to_first_token is None and silent.tokens == 0 and silent.end == 10.0


def test_P107_a_chunk_of_three_tokens_counts_as_three() -> None:
    chunks = [(0.1 * number, 3 * number) for number in range(1, 12)]  # the first, and ten more in one second
    stream = Stream.of(0.0, chunks)
    assert len(stream.inter_token_latencies) == 30
    assert stream.inter_token_latencies == pytest.approx([0.1 / 3] * 30)
    assert stream.seconds_per_token == pytest.approx(1.0 / 30)


def test_P115_one_token_has_no_time_between_tokens() -> None:
    one = Stream.of(0.0, [(0.5, 1)])
    assert one.seconds_per_token is None and one.inter_token_latencies == []
    two = Stream.of(0.0, [(0.5, 1), (0.7, 2)])
    assert two.seconds_per_token == pytest.approx(0.2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.001, 5), st.integers(1, 4)), min_size=1, max_size=40))
def test_the_first_token_and_the_time_between_add_up_to_the_whole(steps: list[tuple[float, int]]) -> None:
    moments = list(itertools.accumulate(gap for gap, _ in steps))
    counts = list(itertools.accumulate(tokens for _, tokens in steps))
    stream = Stream.of(0.0, list(zip(moments, counts, strict=True)))
    assert stream.time_to_first_token is not None
    assert stream.time_to_first_token + sum(stream.inter_token_latencies) == pytest.approx(stream.end)
    assert len(stream.inter_token_latencies) == stream.tokens - steps[0][1]


@pytest.mark.parametrize(
    ("moments", "counts", "part"),
    [
        ((1.0, 2.0), (1,), "2 moments but 1 counts"),
        ((2.0, 1.0), (1, 2), "time runs backwards, from 2.0 to 1.0"),
        ((-1.0,), (1,), "time runs backwards"),
        ((1.0, 2.0), (2, 1), "tokens runs backwards, from 2 to 1"),
    ],
)
def test_what_did_not_happen_in_this_order_is_refused(moments: tuple, counts: tuple, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        Stream(0.0, moments, counts)


def test_throughput_counts_all_tokens_over_the_whole_time() -> None:
    streams = [Stream.of(1.0, [(2.0, 1), (3.0, 2)]), Stream.of(2.0, [(5.0, 4)])]
    assert throughput(streams) == pytest.approx(6 / 4)
    with pytest.raises(ValueError, match="no rate"):
        throughput([Stream.of(0.0, [])])


def run(lengths: list[int], slots: int, static: bool, jitter: float = 0.0) -> tuple[list[Stream], dict[int, float]]:
    """Streams of a simulated engine with steps of 1 s (2 s with a new request), and when each request was admitted."""
    waiting, now = list(enumerate(lengths)), 0.0
    running: list[tuple[int, int]] = []
    moments: dict[int, list[float]] = {number: [] for number in range(len(lengths))}
    admitted: dict[int, float] = {}
    while waiting or running:
        new: list[tuple[int, int]] = []
        while waiting and len(running) + len(new) < slots and not (static and running):
            new.append(waiting.pop(0))
        admitted.update((number, now) for number, _ in new)
        now += 2.0 if new else 1.0
        running += new
        for place, (number, _) in enumerate(running):
            moments[number].append(now + jitter * place)
        running = [(number, length) for number, length in running if len(moments[number]) < length]
    return [Stream.of(0.0, [(m, i + 1) for i, m in enumerate(of)]) for of in moments.values()], admitted


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 12), min_size=1, max_size=14), st.integers(1, 5), st.booleans(), st.sampled_from([0, 0.04])
)
def test_slots_are_found_again_from_the_moments_alone(
    lengths: list[int], slots: int, static: bool, jitter: float
) -> None:
    streams, admitted = run(lengths, slots, static, jitter)
    spans = slot_spans(streams, slots)
    assert sorted(span.request for span in spans) == list(range(len(lengths)))
    for span in spans:
        assert span.start == pytest.approx(admitted[span.request], abs=0.3)
        assert (span.first, span.end) == (streams[span.request].moments[0], streams[span.request].end)
    for slot in range(slots):
        held = sorted((s for s in spans if s.slot == slot), key=lambda s: s.start)
        assert all(before.end <= after.start + 0.3 for before, after in itertools.pairwise(held))
    assert 0 < busy_share(spans, slots) <= 1


def test_static_batches_leave_slots_idle_and_in_flight_batching_fills_them() -> None:
    lengths = [40, 6, 10, 4, 8, 44, 5, 12]
    static, in_flight = (busy_share(slot_spans(run(lengths, 4, s)[0], 4), 4) for s in (True, False))
    assert static < 0.5 < in_flight


def test_there_is_nothing_to_tell_without_slots_or_time() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        slot_spans([], 0)
    with pytest.raises(ValueError, match="no share"):
        busy_share([], 3)
    assert slot_spans([Stream.of(0.0, [])], 2) == []
