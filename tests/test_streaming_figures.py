"""The pictures of the streaming lesson: they draw every request, and no meaning by colour alone."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from matplotlib.patches import Rectangle
from trtllm_workshop.figures import kv_pool, streaming
from trtllm_workshop.stream_timing import Span, Stream


def stream(submitted: float, moments: list[float], cancelled: bool = False) -> Stream:
    return Stream.of(submitted, [(moment, number + 1) for number, moment in enumerate(moments)], cancelled)


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_request_has_a_row_and_a_cancelled_one_its_own_mark() -> None:
    figure = streaming.arrivals({"a": stream(5.0, [6.0, 7.0]), "b": stream(5.5, [6.0], cancelled=True)})
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [bar.get_width() for bar in axes.patches] == [1.0, 0.5]  # until the first token
    assert {line.get_marker() for line in axes.lines} == {"o", "X"}
    assert {"finished", "cancelled"} <= set(legend(figure))
    assert "cancelled" not in legend(streaming.arrivals({"a": stream(0, [1.0])}))


def test_a_request_without_a_token_is_drawn_where_it_was_made() -> None:
    axes = streaming.arrivals({"a": stream(0.0, [1.0]), "b": stream(2.0, [], cancelled=True)}).axes[0]
    assert axes.patches[1].get_x() == 2.0 and axes.patches[1].get_width() == 0


def test_busy_and_idle_time_of_a_slot_fill_the_panel() -> None:
    spans = [Span(0, 0, 10.0, 11.0, 14.0), Span(1, 1, 10.0, 11.0, 12.0), Span(2, 1, 13.0, 13.5, 14.0)]
    figure = streaming.timelines({"static": spans, "in-flight": spans}, 2)
    for axes in figure.axes:
        by_row: dict[int, float] = {}
        for patch in axes.patches:
            row = round(patch.get_y() + patch.get_height() / 2)
            by_row[row] = by_row.get(row, 0) + patch.get_width()
        assert by_row == {0: pytest.approx(4.0), 1: pytest.approx(4.0)}
        assert {text.get_text() for text in axes.texts} >= {"1", "2", "3"}
    hatches = {patch.get_hatch() for patch in figure.legends[0].get_patches()}
    assert len(hatches) == 3  # context, generation and idle differ in pattern, not in colour only


def test_a_stall_is_drawn_in_milliseconds_and_the_long_prompt_as_a_strip() -> None:
    short = {"short": stream(0.0, [0.1, 0.2, 1.5])}
    axes = streaming.gaps({"whole": (short, stream(0.3, [1.5]))}).axes[0]
    (line,) = axes.lines
    assert list(line.get_ydata()) == pytest.approx([100.0, 1300.0])
    two = streaming.gaps({"a": (short, stream(0.3, [1.5])), "b": ({"s": stream(0.0, [0.1, 9.0])}, stream(0.3, [4.0]))})
    assert all(part.get_xlim()[0] == 0 and part.get_xlim()[1] >= 9.0 for part in two.axes)
    strip = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (strip.x0, strip.x1) == (pytest.approx(0.3), pytest.approx(1.5))


def test_settings_of_first_tokens_are_told_apart_by_their_pattern() -> None:
    axes = streaming.first_tokens({"off": [900.0, 910.0], "on": [900.0, 150.0]}, {"on": 140.0}).axes[0]
    assert len({bar.get_hatch() for bar in axes.patches}) == 2
    assert axes.lines[0].get_ydata()[0] == 140.0


def test_a_recorded_throughput_names_its_source_and_draws_measured_and_limit() -> None:
    figure = streaming.recorded_throughput({"a": [(64, 30.0, 90.0), (1, 2.0, 5.0)]}, "a GPU, 2026-01-02")
    axes = figure.axes[0]
    assert "a GPU, 2026-01-02" in axes.get_xlabel()
    assert [list(line.get_ydata()) for line in axes.lines[:2]] == [[5.0, 90.0], [2.0, 30.0]]
    assert list(axes.lines[0].get_xdata()) == [1, 64]
    with pytest.raises(ValueError, match="source"):
        streaming.recorded_throughput({"a": [(1, 2.0, 3.0)]}, " ")


def test_a_record_gives_rates_and_limits_of_its_generation_steps_only() -> None:
    step = {"what": "generation step", "shape": "llama-3-8b", "precision": "bf16"}
    rows = [
        {**step, "batch": 1, "tokens_per_second": 90.0, "limit_milliseconds": 10.0},
        {**step, "batch": 64, "tokens_per_second": 3000.0, "limit_milliseconds": 16.0},
        {**step, "shape": "new", "batch": 2, "tokens_per_second": 1.0, "limit_milliseconds": 1000.0},
        {"what": "whole engine", "shape": "llama-3-8b", "precision": "bf16", "requests": 9},
    ]
    rates, source = streaming.recorded_rates({"rows": rows, "machine": {"gpu": "GPU X"}, "date": "2026-01-02"})
    assert rates == {
        "Llama 3 8B, bfloat16": [(1, 90.0, 100.0), (64, 3000.0, 4000.0)],
        "new, bfloat16": [(2, 1.0, 2.0)],
    }
    assert "GPU X" in source and "2026-01-02" in source and "random weights" in source


def test_the_grid_shows_owners_shared_blocks_and_free_ones() -> None:
    figure = kv_pool.grid({"step 1": [(0,), (0, 1), (0, 1, 2), ()], "step 2": [(), (), (), (8,)]}, columns=2)
    first, second = figure.axes[:2]
    assert [text.get_text() for text in first.texts] == ["1", "1+2", "3x"]
    assert [text.get_text() for text in second.texts] == ["9"]
    assert sum(isinstance(patch, Rectangle) for patch in first.patches) == 4


def test_requests_next_to_each_other_differ_in_colour_and_pattern() -> None:
    looks = [kv_pool.look_of(number) for number in range(64)]
    assert len(set(looks)) == 64
    for before, after in itertools.pairwise(looks):
        assert before[0] != after[0] and before[1] != after[1]


def test_expected_blocks_are_stacked_under_the_reported_ones() -> None:
    figure = kv_pool.used_blocks({0: [1, 2, 0], 1: [0, 1, 1]}, [1, 3, 1], pool=4)
    axes = figure.axes[0]
    assert list(axes.lines[0].get_ydata()) == [1, 3, 1]
    assert {text.get_text() for text in axes.texts} == {"1", "2", "the pool: 4 blocks"}
    top = max(path.vertices[:, 1].max() for area in axes.collections for path in area.get_paths())
    assert top == 3
    far = kv_pool.used_blocks({0: [1, 2, 0]}, [1, 2, 0], pool=64).axes[0]
    assert "the pool: 64 blocks, far above" in {text.get_text() for text in far.texts}
    assert far.get_ylim()[1] < 64 and len(far.lines) == 1


def test_a_pause_is_marked_where_it_happened() -> None:
    steps = [
        {"used": 2, "scheduled": 2, "queued": 0, "paused": 0},
        {"used": 3, "scheduled": 1, "queued": 1, "paused": 1},
    ]
    figure = kv_pool.pressure({"A": steps[:1] * 2, "B": steps}, pool=4)
    below = figure.axes[3]
    crosses = next(line for line in below.lines if line.get_marker() == "X")
    assert list(crosses.get_xdata()) == [2] and list(crosses.get_ydata()) == [1]
    assert "a request is paused" in legend(figure)
    many = kv_pool.pressure({"A": [{**steps[1], "paused": 3}]}, pool=4).axes[1]
    assert [text.get_text() for text in many.texts] == ["3 at once"] and not below.texts
