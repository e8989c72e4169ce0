"""The scheduler and the block pool replayed without a model: lengths alone decide what is drawn."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.pool_replay import Step, replay

LENGTHS = [40, 6, 10, 4, 8, 44, 5, 12, 36, 9, 6, 7]


def tokens_made(steps: list[Step]) -> dict[int, int]:
    made: dict[int, int] = {}
    for step in steps:
        for request in (*step.context, *step.generation):
            made[request] = made.get(request, 0) + 1
    return made


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 5))
def test_static_batches_take_the_longest_of_each_and_in_flight_batching_fills_slots(
    lengths: list[int], slots: int
) -> None:
    requests = [(4, length) for length in lengths]
    static = replay(requests, 10, max_batch_size=slots, policy="STATIC_BATCH")
    assert len(static) == sum(max(lengths[i : i + slots]) for i in range(0, len(lengths), slots))
    in_flight = replay(requests, 10, max_batch_size=slots)
    free = [0] * slots  # when each slot becomes free: the next request takes the first one
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    assert len(in_flight) == max(free)
    assert tokens_made(in_flight) == dict(enumerate(lengths))


def test_blocks_grow_with_the_tokens_and_come_back() -> None:
    (*early, last) = replay([(30, 8), (10, 2)], num_blocks=5, tokens_per_block=16)
    assert early[0].used == 2 + 1 and early[0].context == (0, 1)
    assert last.used == 3 and last.generation == (0,)  # 30 + 7 tokens; the eighth is never put into the cache
    assert sum(1 in of for of in last.owners) == 0


def test_a_pool_that_is_too_small_queues_or_pauses() -> None:
    requests = [(20, 60)] * 4  # 3 blocks of 32 each in the end
    patient = replay(requests, num_blocks=6, policy="GUARANTEED_NO_EVICT")
    greedy = replay(requests, num_blocks=6, policy="MAX_UTILIZATION")
    assert max(len(step.generation) for step in patient) == 2 and not any(step.paused for step in patient)
    assert any(step.paused for step in greedy) and max(len(step.generation) for step in greedy) > 2
    assert all(step.used <= 6 for step in greedy)
    assert all(count >= 60 for count in tokens_made(greedy).values())
    with pytest.raises(ValueError, match="pool"):
        replay([(20, 60)], num_blocks=2)


def test_a_shared_beginning_is_owned_by_all_who_have_it() -> None:
    prefix = list(range(64))
    requests = [([*prefix, 1000 + number], 40) for number in range(3)]
    steps = replay(requests, 20, max_batch_size=3, max_num_tokens=70, enable_block_reuse=True)
    assert any(of == (0, 1, 2) for step in steps for of in step.owners)
    alone = replay(requests, 20, max_batch_size=3, max_num_tokens=70)
    assert max(len(of) for step in alone for of in step.owners) == 1
    assert max(step.used for step in steps) == max(step.used for step in alone) - 2 * 2  # two blocks, twice less
