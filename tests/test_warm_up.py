"""The steps that are run before the first request: possible on the engine, and nothing that a request owns is written."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.reference.configs import KvCacheConfig
from trtllm_workshop.reference.kv_pool import KvPool
from trtllm_workshop.reference.rank_step import RankStep
from trtllm_workshop.reference.warm_up import warm_up_plans

pytestmark = pytest.mark.usefixtures("one_thread")


@given(
    block=st.integers(0, 50),
    per_block=st.sampled_from([1, 8, 32, 64]),
    most=st.integers(1, 300),
    tokens=st.integers(1, 20_000),
    length=st.integers(2, 4096),
    chunks=st.booleans(),
)
def test_every_step_is_one_that_the_engine_allows(block, per_block, most, tokens, length, chunks):
    plans = [plan.work for plan in warm_up_plans(block, per_block, most, tokens, length, chunks)]
    assert plans
    for step in plans:
        assert 1 <= len(step.ids) == len(step.positions) == len(step.slots) == sum(step.lengths) <= tokens
        assert 1 <= len(step.totals) == len(step.table) <= most and max(step.totals) <= length
        assert set(step.slots // per_block) == {block} == set(step.table.flat)
        assert step.table.shape[1] * per_block >= max(step.totals)
        starts = np.cumsum([0, *step.lengths[:-1]])
        for start, new, total, kind in zip(starts, step.lengths, step.totals, step.types, strict=True):
            assert list(step.positions[start : start + new]) == list(range(total - new, total))
            assert kind == 1 or chunks or total == new
        assert list(step.types) == sorted(step.types) and list(step.last) == list(np.cumsum(step.lengths) - 1)


def test_an_engine_runs_them_in_a_block_of_its_own(engines):
    engine = engines.llm()._executor.engine
    pool = KvPool.allocate(engine, KvCacheConfig(max_tokens=80), spare=1)
    steps = RankStep(engine, pool, engine.build_config["max_batch_size"])
    with torch.inference_mode():
        steps.warm_up()
    assert pool.tensor[:, pool.blocks].any() and not pool.tensor[:, : pool.blocks].any()
