"""The scheduler under random schedules, with a simulated model: nothing is lost, mixed up, starved or stalled."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_simulation import Simulation, Work, alone
from trtllm_workshop.reference.capacity_scheduler import CAPACITY_SCHEDULER_POLICIES
from trtllm_workshop.reference.context_chunking import CONTEXT_CHUNKING_POLICIES, chunk_sizes
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.scheduler import Scheduler

booleans = st.booleans()


@st.composite
def schedulers(draw, policies=CAPACITY_SCHEDULER_POLICIES, chunked=booleans):
    """Small pools, small steps, small blocks and large ones."""
    blocks, size = draw(
        st.one_of(st.tuples(st.integers(1, 12), st.integers(1, 4)), st.tuples(st.integers(1, 3), st.integers(1, 32)))
    )
    cache = KvCacheManager(blocks, size, enable_block_reuse=draw(booleans, label="reuse"))
    return Scheduler(
        cache,
        max_batch_size=draw(st.integers(1, 6)),
        max_num_tokens=draw(st.integers(1, 40)),
        policy=draw(st.sampled_from(policies)),
        enable_chunked_context=draw(chunked),
        chunk_unit=draw(st.sampled_from([None, size, 2 * size])),
        context_chunking_policy=draw(st.sampled_from(CONTEXT_CHUNKING_POLICIES)),
    )


@st.composite
def works(draw, scheduler: Scheduler[Work], most: int = 12):
    """Requests that can run; many begin with the same tokens."""
    pool = scheduler.kv_cache.num_blocks * scheduler.kv_cache.tokens_per_block
    longest = min(pool - 1, 60) if scheduler.enable_chunked_context else min(pool - 1, scheduler.max_num_tokens)
    text = draw(st.lists(st.integers(0, 2), min_size=60, max_size=60))
    made = []
    for number in range(draw(st.integers(0, most)) if pool > 1 else 0):
        length, shared = draw(st.integers(1, longest)), draw(st.integers(0, longest))
        prompt = [*text[:shared], *draw(st.lists(st.integers(0, 2), max_size=4)), *([1] * length)][:length]
        new = draw(st.integers(1, min(pool - length, 30)))
        made.append(
            Work(number, prompt, new, draw(st.integers(1, new)), reads_whole_context=draw(st.integers(0, 7)) == 0)
        )
    return made


def bound(works: list[Work]) -> int:
    """More steps than any schedule takes that starves nobody: all after each other, each restarted by each other."""
    return 2 * sum(len(w.prompt_token_ids) + w.max_new_tokens + 2 for w in works) * (len(works) + 1) + 10


@settings(max_examples=200, deadline=None)
@given(data=st.data(), scheduler=schedulers(), overlap=booleans)
def test_every_request_gets_its_own_tokens_under_any_schedule(data, scheduler, overlap):
    work = data.draw(works(scheduler))
    expected = {w.request_id: alone(w) for w in work}
    simulation, arriving, cut_short = Simulation(scheduler, overlap), deque(work), set()
    while arriving or simulation.busy:
        for _ in range(data.draw(st.integers(0, len(arriving)), label="arrivals")):
            scheduler.add(arriving.popleft())
        if arriving and not simulation.busy:
            scheduler.add(arriving.popleft())
        batch = simulation.step()
        assert batch.context or batch.generation or overlap, "a step with work in line does something"
        event, alive = data.draw(st.integers(0, 15), label="event"), [*scheduler.running, *scheduler.waiting]
        if alive and event == 0:
            victim = data.draw(st.sampled_from(alive))
            simulation.cancel(victim)
            cut_short.add(victim.request_id)
        elif event == 1 and not overlap:
            cut_short |= {r.request_id for r in simulation.failing_step()}
        assert simulation.steps <= bound(work), "a request starves"
    for request in work:
        made = request.token_ids
        assert made == expected[request.request_id][: len(made)]
        assert len(made) == request.lasts or request.request_id in cut_short
    stats = scheduler.kv_cache.stats()
    assert (stats.freeNumBlocks, stats.usedNumBlocks) == (stats.maxNumBlocks, 0) and not scheduler.capacity.promised


@settings(max_examples=100, deadline=None)
@given(data=st.data(), scheduler=schedulers(policies=["GUARANTEED_NO_EVICT"], chunked=st.just(False)))
def test_first_tokens_come_in_the_order_of_arrival(data, scheduler):
    work = data.draw(works(scheduler))
    for request in work:
        scheduler.add(request)
    simulation = Simulation(scheduler)
    while simulation.busy:
        simulation.step()
    first = [w.first_token_step for w in work]
    assert first == sorted(first)


@settings(max_examples=30, deadline=None)
@given(data=st.data(), scheduler=schedulers())
def test_a_load_of_ten_pools_finishes(data, scheduler):
    pool = scheduler.kv_cache.num_blocks * scheduler.kv_cache.tokens_per_block
    longest = pool - 1 if scheduler.enable_chunked_context else min(pool - 1, scheduler.max_num_tokens)
    work: list[Work] = []
    while longest and sum(len(w.prompt_token_ids) + w.max_new_tokens for w in work) < 10 * pool:
        prompt = data.draw(st.integers(-(-longest // 3), longest))
        work.append(
            Work(len(work), [len(work) % 3] * prompt, data.draw(st.integers(-(-(pool - prompt) // 2), pool - prompt)))
        )
    for request in work:
        scheduler.add(request)
    simulation = Simulation(scheduler)
    while simulation.busy:
        simulation.step()
        assert simulation.steps <= bound(work)
    assert len(simulation.ended) == len(work) and all(w.token_ids == alone(w) for w in work)


@given(
    remaining=st.lists(st.integers(1, 90), max_size=8),
    budget=st.integers(0, 200),
    unit=st.integers(1, 40),
    policy=st.sampled_from(CONTEXT_CHUNKING_POLICIES),
)
def test_chunks_fill_the_step_and_end_with_a_unit(remaining, budget, unit, policy):
    sizes = chunk_sizes(remaining, budget, unit, policy)
    assert sum(sizes) <= budget and len(sizes) == len(remaining)
    for size, need in zip(sizes, remaining, strict=True):
        assert size == need or (size < need and size % unit == 0)
        if size < need:
            assert budget - sum(sizes) < min(unit, need - size), "nothing is left that another unit would fit into"
    if policy == "EQUAL_PROGRESS":
        cut = [size for size, need in zip(sizes, remaining, strict=True) if size < need]
        assert max(cut, default=0) - min(cut, default=0) <= unit
    elif sizes:
        assert sizes[0] == min(remaining[0], sizes[0] if remaining[0] > budget else remaining[0])
