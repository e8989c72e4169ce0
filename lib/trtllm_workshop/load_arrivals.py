"""When requests are sent: a number of them in flight all the time, at random with a rate, or as a trace says."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import NamedTuple


class Arrival(NamedTuple):
    """One request of an open loop: seconds after the start, and lengths in tokens (None: as for the others)."""

    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None


def poisson(rate: float, count: int, seed: int = 0) -> list[Arrival]:
    """`count` arrivals at `rate` requests a second with exponentially distributed gaps (a Poisson process).

    Raises:
        ValueError: for a rate that is not above 0, or a count below 1.
    """
    if not (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0):
        raise ValueError(f"rate is {rate!r}, expected requests a second above 0")
    if count < 1:
        raise ValueError(f"{count} requests: at least 1 is needed")
    chance, now, found = random.Random(seed), 0.0, []
    for _ in range(count):
        now += chance.expovariate(rate)
        found.append(Arrival(now))
    first = found[0].at_s
    return [Arrival(arrival.at_s - first) for arrival in found]


def read_trace(path: str | Path) -> list[Arrival]:
    """A trace: JSON lines with `timestamp` in milliseconds, and `input_length` and `output_length` in tokens if wanted.

    These are the names of the Mooncake traces, which several load generators read. The first request is sent at once.

    Raises:
        ValueError: for a line that is none, with its number.
    """
    found = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            at_ms = row["timestamp"]
            lengths = [row.get(name) for name in ("input_length", "output_length")]
            good = (
                isinstance(at_ms, int | float) and not isinstance(at_ms, bool) and math.isfinite(at_ms) and at_ms >= 0
            )
            good = good and all(
                n is None or (isinstance(n, int) and not isinstance(n, bool) and n > 0) for n in lengths
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            good = False
        if not good:
            raise ValueError(
                f'{path}, line {number}: {line[:80]!r} is not like {{"timestamp": 1500, "input_length": 128, '
                '"output_length": 64}} (milliseconds from the start; lengths in tokens may be left out)'
            )
        found.append(Arrival(at_ms / 1e3, *lengths))
    if not found:
        raise ValueError(f"{path} holds no request")
    found.sort()
    return [arrival._replace(at_s=arrival.at_s - found[0].at_s) for arrival in found]
