"""The pictures: colours that can be told apart and read, and the facts that they draw."""

from __future__ import annotations

import itertools

import matplotlib
import pytest
from trtllm_workshop.figures import checkpoint, engine, quantize, style


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("colour", [*style.CYCLE, style.PALE])
def test_text_on_every_colour_has_the_contrast_of_wcag(colour: str) -> None:
    pair = sorted((luminance(colour), luminance(style.text_on(colour))))
    assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


def test_neighbouring_colours_differ_in_more_than_hue() -> None:
    first_four = [luminance(colour) for colour in style.CYCLE[:3]]
    assert all(abs(a - b) > 0.04 for a, b in itertools.combinations(first_four, 2))


def test_the_style_leaves_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    with style.canvas() as (_, axes):
        assert matplotlib.rcParams["axes.labelsize"] == style.NORMAL
        axes.plot([1, 2])
    assert dict(matplotlib.rcParams) == before


def test_P42_ranks_get_their_share_of_q_k_and_v() -> None:
    owners = checkpoint.rank_rows(8, 2, 2)
    assert owners is not None
    rows = [sum(rank == 0 and part == letter for part, _, rank in owners) * 4 for letter in "QKV"]
    assert rows == [16, 4, 4]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "fits"),
    [(9, 3, 2, False), (9, 3, 3, True), (32, 4, 2, True), (32, 4, 8, True), (12, 2, 3, False)],
)
def test_P28_heads_that_cannot_be_shared_are_said_to_be(heads: int, kv_heads: int, tp: int, fits: bool) -> None:
    assert (checkpoint.rank_rows(heads, kv_heads, tp) is not None) == fits
    title = checkpoint.tp_split(heads, kv_heads, tp).axes[0].get_title(loc="left")
    assert ("not possible" in title) != fits


def test_a_prompt_without_room_is_marked_in_the_length_picture() -> None:
    axes = engine.length_budget(100, [10, 99, 100], longest_prompt=99).axes[0]
    words = [text.get_text() for text in axes.texts]
    assert words == ["90 left", "1 left", "refused: the prompt is too long"]


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (23040, "23 kB"), (188743680, "189 MB"), (386547056640, "387 GB"), (2e15, "2,000 TB")],
)
def test_bytes_are_written_with_three_digits(count: float, text: str) -> None:
    assert engine.readable_bytes(count) == text


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (64, 8)])
def test_the_fused_matrix_is_drawn_for_all_kinds_of_attention(heads: int, kv_heads: int) -> None:
    left, right = checkpoint.fused_qkv(heads, kv_heads, 64, heads * 64).axes
    assert left.get_yticks()[-1] == (heads + 2 * kv_heads) * 64
    assert ("own K and V" in right.get_title(loc="left")) == (heads == kv_heads)


def test_number_lines_count_what_lies_in_the_lowest_part() -> None:
    axes = quantize.number_lines({"A": [0, 1, 2, 4, 64], "B": list(range(65))}, zoom=32).axes
    assert [place.get_title(loc="left") for place in axes] == [
        "A, whole range: 5 numbers",
        "A, lowest 1/32: 3 numbers",  # 0, 1 and 2 of 64
        "B, whole range: 65 numbers",
        "B, lowest 1/32: 3 numbers",
    ]


def test_P74_the_marks_of_E4M3_are_those_of_the_format() -> None:
    import ml_dtypes
    import numpy as np

    def stored(value: float) -> float:
        return float(np.float32(value).astype(ml_dtypes.float8_e4m3fn))

    assert stored(quantize.E4M3_LARGEST) == quantize.E4M3_LARGEST == float(ml_dtypes.finfo("float8_e4m3fn").max)
    assert float(ml_dtypes.finfo("float8_e4m3fn").smallest_normal) == quantize.E4M3_NORMAL
    assert stored(quantize.E4M3_ZERO) == 0 < stored(quantize.E4M3_ZERO * 1.01)


def test_P74_the_marks_move_with_the_scale() -> None:
    lines = {scale: quantize.stored_values({"keys": {0: 1, 5: 3}}, scale).axes[0].lines for scale in (1.0, 4.0)}
    first, second = ([line.get_xdata()[0] for line in found] for found in lines.values())
    assert [round(b - a, 9) for a, b in zip(first, second, strict=True)] == [2.0, 2.0, 2.0]  # 4 = 2^2


def test_changed_tokens_are_counted_and_grouped_by_margin() -> None:
    margin = [0.1, 0.2, 3.0, 4.0]
    left, right = quantize.margin_noise(margin, [0.5] * 4, [False, True, True, True], bins=2).axes
    assert [bar.get_height() for bar in right.patches] == [50.0, 0.0]
    assert [text.get_text() for text in left.figure.legends[0].get_texts()][:2] == [
        "same best token (3)",
        "another best token (1)",
    ]


def test_a_picture_of_margins_can_do_without_changes_and_with_ties() -> None:
    left, right = quantize.margin_noise([0.0, 1.0], [0.0, 0.0], [True, True]).axes
    assert sum(bar.get_height() for bar in right.patches) == 0 and len(left.collections) == 1


def test_the_interval_picture_takes_a_logarithm_only_of_numbers_above_zero() -> None:
    rows = [(0.1, 0.2, 0.3), (0.001, 0.002, 0.003)]
    above = quantize.quality_intervals(["a", "b"], {"KL": rows}, logarithmic=["KL"]).axes[0]
    touching = quantize.quality_intervals(["a", "b"], {"KL": [*rows[:1], (0.0, 0.0, 0.0)]}, logarithmic=["KL"]).axes[0]
    assert (above.get_xscale(), touching.get_xscale()) == ("log", "linear")


def test_a_recorded_measurement_names_its_source_in_the_picture() -> None:
    figure = quantize.recorded_bars({"tokens/s": {"bf16": 1.0, "fp8": 2.0}}, "Speed", "a GPU, 2026-01-02")
    assert "a GPU, 2026-01-02" in figure.get_supxlabel()
    with pytest.raises(ValueError, match="source"):
        quantize.recorded_bars({"tokens/s": {"bf16": 1.0}}, "Speed", " ")


def test_sizes_are_drawn_without_a_prediction_where_there_is_none() -> None:
    axes = quantize.sizes({"a": (2e6, 1e6), "b": (None, 4e6)}, "Sizes").axes[0]
    assert sorted(bar.get_width() for bar in axes.patches) == [1e6, 2e6, 4e6]


@pytest.mark.parametrize("limit", [None, 448.0])
def test_ranges_over_layers_show_every_value_and_the_limit(limit: float | None) -> None:
    axes = quantize.layer_ranges({"keys": {"right": [1.0, 300.0], "wrong": [0.5, 2.0]}}, limit=limit).axes[0]
    low, high = axes.get_ylim()
    assert low < 0.5 and high > (limit or 300.0)
    assert len(axes.lines) == 2 + (limit is not None)


def test_four_panels_of_ranges_stand_two_in_a_row_under_one_legend() -> None:
    series = {"right": [1.0, 2.0], "wrong": [0.5, 1.0]}
    figure = quantize.layer_ranges({f"input {n}": series for n in range(4)})
    places = {
        (round(axes.get_subplotspec().rowspan.start), axes.get_subplotspec().colspan.start) for axes in figure.axes
    }
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert [text.get_text() for legend in figure.legends for text in legend.get_texts()] == ["right", "wrong"]


def test_ties_have_a_place_of_their_own_in_the_picture_of_margins() -> None:
    left, right = quantize.margin_noise([0.0, 0.0, 0.25, 4.0], [0.5] * 4, [False, True, True, True], bins=2).axes
    assert "ties: margin 0" in [text.get_text() for text in left.texts]
    assert min(x for dots in left.collections for x, _ in dots.get_offsets()) < 0.25 / 2
    assert right.get_xticklabels()[0].get_text() == "≤ 0"


@pytest.mark.parametrize(
    ("most", "last", "step"), [(326.8e6, 3e8, 1e8), (2e9, 2e9, 5e8), (94.4e6, 8e7, 2e7), (7, 6, 2)]
)
def test_sizes_have_round_ticks(most: float, last: float, step: float) -> None:
    axes = quantize.sizes({"a": (most / 2, most)}, "Sizes").axes[0]
    ticks = axes.get_xticks().tolist()
    assert (ticks[0], ticks[1], ticks[-1]) == pytest.approx((0, step, last)) and len(ticks) <= 6
    assert axes.get_xticklabels()[1].get_text() == engine.readable_bytes(step)


def test_answers_are_drawn_a_row_for_each_engine_and_broken_ones_are_counted() -> None:
    axes = quantize.answer_scores({"FP8": [0.0, -0.4, None], "loop": [None, None, None]}, 0.1, "bfloat16").axes[0]
    assert [text.get_text() for text in axes.texts] == ["1 x broken", "3 x broken"]
    dots = [sorted(x for x, _ in marks.get_offsets()) for marks in axes.collections]
    assert dots == [[-0.4, 0.0], []]
    means = [line.get_xdata()[0] for line in axes.lines if line.get_linewidth() == 4 and len(line.get_xdata())]
    assert means == [-0.2] and "bfloat16" in axes.get_xlabel()
