"""Pictures of loads, and where the knee is."""

from __future__ import annotations

import pytest
from trtllm_workshop.figures import serving
from trtllm_workshop.load_metrics import RequestRecord
from trtllm_workshop.load_report import LoadResult


def load(concurrency: int | None, seconds: float, count: int = 4, failed: bool = False) -> LoadResult:
    records = [
        RequestRecord(
            sent=0.1 * n,
            chunk_times=[] if failed else [0.1 * n + seconds / 2, 0.1 * n + seconds],
            end=0.1 * n + seconds,
            output_tokens=None if failed else 2,
            error="refused" if failed else "",
        )
        for n in range(count)
    ]
    return LoadResult({"concurrency": concurrency, "rate": None}, records)


def test_the_knee_is_the_fewest_requests_that_reach_nearly_the_largest_throughput() -> None:
    assert serving.knee({1: 10.0, 2: 19.0, 4: 36.0, 8: 40.0, 16: 39.0}) == 4
    assert serving.knee({1: 10.0, 2: 19.0, 4: 35.9, 8: 40.0}) == 8
    assert serving.knee({8: 40.0, 1: None, 2: 0.0}) == 8
    assert serving.knee({1: 5.0, 2: 10.0, 4: 10.0}, share=1) == 2


@pytest.mark.parametrize(
    ("rates", "share", "said"), [({}, 0.9, "every request"), ({1: None}, 0.9, "every"), ({1: 1.0}, 1.5, "1.5")]
)
def test_there_is_no_knee_without_throughput(rates: dict[int, float | None], share: float, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        serving.knee(rates, share)


def test_both_panels_show_what_was_measured() -> None:
    loads = [load(1, 0.5), load(2, 0.6), load(4, 2.0)]
    figure = serving.against_concurrency(loads, predicted={1: 3.0, 2: 5.0, 4: 5.0})
    left, right = figure.axes
    measured = next(line for line in left.get_lines() if line.get_label() == "measured")
    assert list(measured.get_xdata()) == [1, 2, 4]
    assert list(measured.get_ydata()) == pytest.approx([one.output_tokens_per_s for one in loads])
    median = next(line for line in right.get_lines() if line.get_label() == "median")
    assert list(median.get_ydata()) == pytest.approx([250, 300, 1000])
    assert all(axes.get_xlabel() == "requests in flight" for axes in figure.axes)


def test_an_open_loop_has_no_place_on_the_axis() -> None:
    with pytest.raises(ValueError, match="1 of 2 loads have no concurrency"):
        serving.against_concurrency([load(1, 0.5), load(None, 0.5)])


def test_a_latency_line_ends_at_the_slowest_request() -> None:
    figure = serving.latency_cdf({"one": load(1, 0.5), "failed": load(2, 1.0, failed=True)})
    (line,) = figure.axes[0].get_lines()
    assert line.get_xdata()[-1] == pytest.approx(0.5) and line.get_ydata()[-1] == 100
    with pytest.raises(ValueError, match="no request completed"):
        serving.latency_cdf({"failed": load(2, 1.0, failed=True)})
