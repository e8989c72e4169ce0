"""Fitting the planner's constants over published runs, and judging them on GPUs that the fit has not seen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from trtllm_workshop.planner_published import Case
from trtllm_workshop.planner_speed import READ_CEILING, Constants, seconds
from trtllm_workshop.planner_throughput import schedule
from trtllm_workshop.planner_work import Work

# Fitted, with the largest value that makes sense; layer_seconds is measured and stays.
CEILINGS = {"compute": 1.0, "bandwidth": READ_CEILING, "attention": READ_CEILING, "link": 1.0}


@dataclass(frozen=True)
class Point:
    """A published run as the fit sees it: its work on one rank, the answer tokens of all requests, and what was measured."""

    gpu: str
    work: Work
    tokens: int
    measured: float

    def ratio(self, constants: Constants) -> float:
        """Predicted over published tokens per second."""
        return self.tokens / seconds(self.work, constants).total / self.measured


def points(cases: Iterable[Case]) -> list[Point]:
    """One point per case. What runs at once depends on memory only, so the work is counted once for all constants."""
    return [
        Point(
            case.engine.gpu.name,
            schedule(case.engine, case.load).work,
            case.load.requests * case.load.answer,
            case.tokens_per_second,
        )
        for case in cases
    ]


def fit(known: Sequence[Point], start: Constants | None = None) -> Constants:
    """The constants with the least mean |log(predicted / published)|, each tried up and down in ever smaller steps."""

    def loss(tried: Constants) -> float:
        return sum(abs(math.log(point.ratio(tried))) for point in known) / len(known)

    best = start or Constants(0.6, 0.8, 0.8, 0.5)
    least, size = loss(best), 0.3
    while size > 1e-4:
        before = least
        for name, ceiling in CEILINGS.items():
            for factor in (math.exp(size), math.exp(-size)):
                tried = replace(best, **{name: min(ceiling, getattr(best, name) * factor)})
                if (now := loss(tried)) < least:
                    best, least = tried, now
                    break
        if least >= before:
            size /= 2
    return best


def errors(known: Iterable[Point], constants: Constants) -> list[float]:
    """|predicted / published - 1| of every point, smallest first."""
    return sorted(abs(point.ratio(constants) - 1) for point in known)


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the sorted values do not pass (linear between neighbours)."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def held_out(known: Sequence[Point], gpus: Iterable[str]) -> tuple[Constants, list[float]]:
    """Constants fitted without these GPUs, and the errors on them."""
    names = set(gpus)
    constants = fit([point for point in known if point.gpu not in names])
    return constants, errors((point for point in known if point.gpu in names), constants)
