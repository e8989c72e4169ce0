"""The course's own scheduler and block pool, run step by step without a model: who owns which block, and who waits.

The policy code is the reference toolchain's (no torch in it). Every request makes exactly as many tokens as it may, so the
run depends on lengths alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.scheduler import Scheduler


@dataclass
class Job:
    """A request as the scheduler sees it."""

    request_id: int
    prompt_token_ids: list[int]
    max_new_tokens: int
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """The state right after a step was put together, before its finished requests leave.

    Requests are numbered from 0 in the order they were given. `owners` has, for every block of the pool, the requests that
    own it: none when it is free, several when they share a prefix.
    """

    owners: tuple[tuple[int, ...], ...]
    context: tuple[int, ...]
    generation: tuple[int, ...]
    paused: tuple[int, ...]
    waiting: tuple[int, ...]

    @property
    def used(self) -> int:
        """Blocks that some request owns."""
        return sum(bool(of) for of in self.owners)


def replay(
    requests: Sequence[tuple[int | Sequence[int], int]],
    num_blocks: int,
    *,
    tokens_per_block: int = 32,
    max_batch_size: int = 8,
    max_num_tokens: int = 8192,
    policy: str = "GUARANTEED_NO_EVICT",
    enable_block_reuse: bool = False,
    enable_chunked_context: bool = False,
) -> list[Step]:
    """Every step until all requests are done.

    Args:
        requests: (prompt, new tokens) of each; the prompt as token ids, or as its length when no two are to share a token.
        num_blocks: blocks in the pool.

    Raises:
        ValueError: for a request that can never run in this pool.
    """
    cache = KvCacheManager(num_blocks, tokens_per_block, enable_block_reuse)
    scheduler: Scheduler[Job] = Scheduler(
        cache, max_batch_size, max_num_tokens, policy=policy, enable_chunked_context=enable_chunked_context
    )
    jobs = []
    for number, (prompt, new) in enumerate(requests):
        ids = [number * 10**6 + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
        jobs.append(Job(number, ids, new))
        scheduler.add(jobs[-1])
    steps: list[Step] = []
    while scheduler.waiting or scheduler.running:
        batch = scheduler.schedule()
        steps.append(
            Step(
                _owners(cache, [job for job in jobs if job in scheduler.running]),
                tuple(chunk.request.request_id for chunk in batch.context),
                tuple(job.request_id for job in batch.generation),
                tuple(job.request_id for job in batch.paused),
                tuple(job.request_id for job in scheduler.waiting),
            )
        )
        for chunk in batch.context:
            if chunk.is_last:
                chunk.request.token_ids.append(-1 - len(chunk.request.token_ids))
        for job in batch.generation:
            job.token_ids.append(-1 - len(job.token_ids))
        scheduler.finish([job for job in scheduler.running if len(job.token_ids) >= job.max_new_tokens])
    return steps


def _owners(cache: KvCacheManager, running: Sequence[Job]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(cache.num_blocks)]
    for job in running:
        for block in cache.blocks(job.request_id):
            found[block].append(job.request_id)
    return tuple(map(tuple, found))
