"""The scheduler, without a model: it keeps its limits, loses nobody and lets nobody starve."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.scheduler import Scheduler


@dataclass
class Work:
    """A request as the scheduler sees it; `lasts` is when it really ends, at most after max_new_tokens."""

    request_id: int
    prompt_token_ids: list[int]
    max_new_tokens: int
    lasts: int
    made: int = 0


@st.composite
def workloads(draw):
    blocks, per_block = draw(st.integers(1, 12)), draw(st.integers(1, 8))
    batch, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 30))
    pool = blocks * per_block
    count = draw(st.integers(0, 12)) if pool > 1 else 0
    work = []
    for number in range(count):
        prompt = draw(st.integers(1, min(tokens, pool - 1)))
        new = draw(st.integers(1, pool - prompt))
        work.append(Work(number, list(range(prompt)), new, draw(st.integers(1, new))))
    return blocks, per_block, batch, tokens, work


@settings(max_examples=200, deadline=None)
@given(workload=workloads(), data=st.data())
def test_every_request_is_served_once_in_order_and_within_the_limits(workload, data):
    blocks, per_block, batch, tokens, work = workload
    cache = KvCacheManager(blocks, per_block)
    scheduler = Scheduler(cache, batch, tokens)
    arriving, admitted, finished, steps = list(work), [], [], 0
    while arriving or scheduler.waiting or scheduler.running:
        for _ in range(data.draw(st.integers(0, len(arriving)), label="arrivals")):
            scheduler.add(arriving.pop(0))
        if arriving and not (scheduler.waiting or scheduler.running):
            scheduler.add(arriving.pop(0))
        context, generation = scheduler.schedule()
        assert context or generation, "a step with work in line does something"
        assert len(context) + len(generation) <= batch
        assert sum(len(r.prompt_token_ids) for r in context) + len(generation) <= tokens
        assert not {r.request_id for r in context} & {r.request_id for r in generation}
        admitted += context
        used = sum(cache.blocks_for(len(r.prompt_token_ids) + r.max_new_tokens) for r in [*context, *generation])
        assert cache.stats().usedNumBlocks == used, "a running request has room for all it may generate"
        for request in [*context, *generation]:
            request.made += 1
            cache.slots(request.request_id, 0, len(request.prompt_token_ids) + request.made)  # raises beyond its blocks
        ended = [r for r in [*context, *generation] if r.made == r.lasts]
        scheduler.finish(ended)
        finished += ended
        steps += 1
        assert steps <= sum(r.lasts for r in work), "each step makes at least one token"
    assert [r.request_id for r in admitted] == [r.request_id for r in work], "first come, first served"
    assert sorted(r.request_id for r in finished) == [r.request_id for r in work]
    assert cache.stats().freeNumBlocks == blocks


def test_requests_join_and_leave_a_running_batch():
    scheduler = Scheduler(KvCacheManager(10, 4), max_batch_size=2, max_num_tokens=20)
    first, second, third = (Work(n, [1, 2, 3], 4, 4) for n in range(3))
    for request in (first, second, third):
        scheduler.add(request)
    assert scheduler.schedule() == ([first, second], [])
    scheduler.finish([first])
    assert scheduler.schedule() == ([third], [second]), "the freed place is taken in the very next step"


def test_a_long_request_is_not_overtaken_for_ever():
    scheduler = Scheduler(KvCacheManager(4, 4), max_batch_size=4, max_num_tokens=16)
    small, large, later = Work(0, [1], 3, 3), Work(1, [1] * 10, 6, 6), Work(2, [1], 3, 3)
    for request in (small, large, later):
        scheduler.add(request)
    assert scheduler.schedule() == ([small], [])
    assert scheduler.schedule() == ([], [small]), "the small one behind waits although it would fit"
    scheduler.finish([small])
    assert scheduler.schedule() == ([large], [])


def test_requests_that_can_never_run_are_refused_with_both_numbers():
    scheduler = Scheduler(KvCacheManager(4, 4), max_batch_size=4, max_num_tokens=8)
    with pytest.raises(ValueError, match=r"prompt of 9 tokens exceeds max_num_tokens \(8\).*--max_num_tokens 9"):
        scheduler.add(Work(0, [1] * 9, 1, 1))
    with pytest.raises(
        ValueError, match=r"prompt \(8\) \+ max_tokens \(9\) need 17 tokens .* holds 16; raise KvCacheC"
    ):
        scheduler.add(Work(1, [1] * 8, 9, 1))
    assert not scheduler.waiting
    scheduler.add(Work(2, [1] * 8, 8, 1))


def test_finishing_a_waiting_request_takes_it_out_of_the_line():
    scheduler = Scheduler(KvCacheManager(4, 4), max_batch_size=1, max_num_tokens=8)
    first, second = Work(0, [1], 3, 3), Work(1, [1], 3, 3)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.finish([second])
    scheduler.finish([first])
    assert not scheduler.waiting and not scheduler.running and scheduler.kv_cache.stats().usedNumBlocks == 0
