"""The pictures of the lesson on several ranks: every rank's share is drawn, and a prediction says that it is one."""

from __future__ import annotations

from typing import Any

import pytest
from trtllm_workshop.figures import parallel


def words(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def area(patch: Any) -> float:
    return float(patch.get_width() * patch.get_height())


def test_the_pieces_of_a_cut_tensor_fill_it_and_carry_their_rank() -> None:
    rows = [[(0, 4), (8, 10)], [(4, 8), (10, 12)]]
    whole = parallel.Held("whole", (12, 12))
    drawn = [
        parallel.held_tensors([tensor], 2).axes[0] for tensor in (whole, parallel.Held("qkv", (12, 12), rows=rows))
    ]
    assert sum(map(area, drawn[1].patches)) == pytest.approx(area(drawn[0].patches[0]))
    assert [text.get_text() for text in drawn[1].texts[2:]] == ["0", "0", "1", "1"]
    assert len({patch.get_hatch() for patch in drawn[1].patches}) == 2  # told apart without colour


@pytest.mark.parametrize(
    ("cut", "kind"),
    [
        ({"rows": [[(0, 2)], [(2, 4)]]}, "column split"),
        ({"columns": [[(0, 3)], [(3, 6)]]}, "row split"),
        ({}, "on every rank"),
    ],
)
def test_a_tensor_says_how_it_is_cut(cut: dict[str, Any], kind: str) -> None:
    figure = parallel.held_tensors([parallel.Held("a", (4, 6), **cut)], 2)
    assert f"4 x 6, {kind}" in words(figure)


def test_every_rank_has_its_part_of_both_matrices() -> None:
    found = words(parallel.two_matrices(3, 576, 1536))
    assert "columns of A\n576 x 512" in found and "rows of B\n512 x 576" in found
    assert [found.count(f"rank {rank}") for rank in range(4)] == [2, 2, 2, 0]


def test_the_three_ways_stand_side_by_side() -> None:
    figure = parallel.ways_to_split(gpus=2, layers=4)
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        f"{way} parallel" for way in ("Tensor", "Pipeline", "Expert")
    ]
    assert words(figure).count("GPU 0") == 4  # its half of every layer
    assert [text for text in words(figure) if "layer" in text and "GPU 1" in text] == [
        "layer 2 on GPU 1",
        "layer 3 on GPU 1",
    ]


def test_a_plan_is_called_predicted_and_leaves_out_what_does_not_fit() -> None:
    figure = parallel.planned({"TP": [(1, None, None), (2, 14.0, 2000.0), (4, 8.0, 1800.0)]}, "a model")
    assert "not measured" in figure.get_suptitle()
    assert [list(axes.lines[0].get_xdata()) for axes in figure.axes] == [[2, 4], [2, 4]]


def test_parts_of_a_token_add_up_beside_what_was_measured() -> None:
    axes = parallel.step_parts({"1 rank": (20.0, 3.0, 0.0)}, {"1 rank": 25.0}).axes[0]
    assert [patch.get_width() for patch in axes.patches] == [20.0, 3.0, 0.0, 25.0]
    assert [text.get_text() for text in axes.texts] == ["23.0 ms predicted", "25.0 ms measured"]
