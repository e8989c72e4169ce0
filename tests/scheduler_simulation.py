"""A simulated executor for the scheduler's tests: a pool whose slots remember what was put there, and a model that reads it.

The model is a function of all tokens before the next one. Each slot of the simulated pool holds the tokens, in order, up to
and including its own; before every step each request checks that the slots it reads hold exactly its own prefix. A block
that was reused, given away or shared too early shows as foreign content.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from trtllm_workshop.reference.scheduler import ScheduledBatch, Scheduler


@dataclass
class Work:
    """A request as the scheduler sees it; `lasts` is how many tokens it really makes, at most max_new_tokens."""

    request_id: int
    prompt_token_ids: list[int]
    max_new_tokens: int
    lasts: int = 0
    token_ids: list[int] = field(default_factory=list)
    reads_whole_context: bool = False
    first_token_step: int = -1

    def __post_init__(self):
        self.lasts = self.lasts or self.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        return self.prompt_token_ids + self.token_ids


def next_token(tokens: list[int]) -> int:
    """The simulated model. It knows three tokens only, so that different requests meet the same text by chance."""
    return hash((7, *tokens)) % 3


def alone(work: Work) -> list[int]:
    """What a request makes without any other."""
    tokens = list(work.prompt_token_ids)
    for _ in range(work.lasts):
        tokens.append(next_token(tokens))
    return tokens[len(work.prompt_token_ids) :]


class Simulation:
    """Runs steps as an executor does, at once or one step ahead of the tokens (`overlap`)."""

    def __init__(self, scheduler: Scheduler[Work], overlap: bool = False) -> None:
        self.scheduler, self.cache, self.overlap = scheduler, scheduler.kv_cache, overlap
        self.pool: list[tuple[int, ...] | None] = [None] * (self.cache.num_blocks * self.cache.tokens_per_block)
        self.in_flight: list[Work] = []
        self.ended: list[Work] = []
        self.steps = self.pauses = 0

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def step(self) -> ScheduledBatch[Work]:
        """One step, checked."""
        generating = [p.request for p in self.scheduler.capacity.running.values() if p.remaining <= 0]
        batch = self.scheduler.schedule()
        self.check(batch, generating)
        self.steps += 1
        self.pauses += len(batch.paused)
        made = self.compute(batch)
        if self.overlap:
            # The tokens of the step before arrive only now.
            made, self.in_flight = self.in_flight, made
        self.accept(made)
        return batch

    def failing_step(self) -> list[Work]:
        """A step that is scheduled and then fails: nothing is written, and its requests end."""
        batch = self.scheduler.schedule()
        lost = [chunk.request for chunk in batch.context] + batch.generation
        self.scheduler.finish(lost, computed=False)
        self.ended += lost
        self.in_flight = [r for r in self.in_flight if r not in lost]
        return lost

    def cancel(self, request: Work) -> None:
        self.scheduler.finish([request])
        self.ended.append(request)
        self.in_flight = [r for r in self.in_flight if r is not request]

    def compute(self, batch: ScheduledBatch[Work]) -> list[Work]:
        """Write the step's tokens into the pool, then read every prefix. Returns the requests that make a token."""
        # The newest token of a request in flight is known to the machine, although not to the scheduler.
        known = {r.request_id: [*r.tokens, next_token(r.tokens)] for r in self.in_flight}
        parts = [(chunk.request, chunk.request.tokens, chunk.start, chunk.count) for chunk in batch.context]
        for request in batch.generation:
            tokens = known.get(request.request_id, request.tokens)
            position = self.scheduler.tokens_in_cache(request) - 1
            assert position == len(tokens) - 1, "a generation step processes the newest token"
            parts.append((request, tokens, position, 1))
        written: set[int] = set()
        for request, tokens, start, count in parts:
            for position, slot in enumerate(self.cache.slots(request.request_id, start, count), start):
                assert slot not in written, "two requests write into one slot"
                written.add(slot)
                self.pool[slot] = tuple(tokens[: position + 1])
        for request, tokens, start, count in parts:
            for position, slot in enumerate(self.cache.slots(request.request_id, 0, start + count)):
                assert self.pool[slot] == tuple(tokens[: position + 1]), "a request reads foreign content"
        return [chunk.request for chunk in batch.context if chunk.is_last] + batch.generation

    def accept(self, made: list[Work]) -> None:
        for request in made:
            if request in self.ended:
                continue
            request.token_ids.append(next_token(request.tokens))
            if len(request.token_ids) == 1:
                request.first_token_step = self.steps
        done = [r for r in made if len(r.token_ids) >= r.lasts and r not in self.ended]
        self.scheduler.finish(done)
        self.ended += done

    def check(self, batch: ScheduledBatch[Work], generating: list[Work]) -> None:
        """What must hold after every `schedule`; `generating` had their whole context in the cache before it."""
        scheduler, size = self.scheduler, self.cache.tokens_per_block
        requests = [chunk.request for chunk in batch.context] + batch.generation
        ids = [r.request_id for r in requests]
        running = [r.request_id for r in scheduler.running]
        assert len(set(ids)) == len(ids), "a request is scheduled once a step"
        assert set(ids) <= set(running) and len(running) <= scheduler.max_batch_size
        assert batch.num_tokens <= scheduler.max_num_tokens
        assert not batch.paused or scheduler.policy == "MAX_UTILIZATION", "what has started is never paused"
        assert [r.request_id for r in batch.paused] == [r.request_id for r in scheduler.waiting][: len(batch.paused)][
            ::-1
        ]
        due = [r.request_id for r in generating if self.due(r) and r not in batch.paused]
        assert [r.request_id for r in batch.generation] == due, "generation requests go first, whatever else there is"
        for chunk in batch.context:
            end, length = chunk.start + chunk.count, len(chunk.request.tokens)
            assert chunk.count > 0 and scheduler.tokens_in_cache(chunk.request) == end
            assert chunk.is_last == (end == length)
            if not chunk.is_last:
                assert scheduler.enable_chunked_context or length > scheduler.max_num_tokens, "prompts stay whole"
                assert end % size == 0 or scheduler.max_num_tokens < size, "a chunk in the middle ends with a block"
            if chunk.request.reads_whole_context:
                assert chunk.start == 0 or self.steps, "computed from the first token on"
        self.count_blocks()

    def due(self, request: Work) -> bool:
        """Whether a request in the generation phase has a token left to make that is not in flight."""
        in_flight = sum(r is request for r in self.in_flight)
        return len(request.token_ids) + in_flight < request.max_new_tokens

    def count_blocks(self) -> None:
        """References add up, and every block is in exactly one place."""
        cache, running = self.cache, self.scheduler.running
        owned = [block for r in running for block in cache.blocks(r.request_id)]
        free = [*cache._empty, *cache._cached]
        assert sorted([*free, *set(owned)]) == list(range(cache.num_blocks)), "no block is lost, or free and used"
        assert [owned.count(block) for block in range(cache.num_blocks)] == cache._references
        stats = cache.stats()
        assert (stats.usedNumBlocks, stats.freeNumBlocks) == (len(set(owned)), len(free))
        if self.scheduler.policy != "MAX_UTILIZATION":
            totals = {r.request_id: len(r.prompt_token_ids) + r.max_new_tokens for r in running}
            open_promises = sum(cache.blocks_for(n) - len(cache.blocks(request)) for request, n in totals.items())
            assert open_promises <= len(free), "what was promised is there"
