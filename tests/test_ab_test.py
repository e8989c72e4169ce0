"""The A/B of two engines: by hand, mirrored, on equal and on broken answers, with few prompts, and with bad input."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.ab_test import NO_DIFFERENCE, TOO_FEW, Answer, answer_score, compare_answers

TEXTS = [f"Answer number {n} is a plain sentence about plants, rivers and the weather." for n in range(40)]
LOOP = "the same words again " * 12


def answers(scores, texts=TEXTS, start=0):
    return [
        Answer(text, [start, 7, *range(n)], score) for n, (score, text) in enumerate(zip(scores, texts, strict=False))
    ]


def normal(count, mean, spread, seed=0):
    return np.random.default_rng(seed).normal(mean, spread, count).tolist()


def test_outcomes_and_means_by_hand():
    a = [
        Answer("A good sentence.", [1, 2, 3, 4], -1.0),
        Answer("A good sentence.", [1, 2, 3], -1.0),
        Answer("A good sentence.", [1, 2], -1.0),
        Answer(LOOP, [5] * 9, -0.01),
        Answer("", [], None),
    ]
    b = [
        Answer("Another sentence.", [1, 9, 3, 4], -1.5),
        Answer("Another sentence.", [1, 2, 3, 4], -0.75),
        Answer("A good sentence.", [1, 2], -1.0),
        Answer("Another sentence.", [6], -4.0),
        Answer(" ", [5], -0.1),
    ]
    report = compare_answers(a, b, "bf16", "fp8", tolerance=0.25)
    assert [o.winner for o in report.outcomes] == ["A", "tie", "tie", "B", "tie"], "the tolerance itself is a tie"
    assert [o.difference for o in report.outcomes] == [-0.5, 0.25, 0.0, None, None]
    assert [o.agreement for o in report.outcomes] == [3 / 4, 3 / 4, 1.0, 0.0, 0.0]
    assert [o.first_difference for o in report.outcomes] == [1, 3, None, 0, 0]
    assert "loop" in report.outcomes[3].degenerate_a and "empty" in report.outcomes[4].degenerate_b
    assert report.difference.estimate == pytest.approx((-0.5 + 0.25 + 0) / 3)
    assert report.win_share.estimate == pytest.approx((0 + 0.5 + 0.5 + 1 + 0.5) / 5)
    assert report.more_degenerate.estimate == pytest.approx(-1 / 5)
    assert report.wins == {"A": 1, "B": 1, "tie": 3} and report.scored == 3 and report.verdict == TOO_FEW
    assert "A 2, B 1" in str(report) and "tie 3 (tolerance 0.25" in str(report)


def test_the_score_of_an_answer_is_torchs():
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(3))
    ids = [1, 2, 3, 4, 5, 6, 7]
    wanted = logits.double().log_softmax(-1)[[3, 4, 5], [5, 6, 7]].mean()  # four tokens of prompt
    assert answer_score(logits, 4, ids) == pytest.approx(float(wanted))
    for prompt in (0, 7, 9):
        with pytest.raises(ValueError, match=rf"{prompt} prompt tokens of 7"):
            answer_score(logits, prompt, ids)
    with pytest.raises(ValueError, match="NaN"):
        answer_score(logits * math.nan, 4, ids)


OTHER = {"A": "B", "B": "A", "tie": "tie"}


@given(
    st.lists(
        st.tuples(st.floats(-5, 0), st.floats(-5, 0), st.sampled_from([*TEXTS[:3], LOOP]), st.sampled_from(TEXTS[:2])),
        min_size=2,
        max_size=14,
    )
)
def test_a_and_b_may_change_places(rows):
    a = answers([r[0] for r in rows], [r[2] for r in rows])
    b = answers([r[1] for r in rows], [r[3] for r in rows], start=1)
    one = compare_answers(a, b, "x", "y", resamples=60)
    two = compare_answers(b, a, "y", "x", resamples=60)
    assert [OTHER[o.winner] for o in one.outcomes] == [o.winner for o in two.outcomes]
    assert [o.first_difference for o in one.outcomes] == [o.first_difference for o in two.outcomes]
    assert (one.difference is None) == (two.difference is None)
    if one.difference and two.difference:
        assert (one.difference.low, one.difference.high) == pytest.approx((-two.difference.high, -two.difference.low))
    assert (one.win_share.low, one.win_share.high) == pytest.approx((1 - two.win_share.high, 1 - two.win_share.low))
    assert one.verdict == two.verdict


def test_equal_answers_are_no_difference():
    same = answers(normal(24, -1, 0.5))
    report = compare_answers(same, same, "bf16", "copy", scorer="bf16")
    assert report.verdict == NO_DIFFERENCE and report.wins["tie"] == 24 and report.agreement == 1
    assert (report.difference.low, report.difference.high) == (0, 0) and report.win_share.estimate == 0.5
    assert "24 answers equal" in str(report) and "bf16 scores its own answers" in str(report)
    assert "scores its own" not in str(compare_answers(same, same, "bf16", "copy", scorer="fp32"))


def test_a_loop_that_the_scorer_likes_fails_the_gate():
    good, loops = answers(normal(24, -1, 0.3)), answers([-0.02] * 24, [LOOP] * 24)
    assert compare_answers(good, loops, "bf16", "broken").verdict == "broken fails the degenerate gate"
    assert compare_answers(loops, good, "broken", "bf16").verdict == "broken fails the degenerate gate"
    assert compare_answers(good, loops).wins == {"A": 24, "B": 0, "tie": 0}
    some = [*loops[:8], *good[8:]]
    assert compare_answers(good, some, "bf16", "broken").verdict == "broken fails the degenerate gate"


def test_one_loop_among_many_answers_is_no_verdict_about_the_engine():
    good = answers(normal(24, -1, 0.3))
    one = [Answer(LOOP, [1] * 40, -0.02), *good[1:]]
    report = compare_answers(good, one)
    assert report.verdict == NO_DIFFERENCE and report.wins == {"A": 1, "B": 0, "tie": 23} and report.scored == 23


def test_two_engines_with_loops_alike_leave_too_few_to_score():
    loops = answers([-0.1] * 24, [LOOP] * 24)
    report = compare_answers(loops, loops)
    assert report.verdict == TOO_FEW and report.difference is None and "score, B - A     -" in str(report)


def test_garbage_with_words_is_worse_by_its_score():
    good = answers(normal(24, -1, 0.3))
    garbage = answers(normal(24, -6, 1.0, seed=1), [f"qx {n} vlo prun {n * 7} zz ge" for n in range(24)])
    assert compare_answers(good, garbage, "bf16", "broken").verdict == "broken is worse"
    assert compare_answers(garbage, good, "broken", "bf16").verdict == "broken is worse"


def test_a_sure_loss_within_the_tolerance_is_called_just_that():
    left = normal(24, -1, 0.3)
    right = [x - d for x, d in zip(left, normal(24, 0.05, 0.03, seed=2), strict=True)]
    for one, two, names in ((left, right, "xy"), (right, left, "yx")):
        report = compare_answers(answers(one), answers(two), *names, tolerance=0.1)
        assert report.verdict == "y is worse, but within the tolerance"
    assert compare_answers(answers(left), answers(right), "x", "y", tolerance=0.01).verdict == "y is worse"


def test_an_interval_across_the_tolerance_tells_nothing():
    left = normal(24, -1, 0.3)
    right = [x - d for x, d in zip(left, normal(24, 0.1, 0.3, seed=2), strict=True)]
    report = compare_answers(answers(left), answers(right), tolerance=0.1)
    assert report.difference.low < -0.1 < report.difference.high and report.verdict == TOO_FEW


def test_a_mean_and_a_majority_that_disagree_are_no_verdict():
    left = normal(24, -1, 0.3)
    right = [x - 0.2 for x in left]
    assert compare_answers(answers(left), answers(right), "x", "y", tolerance=0.1).verdict == "y is worse"
    mostly_better = [x + 0.11 for x in left[:16]] + [x - 3 for x in left[16:]]
    report = compare_answers(answers(left), answers(mostly_better), "x", "y", tolerance=0.1)
    assert report.difference.high < -0.1 and report.win_share.estimate > 0.5 and report.verdict == TOO_FEW


def test_few_prompts_are_not_enough_however_clear():
    good, bad = answers([-1.0] * 9), answers([-5.0] * 9)
    report = compare_answers(good, bad)
    assert report.verdict == TOO_FEW and "fewer than 10 prompts" in report.rule
    assert compare_answers(good, bad, min_prompts=9).verdict == "B is worse"


def test_fewer_prompts_widen_both_intervals():
    left, right = normal(40, -1, 0.5), normal(40, -1.1, 0.5, seed=1)
    widths = []
    for count in (10, 40):
        report = compare_answers(answers(left[:count]), answers(right[:count]))
        widths.append([i.high - i.low for i in (report.difference, report.win_share)])
    assert widths[0][0] > 1.4 * widths[1][0] and widths[0][1] > 1.4 * widths[1][1]  # twice, in the long run


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        ([], [], r"0 prompt\(s\)"),
        (answers([-1.0]), answers([-1.0]), r"1 prompt\(s\)"),
        (answers([-1.0] * 3), answers([-1.0] * 2), "3 answers of bf16 and 2 of fp8"),
        (answers([-1.0, math.nan]), answers([-1.0] * 2), "bf16 to prompt 1 has the score nan"),
        (answers([-1.0] * 2), answers([-math.inf, -1.0]), "fp8 to prompt 0 has the score -inf"),
        (answers([-1.0] * 2), answers([-1.0, None]), "fp8 to prompt 1 has no score"),
    ],
)
def test_bad_input_is_refused_with_its_values(a, b, said):
    with pytest.raises(ValueError, match=said):
        compare_answers(a, b, "bf16", "fp8")


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf])
def test_a_tolerance_that_is_none(tolerance):
    with pytest.raises(ValueError, match=f"tolerance is {tolerance}"):
        compare_answers(answers([-1.0] * 2), answers([-1.0] * 2), tolerance=tolerance)


def test_an_answer_without_tokens_has_no_text():
    strange = [Answer("words", [], None), Answer("words", [1], -1.0)]
    with pytest.raises(ValueError, match="without tokens has the text 'words'"):
        compare_answers(strange, answers([-1.0] * 2))
