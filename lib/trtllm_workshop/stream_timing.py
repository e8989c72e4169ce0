"""What a stream felt like to its reader: time to first token, time between tokens, tokens per second. No torch here.

All times are seconds on one clock of the side that waits. A chunk is not a token: an engine or a network may deliver
several tokens at once, so every moment carries the number of tokens that had come by then.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stream:
    """One streamed answer.

    Args:
        submitted: when the request was made.
        moments: when something new came, in order.
        counts: tokens of the answer so far, at each of these moments.
        cancelled: the reader gave up before the end.

    Raises:
        ValueError: when the lists do not belong together, or time or the count of tokens runs backwards.
    """

    submitted: float
    moments: tuple[float, ...]
    counts: tuple[int, ...]
    cancelled: bool = False

    def __post_init__(self) -> None:
        if len(self.moments) != len(self.counts):
            raise ValueError(f"{len(self.moments)} moments but {len(self.counts)} counts; give one count a moment")
        for what, values in (("time", (self.submitted, *self.moments)), ("the count of tokens", (0, *self.counts))):
            for before, after in itertools.pairwise(values):
                if after < before:
                    raise ValueError(f"{what} runs backwards, from {before} to {after}; give what came in its order")

    @classmethod
    def of(cls, submitted: float, chunks: Sequence[Sequence[float]], cancelled: bool = False) -> Stream:
        """From pairs (moment, tokens so far). A chunk that brought no token, such as a last empty one, is left out."""
        kept: list[tuple[float, int]] = []
        for moment, count in chunks:
            if count > (kept[-1][1] if kept else 0):
                kept.append((float(moment), int(count)))
        return cls(float(submitted), tuple(m for m, _ in kept), tuple(c for _, c in kept), cancelled)

    @property
    def tokens(self) -> int:
        return self.counts[-1] if self.counts else 0

    @property
    def end(self) -> float:
        """When the last token came; when the request was made, if none did."""
        return self.moments[-1] if self.moments else self.submitted

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the request to its first token; None when none came."""
        return self.moments[0] - self.submitted if self.moments else None

    @property
    def inter_token_latencies(self) -> list[float]:
        """Seconds between tokens, one value a token after the first chunk; tokens of one chunk share its gap evenly."""
        pairs = itertools.pairwise(zip(self.moments, self.counts, strict=True))
        return [(b - a) / (m - n) for (a, n), (b, m) in pairs for _ in range(m - n)]

    @property
    def seconds_per_token(self) -> float | None:
        """Mean seconds of a token after the first chunk; None when there was none, which is not the same as 0."""
        gaps = self.inter_token_latencies
        return sum(gaps) / len(gaps) if gaps else None


def throughput(streams: Sequence[Stream]) -> float:
    """Tokens per second of all streams together, from the first request to the last token.

    Raises:
        ValueError: when no token came, or no time passed.
    """
    tokens = sum(stream.tokens for stream in streams)
    seconds = max(s.end for s in streams) - min(s.submitted for s in streams) if tokens else 0.0
    if seconds <= 0:
        raise ValueError(f"{tokens} tokens in {seconds} seconds of {len(streams)} streams: there is no rate to tell")
    return tokens / seconds


@dataclass(frozen=True)
class Span:
    """When a request held a sequence slot: its context phase from `start` to `first`, its generation phase to `end`."""

    request: int
    slot: int
    start: float
    first: float
    end: float


def slot_spans(streams: Sequence[Stream], slots: int) -> list[Span]:
    """Which request held which of the `slots` when, from the moments alone; requests are numbered from 0.

    A request's context phase began when the step before the one with its first token ended: at the last token that any
    request got in an earlier step, or when it was submitted. Tokens that come within a fraction of a usual step belong to
    the same step. Streams without a token held no slot that anybody saw, and are left out.

    Raises:
        ValueError: when there is no slot.
    """
    if slots < 1:
        raise ValueError(f"{slots} slots: give at least 1")
    seen = [(number, stream) for number, stream in enumerate(streams) if stream.moments]
    gaps = [gap for _, stream in seen for gap in stream.inter_token_latencies]
    same_step = 0.3 * statistics.median(gaps) if gaps else 0.0
    moments = sorted(moment for _, stream in seen for moment in stream.moments)
    starts = {}
    for number, stream in seen:
        earlier = [moment for moment in moments if moment < stream.moments[0] - same_step]
        starts[number] = max([stream.submitted, *earlier[-1:]])
    found: list[Span] = []
    free = [float("-inf")] * slots
    for number, start in sorted(starts.items(), key=lambda pair: (pair[1], pair[0])):
        stream = streams[number]
        open_slots = [slot for slot in range(slots) if free[slot] <= start + same_step]
        slot = open_slots[0] if open_slots else min(range(slots), key=lambda s: free[s])
        free[slot] = stream.end
        found.append(Span(number, slot, start, stream.moments[0], stream.end))
    return found


def busy_share(spans: Sequence[Span], slots: int) -> float:
    """The share of all slots' time, from the first start to the last end, in which a request held them (0 to 1)."""
    whole = slots * (max(span.end for span in spans) - min(span.start for span in spans)) if spans else 0.0
    if whole <= 0:
        raise ValueError(f"{len(spans)} spans without any time between them: there is no share to tell")
    return min(1.0, sum(span.end - span.start for span in spans) / whole)
