"""From the times of single requests to the figures of a load: TTFT, ITL, TPOT, throughput, percentiles, goodput.

Definitions, as NVIDIA's benchmarking guide for language models and `trtllm-bench` use them:

* TTFT: from sending the request to the first piece of text. Events without text (the role, the usage, comments) do not count.
* end-to-end latency: from sending to the last piece of text.
* TPOT: (end-to-end latency - TTFT) / (output tokens - 1), one value a request; none for an answer of one token.
* ITL: the time between two pieces of text, divided by the tokens that the later one holds where the server sends several
  at once. Where tokens cannot be told apart, a piece counts as output tokens / pieces.
* throughput: tokens of all completed requests over the time from the first request sent to the last answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# A percentile is shown when at least one sample of the count is expected beyond it.
PERCENTILES = {"p50": (50.0, 2), "p90": (90.0, 10), "p95": (95.0, 20), "p99": (99.0, 100)}


@dataclass
class RequestRecord:
    """What the client saw of one request. Times are seconds on one monotonic clock.

    Attributes:
        sent: when the request went out.
        chunk_times: when each piece of text came.
        end: when the answer had ended.
        due: when it should have been sent (open loop); `sent - due` is how late the client was.
        asked_tokens: the length that was asked for.
        input_tokens, output_tokens: what the server, or else the tokenizer, counted.
        token_source: `usage` or `tokenizer`; `none` when nothing could count.
        finish_reason: the first reason the server gave; `unknown` without one.
        error: what went wrong, empty for a completed request.
    """

    sent: float
    chunk_times: list[float] = field(default_factory=list)
    end: float = math.nan
    due: float | None = None
    asked_tokens: int = 0
    input_tokens: int | None = None
    output_tokens: int | None = None
    token_source: str = "none"
    finish_reason: str = "unknown"
    error: str = ""
    status: int | None = None
    text: str = ""

    @property
    def ok(self) -> bool:
        return not self.error

    @property
    def ttft(self) -> float | None:
        """Seconds to the first text; None when there was none."""
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def e2e(self) -> float | None:
        """Seconds to the last text; None when there was none."""
        return self.chunk_times[-1] - self.sent if self.chunk_times else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None for fewer than two tokens or a single piece of text."""
        if len(self.chunk_times) < 2 or not self.output_tokens or self.output_tokens < 2:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def tokens_per_chunk(self) -> float | None:
        """Output tokens per piece of text; 1 when each token comes alone."""
        return self.output_tokens / len(self.chunk_times) if self.output_tokens and self.chunk_times else None

    @property
    def itl(self) -> list[float]:
        """Seconds per token between pieces of text."""
        per_chunk = max(1.0, self.tokens_per_chunk or 1.0)
        return [(b - a) / per_chunk for a, b in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass(frozen=True)
class Summary:
    """A list of seconds in a few figures; a percentile that the count does not support is None."""

    count: int
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Summary:
        """Summarise; None values (requests without that figure) are left out. Percentiles interpolate linearly.

        The median of a single value is that value: nothing else could be meant.
        """
        kept = np.array([value for value in values if value is not None], dtype=float)
        if not len(kept):
            return cls(0)
        shown = {name: float(np.percentile(kept, p)) for name, (p, least) in PERCENTILES.items() if len(kept) >= least}
        shown.setdefault("p50", float(np.median(kept)))
        std = float(kept.std(ddof=1)) if len(kept) > 1 else None
        return cls(len(kept), float(kept.mean()), std, float(kept.min()), float(kept.max()), **shown)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to count for goodput, in seconds; None does not matter."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0 and math.isfinite(value)):
                raise ValueError(f"slo {name} is {value!r}, expected seconds above 0")

    def kept_by(self, record: RequestRecord) -> bool:
        """Whether a completed request stayed within every limit; one without a figure that has a limit did, except TTFT."""
        if not record.ok or record.ttft is None:
            return False
        pairs = [(self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e)]
        return all(limit is None or value is None or value <= limit for limit, value in pairs)

    def __str__(self) -> str:
        parts = [
            f"{n.upper()} ≤ {getattr(self, n):g} s" for n in ("ttft", "tpot", "e2e") if getattr(self, n) is not None
        ]
        return ", ".join(parts) or "no limit"


@dataclass(frozen=True)
class Lengths:
    """Asked and real output lengths in tokens. `off` is the share by which the mean differs from what was asked."""

    asked: float
    mean: float
    min: int
    max: int

    @property
    def off(self) -> float:
        return abs(self.mean - self.asked) / self.asked if self.asked else 0.0


def lengths_of(records: Sequence[RequestRecord]) -> Lengths | None:
    """None when no completed request has a token count."""
    done = [r for r in records if r.ok and r.output_tokens is not None]
    if not done:
        return None
    counts = [int(r.output_tokens or 0) for r in done]
    return Lengths(sum(r.asked_tokens for r in done) / len(done), sum(counts) / len(counts), min(counts), max(counts))


def throughput(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """`seconds`, `requests_per_s`, `output_tokens_per_s`, `total_tokens_per_s` of the completed requests.

    The time is that from the first request sent, failed ones included, to the last completed answer; rates are None when
    nothing was completed. Tokens are the ones that were really made: neither the length asked for nor padding (P110).
    """
    done = [r for r in records if r.ok]
    names = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s")
    if not done:
        return {"seconds": 0.0, **dict.fromkeys(names)}
    seconds = max(r.end for r in done) - min(r.sent for r in records)
    made = [r.output_tokens for r in done]
    read = [r.input_tokens for r in done]
    output = None if None in made or seconds <= 0 else sum(n or 0 for n in made) / seconds
    total = None if output is None or None in read else output + sum(n or 0 for n in read) / seconds
    per_second = len(done) / seconds if seconds > 0 else None
    return {"seconds": seconds, **dict(zip(names, (per_second, output, total), strict=True))}
