"""Load on a server: throughput and waiting over concurrency, and how latencies are spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trtllm_workshop.figures import style as s
from trtllm_workshop.load_report import LoadResult

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")


def knee(rates: Mapping[int, float | None], share: float = 0.9) -> int:
    """The fewest requests in flight that reach `share` of the largest throughput; more of them mostly wait.

    Args:
        rates: throughput for each number of requests in flight, in any unit; None where nothing completed.

    Raises:
        ValueError: without any throughput, or for a share outside of (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"share is {share!r}, expected a number above 0 and at most 1")
    known = {count: rate for count, rate in rates.items() if rate is not None and rate > 0}
    if not known:
        raise ValueError("there is no knee without a throughput: did every request fail?")
    return min(count for count, rate in known.items() if rate >= share * max(known.values()))


def against_concurrency(loads: Sequence[LoadResult], predicted: Mapping[int, float] | None = None) -> Any:
    """Output tokens per second (left) and time to first token (right) over requests in flight, the knee marked.

    `loads` are closed loops, as `benchmark.sweep` gives them; `predicted` output tokens per second by concurrency.

    Raises:
        ValueError: for a load that is no closed loop, or when nothing completed.
    """
    open_loops = [load for load in loads if load.concurrency is None]
    if open_loops:
        raise ValueError(f"{len(open_loops)} of {len(loads)} loads have no concurrency: only closed loops can be drawn")
    done = sorted((load for load in loads if load.completed), key=lambda load: load.concurrency or 0)
    rates = {load.concurrency or 0: load.output_tokens_per_s for load in done}
    place = knee(rates)
    counts = list(rates)
    with s.canvas(13, 5.4, columns=2) as (figure, (left, right)):
        if predicted:
            ordered = sorted(predicted.items())
            left.plot(*zip(*ordered, strict=True), color=s.PREDICTED, linestyle="--", marker="s", label="predicted")
        left.plot(counts, [rates[count] or 0 for count in counts], color=s.MEASURED, marker="o", label="measured")
        left.set_ylim(bottom=0)
        left.set_ylabel("output tokens per second")
        left.set_title("Throughput")
        with_first = [load for load in done if load.ttft.p50 is not None]
        lows, middles, highs = (
            [1e3 * (getattr(load.ttft, name) or 0) for load in with_first] for name in ("min", "p50", "max")
        )
        numbers = [load.concurrency or 0 for load in with_first]
        right.fill_between(numbers, lows, highs, color=s.SKY, alpha=0.3, label="fastest to slowest")
        right.plot(numbers, middles, color=s.ORANGE, marker="^", label="median")
        right.set_ylim(bottom=0)
        right.set_ylabel("time to first token, ms")
        right.set_title("Waiting")
        for axes in (left, right):
            axes.axvline(place, color=s.INK, linestyle=":", label=f"knee: {place} in flight")
            axes.set_xscale("log", base=2)
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.minorticks_off()
            axes.set_xlabel("requests in flight")
            axes.legend(loc="best")
            s.grid(axes)
    return figure


def latency_cdf(loads: Mapping[str, LoadResult]) -> Any:
    """The share of requests that were answered within a time, a line for each load.

    Raises:
        ValueError: when no request completed in any of them.
    """
    times = {
        name: sorted(record.e2e for record in load.completed if record.e2e is not None) for name, load in loads.items()
    }
    times = {name: found for name, found in times.items() if found}
    if not times:
        raise ValueError("no request completed: there is nothing to draw")
    with s.canvas(11, 5.4) as (figure, axes):
        for number, (name, found) in enumerate(times.items()):
            shares = [100 * place / len(found) for place in range(len(found) + 1)]
            look = {"color": s.CYCLE[number % len(s.CYCLE)], "linestyle": DASHES[number % len(DASHES)]}
            axes.plot(
                [found[0], *found],
                shares,
                drawstyle="steps-post",
                marker=MARKERS[number % len(MARKERS)],
                label=name,
                **look,
            )
        axes.set_xlim(left=0)
        axes.set_ylim(0, 103)
        axes.set_xlabel("end-to-end latency, s")
        axes.set_ylabel("requests answered, %")
        axes.set_title("How latencies are spread")
        figure.legend(loc="outside right center")
        s.grid(axes, "both")
    return figure
