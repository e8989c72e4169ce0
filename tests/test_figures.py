"""The pictures: colours that can be told apart and read, and the facts that they draw."""

from __future__ import annotations

import itertools

import matplotlib
import pytest
from trtllm_workshop.figures import checkpoint, engine, style


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
