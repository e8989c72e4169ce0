"""The scheduler's policies, one small story each."""

from __future__ import annotations

import pytest
from scheduler_simulation import Simulation, Work, alone
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.scheduler import ScheduledBatch, Scheduler


def plan(batch: ScheduledBatch[Work]) -> tuple[list[tuple[int, int, int]], list[int]]:
    """A step in short: (request, start, count) of its chunks, and the requests that generate."""
    return [(c.request.request_id, c.start, c.count) for c in batch.context], [r.request_id for r in batch.generation]


def fill(scheduler: Scheduler[Work], *work: Work) -> Simulation:
    for request in work:
        scheduler.add(request)
    return Simulation(scheduler)


def test_requests_join_and_leave_a_running_batch():
    scheduler = Scheduler(KvCacheManager(10, 4), max_batch_size=2, max_num_tokens=20)
    simulation = fill(scheduler, Work(0, [1, 2, 0], 4, lasts=2), Work(1, [2, 2, 2], 4), Work(2, [0, 0, 0], 4))
    assert plan(simulation.step()) == ([(0, 0, 3), (1, 0, 3)], [])
    assert plan(simulation.step()) == ([], [0, 1])
    assert plan(simulation.step()) == ([(2, 0, 3)], [1]), "the freed place is taken in the very next step"


def test_static_batches_wait_for_the_longest_request():
    scheduler = Scheduler(KvCacheManager(10, 4), max_batch_size=2, max_num_tokens=20, policy="STATIC_BATCH")
    simulation = fill(scheduler, Work(0, [1, 2, 0], 4, lasts=1), Work(1, [2, 2, 2], 4), Work(2, [0, 0, 0], 4))
    assert plan(simulation.step()) == ([(0, 0, 3), (1, 0, 3)], [])
    assert [plan(simulation.step()) for _ in range(3)] == [([], [1])] * 3, "a free place stays empty"
    assert plan(simulation.step()) == ([(2, 0, 3)], [])


def test_a_long_request_is_not_overtaken_for_ever():
    scheduler = Scheduler(KvCacheManager(4, 4), max_batch_size=4, max_num_tokens=16)
    simulation = fill(scheduler, Work(0, [1], 3, lasts=2), Work(1, [1] * 10, 6), Work(2, [1], 3))
    assert plan(simulation.step()) == ([(0, 0, 1)], [])
    assert plan(simulation.step()) == ([], [0]), "the small one behind waits although it would fit"
    assert plan(simulation.step()) == ([(1, 0, 10)], [])


def test_guaranteed_no_evict_counts_what_running_requests_may_still_ask_for():
    scheduler = Scheduler(KvCacheManager(6, 4), max_batch_size=4, max_num_tokens=64)
    simulation = fill(scheduler, Work(0, [1] * 4, 12), Work(1, [2] * 4, 4), Work(2, [0] * 4, 4))
    assert plan(simulation.step()) == ([(0, 0, 4), (1, 0, 4)], []), "4 + 2 blocks are promised, only 2 are taken"
    assert scheduler.kv_cache.free_blocks == 4 and scheduler.capacity.promised == 4
    while simulation.busy:
        assert not simulation.step().paused
    assert [r.request_id for r in simulation.ended] == [1, 2, 0]


def test_max_utilization_starts_more_and_pauses_the_youngest():
    scheduler = Scheduler(KvCacheManager(5, 4), max_batch_size=4, max_num_tokens=64, policy="MAX_UTILIZATION")
    old, young = Work(0, [1] * 7, 8, lasts=4), Work(1, [2] * 7, 8)
    simulation = fill(scheduler, old, young)
    assert plan(simulation.step()) == ([(0, 0, 7), (1, 0, 7)], []), "both prompts fit, although both answers do not"
    assert plan(simulation.step()) == ([], [0, 1])
    batch = simulation.step()
    assert plan(batch) == ([], [0]) and batch.paused == [young]
    assert list(scheduler.waiting) == [young] and young.token_ids == alone(young)[:2], "what it made is kept"
    while young not in scheduler.running:
        batch = simulation.step()
    assert old in simulation.ended
    assert plan(batch)[0] == [(1, 8, 1)], "its two full blocks are found again; one token is left to compute"
    while simulation.busy:
        simulation.step()
    assert old.token_ids == alone(old) and young.token_ids == alone(young)


def test_several_paused_requests_wait_in_the_order_of_their_arrival():
    scheduler = Scheduler(KvCacheManager(4, 2), max_batch_size=4, max_num_tokens=64, policy="MAX_UTILIZATION")
    work = [Work(n, [n % 3], 4) for n in range(4)]
    simulation = fill(scheduler, *work)
    simulation.step()
    assert plan(simulation.step()) == ([], [0, 1, 2, 3])
    batch = simulation.step()
    assert plan(batch) == ([], [0, 1]) and batch.paused == [work[3], work[2]]
    assert list(scheduler.waiting) == [work[2], work[3]]


def test_a_paused_request_computes_everything_again_without_reuse():
    cache = KvCacheManager(4, 4, enable_block_reuse=False)
    scheduler = Scheduler(cache, max_batch_size=4, max_num_tokens=8, policy="MAX_UTILIZATION")
    old, young = Work(0, [1] * 3, 8), Work(1, [2] * 5, 11)
    simulation = fill(scheduler, old, young)
    chunks = []
    while simulation.busy:
        chunks += plan(simulation.step())[0]
    assert simulation.pauses == 1 and young.token_ids == alone(young)
    # 5 + 4 tokens are more than a step holds: only such a context is cut, at a block, without chunked context.
    assert chunks == [(0, 0, 3), (1, 0, 5), (1, 0, 8), (1, 8, 1)]


def test_a_long_prompt_does_not_stall_those_that_generate_when_it_is_cut():
    cache = KvCacheManager(40, 4)
    scheduler = Scheduler(cache, max_batch_size=4, max_num_tokens=14, enable_chunked_context=True)
    simulation = fill(scheduler, Work(0, [1, 1], 9), Work(1, [2, 2], 9))
    simulation.step()
    scheduler.add(Work(2, [0] * 30, 4))
    scheduler.add(Work(3, [0], 4))
    assert plan(simulation.step()) == ([(2, 0, 12)], [0, 1]), "two tokens for those that generate, the rest in blocks"
    assert plan(simulation.step()) == ([(2, 12, 12)], [0, 1])
    assert len(scheduler.running) == 3, "the one behind would get nothing of these steps, so it takes no blocks either"
    assert plan(simulation.step()) == ([(2, 24, 6), (3, 0, 1)], [0, 1])
    assert plan(simulation.step()) == ([], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("policy", "first", "second"),
    [
        ("FIRST_COME_FIRST_SERVED", [(0, 0, 16)], [(0, 16, 8), (1, 0, 8)]),
        ("EQUAL_PROGRESS", [(0, 0, 8), (1, 0, 8)], [(0, 8, 8), (1, 8, 8)]),
    ],
)
def test_prompts_share_a_step_by_the_chunking_policy(policy, first, second):
    scheduler = Scheduler(
        KvCacheManager(40, 4), 4, 16, enable_chunked_context=True, chunk_unit=8, context_chunking_policy=policy
    )
    simulation = fill(scheduler, Work(0, [1] * 24, 4), Work(1, [2] * 24, 4))
    assert plan(simulation.step()) == (first, [])
    assert plan(simulation.step()) == (second, [])


def test_a_prefix_is_found_one_step_after_it_was_computed():
    scheduler = Scheduler(KvCacheManager(20, 4), max_batch_size=4, max_num_tokens=64)
    simulation = fill(scheduler, Work(0, [1] * 9, 3), Work(1, [1] * 9, 3))
    assert plan(simulation.step()) == ([(0, 0, 9), (1, 0, 9)], []), "in the same step nothing is there to read yet"
    scheduler.add(Work(2, [1] * 9, 3))
    assert plan(simulation.step()) == ([(2, 8, 1)], [0, 1])
    scheduler.add(Work(3, [1] * 9, 3, reads_whole_context=True))
    assert plan(simulation.step())[0] == [(3, 0, 9)], "who wants every prompt token's logits computes every token"


def test_the_answer_of_a_request_is_found_by_the_next_question_of_the_same_talk():
    scheduler = Scheduler(KvCacheManager(20, 4), max_batch_size=4, max_num_tokens=64)
    first = Work(0, [1] * 6, 7)
    simulation = fill(scheduler, first)
    while simulation.busy:
        simulation.step()
    talk = [*first.tokens, 2, 2, 2]
    scheduler.add(Work(1, talk, 4))
    assert plan(simulation.step())[0] == [(1, 12, 4)], "12 of 13 tokens were in the cache, three full blocks"


def test_what_a_failed_step_should_have_computed_is_not_found():
    scheduler = Scheduler(KvCacheManager(20, 4), max_batch_size=4, max_num_tokens=64)
    simulation = fill(scheduler, Work(0, [1] * 9, 3))
    simulation.failing_step()
    assert not simulation.busy and scheduler.kv_cache.stats().usedNumBlocks == 0
    scheduler.add(Work(1, [1] * 9, 3))
    assert plan(simulation.step())[0] == [(1, 0, 9)]


def test_a_prompt_that_is_cancelled_half_way_leaves_what_was_computed_of_it():
    scheduler = Scheduler(KvCacheManager(20, 4), max_batch_size=4, max_num_tokens=8, enable_chunked_context=True)
    half_way = Work(0, [1] * 24, 3)
    simulation = fill(scheduler, half_way)
    simulation.step()
    simulation.step()
    simulation.cancel(half_way)
    scheduler.add(Work(1, [1] * 24, 3))
    assert plan(simulation.step())[0] == [(1, 16, 8)]


def test_a_request_is_left_out_once_its_last_token_is_on_its_way():
    scheduler = Scheduler(KvCacheManager(20, 4), max_batch_size=4, max_num_tokens=64)
    scheduler.add(Work(0, [1, 2], 3))
    steps = [plan(scheduler.schedule()) for _ in range(4)]  # no token is known in between
    assert steps == [([(0, 0, 2)], []), ([], [0]), ([], [0]), ([], [])]
    assert len(scheduler.running) == 1, "it still owns its blocks"


def test_requests_that_can_never_run_are_refused_with_the_numbers():
    scheduler = Scheduler(KvCacheManager(4, 4), max_batch_size=4, max_num_tokens=8)
    with pytest.raises(ValueError, match=r"prompt of 9 tokens exceeds max_num_tokens \(8\).*--max_num_tokens 9"):
        scheduler.add(Work(0, [1] * 9, 1))
    with pytest.raises(
        ValueError, match=r"prompt \(8\) \+ max_tokens \(9\) need 17 tokens .* holds 16; raise KvCacheC"
    ):
        scheduler.add(Work(1, [1] * 8, 9))
    with pytest.raises(ValueError, match="request 3 has 0 prompt tokens"):
        scheduler.add(Work(3, [], 9))
    assert not scheduler.waiting
    scheduler.add(Work(2, [1] * 8, 8))
    chunked = Scheduler(KvCacheManager(4, 4), max_batch_size=4, max_num_tokens=8, enable_chunked_context=True)
    chunked.add(Work(0, [1] * 9, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "MAX_UTILISATION"}, "capacity_scheduler_policy='MAX_UTILISATION' is unknown.*GUARANTEED_NO_EVICT"),
        ({"context_chunking_policy": "FCFS"}, "context_chunking_policy='FCFS' is unknown.*EQUAL_PROGRESS"),
        ({"chunk_unit": 6}, r"chunk_unit=6 must be a multiple of tokens_per_block \(4\)"),
        ({"max_batch_size": 0}, "max_batch_size=0 must be at least 1"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Scheduler(KvCacheManager(4, 4), **{"max_batch_size": 4, "max_num_tokens": 8, **options})


def test_finishing_takes_a_request_out_wherever_it_is():
    scheduler = Scheduler(KvCacheManager(6, 4), max_batch_size=1, max_num_tokens=8, enable_chunked_context=True)
    half_way, waiting = Work(0, [1] * 12, 3), Work(1, [1], 3)
    fill(scheduler, half_way, waiting).step()
    assert scheduler.tokens_in_cache(half_way) == 8
    scheduler.finish([waiting, Work(7, [1], 1)])
    scheduler.finish([half_way])
    scheduler.finish([half_way])
    assert not scheduler.waiting and not scheduler.running and scheduler.kv_cache.stats().usedNumBlocks == 0
    with pytest.raises(KeyError):
        scheduler.tokens_in_cache(half_way)
