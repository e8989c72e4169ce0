"""Time predicted from work: steps worked out by hand, what must never happen, and the published runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.planner_fit import CEILINGS, errors, fit, held_out, points, quantile
from trtllm_workshop.planner_gpus import Gpu, PlanProblem, load_gpus
from trtllm_workshop.planner_memory import Split
from trtllm_workshop.planner_published import cases, llama
from trtllm_workshop.planner_speed import IDEAL, Constants, seconds
from trtllm_workshop.planner_throughput import Limits, Load, roofline_tokens_per_second, schedule
from trtllm_workshop.planner_work import Engine

EIGHT = llama("8B")
ROUND = Gpu("round", 200e9, 1e12, {"fp16": 100e12, "fp8": 200e12}, 50e9, "nvlink", 2.0)
LAYER = 6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096


@pytest.fixture(scope="module")
def published():
    return cases()


def test_a_step_of_one_answer_by_hand():
    work = Engine(EIGHT, ROUND).step(answers=1, cached_tokens=1000)
    assert work.matrices == pytest.approx(2 * (32 * LAYER + 128256 * 4096) / 100e12)
    assert work.weights == pytest.approx(2 * (32 * (LAYER + 2 * 4096) + 128256 * 4096 + 4096) / 1e12)
    assert work.cache == pytest.approx(1000 * 131072 / 1e12)
    assert work.streams == pytest.approx(2 * 32 * (8 * 4096 + 2 * 6144 + 2 * 4096 + 3 * 14336) / 1e12)
    assert (work.link, work.scores, work.layers) == (0, 0, 32)
    assert seconds(work, IDEAL).total == pytest.approx(work.matrices + work.weights + work.cache + work.streams)


def test_prompts_cost_their_attention_and_half_the_precision_halves_the_products():
    sixteen, eight = (Engine(EIGHT, ROUND, dtype).step(1000, 0, 0, 1000 * 1001 / 2, 1) for dtype in ("float16", "fp8"))
    head = 2 * 128256 * 4096 / 100e12  # stays in 16 bits, for the prompt's last token only
    assert sixteen.scores == pytest.approx(4 * 32 * 4096 * 500500 / 100e12)
    assert sixteen.matrices - head == pytest.approx(2 * (eight.matrices - head))
    assert sixteen.weights > 1.7 * eight.weights


def test_four_ranks_send_two_all_reduces_a_layer():
    """A ring sends 2 (4 - 1) / 4 of [tokens, hidden] in 16 bits: for 64 tokens 786,432 bytes, twice in each of 32 layers."""
    work = Engine(EIGHT, ROUND, split=Split(tp=4)).step(answers=64)
    assert work.link == pytest.approx(2 * 32 * 786_432 / 50e9)
    assert Engine(EIGHT, ROUND, split=Split(pp=2)).step(answers=64).link == pytest.approx(64 * 4096 * 2 / 50e9)


def test_waves_hold_every_token_once():
    engine, load = Engine(EIGHT, ROUND), Load(1000, 500, 333)
    plan = schedule(engine, load, Limits(max_batch_size=100))
    assert [(count, one.batch) for count, one in plan.waves] == [(3, 100), (1, 33)]
    assert plan.batch_limit == "max_batch_size"
    layers = 2 * 32 * LAYER * 333 * (1000 + 499) / 100e12
    head = 2 * 128256 * 4096 * 333 * 500 / 100e12
    assert plan.work.matrices == pytest.approx(layers + head)
    assert plan.work.cache == pytest.approx(131072 * 333 * 499 * (1000 + 250) / 1e12)
    assert plan.work.scores == pytest.approx(4 * 32 * 4096 * 333 * 1000 * 1001 / 2 / 100e12)


@pytest.mark.parametrize("split", [Split(pp=2), Split(tp=2, pp=2)])
def test_waves_over_stages_do_the_same_work_in_more_and_smaller_steps(split):
    plan = schedule(Engine(EIGHT, ROUND, split=split), Load(1000, 500, 100))
    layers = 2 * 32 * LAYER * 100 * (1000 + 499) / 100e12 / split.ranks
    head = 2 * 128256 * 4096 * 100 * 500 / 100e12 / split.tp
    assert plan.work.matrices == pytest.approx(layers + head)
    assert plan.waves[0][1].pure_steps == pytest.approx(split.pp * 500 - plan.waves[0][1].mixed_steps)


def test_one_request_takes_a_step_for_its_prompt_and_one_for_every_further_token():
    ((_, one),) = schedule(Engine(EIGHT, ROUND), Load(100, 128, 1)).waves
    assert (one.mixed_steps, one.pure_steps) == (1, 127)
    assert one.mixed.cache == 0


def test_what_does_not_fit_says_what_to_change():
    with pytest.raises(PlanProblem, match=r"not one request of 100 \+ 100 tokens fits on 1 x L4.*16\.1 GB.*--tp"):
        schedule(Engine(EIGHT, replace(load_gpus()["L4"], memory=17e9)), Load(100, 100, 1))


@given(
    batch=st.integers(1, 512), context=st.integers(1, 20_000), prompt=st.integers(0, 4096), factor=st.floats(1, 10),
    dtype=st.sampled_from(["float16", "fp8", "int4_awq"]), split=st.sampled_from([Split(), Split(4), Split(2, 2)]),
)  # fmt: skip
def test_more_bandwidth_rate_or_link_is_never_slower(batch, context, prompt, factor, dtype, split):
    def total(gpu):
        return seconds(
            Engine(EIGHT, gpu, dtype, "fp8", split).step(prompt, batch, batch * context, prompt**2 / 2)
        ).total

    rates = {key: value * factor for key, value in ROUND.flops.items()}
    for better in (
        replace(ROUND, bandwidth=ROUND.bandwidth * factor),
        replace(ROUND, flops=rates),
        replace(ROUND, link=ROUND.link * factor),
    ):
        assert total(better) <= total(ROUND) * (1 + 1e-12)


@given(load=st.builds(Load, st.integers(1, 8000), st.integers(1, 4000), st.integers(1, 3000)), factor=st.floats(1, 10))
def test_queued_requests_are_never_slower_with_more_bandwidth_and_never_pass_the_roofline(load, factor):
    engine = Engine(EIGHT, ROUND, "fp8", "fp8")
    faster = replace(engine, gpu=replace(ROUND, bandwidth=ROUND.bandwidth * factor))
    plan, better = schedule(engine, load), schedule(faster, load)
    assert seconds(better.work).total <= seconds(plan.work).total * (1 + 1e-12)
    assert load.requests * load.answer / seconds(plan.work).total <= roofline_tokens_per_second(engine, load)


def test_all_published_rows_are_cases_and_none_is_above_the_roofline(published):
    known, left_out = published
    assert len(known) == 292
    assert left_out == []
    shares = [case.tokens_per_second / roofline_tokens_per_second(case.engine, case.load) for case in known]
    assert max(shares) < 1


def test_figures_per_gpu_are_multiplied_by_the_ranks(published):
    (row,) = [
        case for case in published[0]
        if case.source.startswith("1.2") and case.engine.gpu.name == "H100" and case.load.prompt == 1000
    ]  # fmt: skip
    assert row.tokens_per_second == 2 * 2209
    assert row.load.requests == 3000


def test_held_out_gpus_are_predicted_within_the_goal_and_the_library_holds_the_fitted_constants(published):
    seen = points(published[0])
    for gpu in sorted({point.gpu for point in seen}):
        _, found = held_out(seen, [gpu])
        assert quantile(found, 0.5) <= 0.25, gpu
        assert quantile(found, 0.9) <= 0.5, gpu
    fitted = fit(seen)
    for name, ceiling in CEILINGS.items():
        assert getattr(Constants(), name) == pytest.approx(getattr(fitted, name), rel=0.01)
        assert getattr(fitted, name) <= ceiling


def test_a_fit_finds_the_constants_that_made_the_figures(published):
    truth = Constants(0.5, 0.7, 0.6, 0.3)
    made = [replace(point, measured=point.measured * point.ratio(truth)) for point in points(published[0])]
    found = fit(made)
    assert errors(made, found)[-1] < 0.01
    for name in CEILINGS:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.02)


def test_quantiles_lie_between_neighbours():
    assert quantile([1, 2, 3, 4, 5], 0.5) == 3
    assert quantile([0, 10], 0.9) == pytest.approx(9)
    assert quantile([7], 0.9) == 7
