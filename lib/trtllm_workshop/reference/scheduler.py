"""What the next step computes: in-flight batching. No tensors here.

In every step two questions are answered, as in TensorRT-LLM. The capacity scheduler says which requests may own KV-cache
blocks. Then the step is filled up to `max_num_tokens`: first one token for every request in the generation phase, then
prompts in the order of arrival. A prompt that does not fit holds back those behind it, which keeps long requests from
starving; with chunked context it is cut instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic

from trtllm_workshop.reference.capacity_scheduler import CapacityScheduler, Job, Progress
from trtllm_workshop.reference.context_chunking import CONTEXT_CHUNKING_POLICIES, chunk_sizes
from trtllm_workshop.reference.kv_cache import KvCacheManager


@dataclass(frozen=True)
class ContextChunk(Generic[Job]):
    """Tokens `start` … `start + count - 1` of a request's prompt (and, after a pause, of its tokens made so far).

    The last chunk (`is_last`) gives the logits for the next token; the others only fill the cache.
    """

    request: Job
    start: int
    count: int
    is_last: bool


@dataclass(frozen=True)
class ScheduledBatch(Generic[Job]):
    """One step.

    Attributes:
        context: what is computed of prompts.
        generation: requests that process one token each.
        paused: requests that were taken out to make room, and wait again.
    """

    context: list[ContextChunk[Job]]
    generation: list[Job]
    paused: list[Job]

    @property
    def num_tokens(self) -> int:
        """Packed tokens of the step."""
        return len(self.generation) + sum(chunk.count for chunk in self.context)


@dataclass
class Scheduler(Generic[Job]):
    """Keeps the waiting line and the running requests.

    A step may be scheduled before the tokens of the last one are known: the count of each request's tokens is kept here
    and moves in `schedule`. Its `token_ids` are read when it is admitted, paused and finished.

    Args:
        kv_cache: the block pool.
        max_batch_size: most requests that run at the same time.
        max_num_tokens: most packed tokens in one step.
        policy: the capacity scheduler's policy.
        enable_chunked_context: whether a prompt may be spread over several steps.
        chunk_unit: a chunk that does not end its prompt is a multiple of this; tokens_per_block when left out.
        context_chunking_policy: how prompts share a step.

    Raises:
        ValueError: for an unknown policy, and for a chunk unit that is no multiple of tokens_per_block.
    """

    kv_cache: KvCacheManager
    max_batch_size: int
    max_num_tokens: int
    policy: str = "GUARANTEED_NO_EVICT"
    enable_chunked_context: bool = False
    chunk_unit: int | None = None
    context_chunking_policy: str = "FIRST_COME_FIRST_SERVED"
    waiting: deque[Job] = field(default_factory=deque, init=False)
    capacity: CapacityScheduler[Job] = field(init=False)
    _uncommitted: list[Progress[Job]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self.capacity = CapacityScheduler(self.kv_cache, self.policy)
        if self.context_chunking_policy not in CONTEXT_CHUNKING_POLICIES:
            known = ", ".join(CONTEXT_CHUNKING_POLICIES)
            raise ValueError(
                f"context_chunking_policy={self.context_chunking_policy!r} is unknown; choose one of {known}"
            )
        for name in ("max_batch_size", "max_num_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        size = self.kv_cache.tokens_per_block
        unit = size if self.chunk_unit is None else self.chunk_unit
        if unit < 1 or unit % size:
            raise ValueError(
                f"chunk_unit={unit} must be a multiple of tokens_per_block ({size}), so that a chunk ends with a block"
            )
        # A step too small for a whole unit is filled by blocks, or even token by token.
        self._unit = next(u for u in (unit, size, 1) if u <= self.max_num_tokens)
        self._equal = self.enable_chunked_context and self.context_chunking_policy == "EQUAL_PROGRESS"

    @property
    def running(self) -> list[Job]:
        """The requests that own blocks, the oldest first."""
        return [progress.request for progress in self.capacity.running.values()]

    @property
    def num_running(self) -> int:
        """How many requests own blocks."""
        return len(self.capacity.running)

    def tokens_in_cache(self, request: Job) -> int:
        """Tokens of a running request in the cache, once the step that was scheduled last has run.

        Right after `schedule`, a request of its `generation` list is at position `tokens_in_cache(request) - 1`.

        Raises:
            KeyError: when the request is not running.
        """
        return self.capacity.running[request.request_id].cached

    def add(self, request: Job) -> None:
        """Queue a request.

        Raises:
            ValueError: see `check`.
        """
        self.check(request)
        self.waiting.append(request)

    def check(self, request: Job) -> None:
        """Whether a request can run at all. Reads nothing that changes, so any thread may ask.

        Raises:
            ValueError: when the request could never run: it is empty, or the whole pool or a whole step is too small.
        """
        prompt = len(request.prompt_token_ids)
        if prompt > self.max_num_tokens and not self.enable_chunked_context:
            raise ValueError(
                f"prompt of {prompt} tokens exceeds max_num_tokens ({self.max_num_tokens}) of the engine; build with "
                f"--max_num_tokens {prompt} or more, turn chunked context on, or shorten the prompt"
            )
        self.capacity.refuse_impossible(request)

    def schedule(self) -> ScheduledBatch[Job]:
        """Choose the next step, and count its tokens as computed.

        Requests whose last token has been scheduled are left out until `finish` is called for them.
        """
        running = self.capacity.running
        self._commit_computed()
        filling: list[Progress[Job]] = []
        generating: list[Progress[Job]] = []
        for progress in running.values():
            if progress.cached < progress.length:
                filling.append(progress)
            elif progress.cached < progress.limit:
                generating.append(progress)
        paused = self.capacity.grow([p for p in generating if p.cached >= p.room])
        if paused:
            self.waiting.extendleft(p.request for p in paused)
            filling = [p for p in filling if p.request.request_id in running]
            generating = [p for p in generating if p.request.request_id in running]
        for progress in generating:
            progress.cached += 1
        context = self._fill(filling, self.max_num_tokens - len(generating), may_admit=not paused)
        return ScheduledBatch(context, [p.request for p in generating], [p.request for p in paused])

    def finish(self, requests: Sequence[Job], computed: bool = True) -> None:
        """Take requests out, whether they run or wait, and free their blocks.

        Args:
            requests: the requests; unknown ones are left alone.
            computed: False after a step that failed: what it should have put in the cache must not be found again.
        """
        elsewhere = set()
        for request in requests:
            progress = self.capacity.running.get(request.request_id)
            if progress is None:
                elsewhere.add(request.request_id)
            else:
                self.capacity.stop(progress, computed)
        if elsewhere and self.waiting:
            self.waiting = deque(r for r in self.waiting if r.request_id not in elsewhere)

    def _commit_computed(self) -> None:
        """Make the prompts of the last step findable: they are in the cache before the next step reads it."""
        for progress in self._uncommitted:
            request_id = progress.request.request_id
            if request_id in self.capacity.running:
                self.kv_cache.commit(request_id, progress.context[: progress.cached])
        self._uncommitted.clear()

    def _fill(self, filling: list[Progress[Job]], budget: int, may_admit: bool) -> list[ContextChunk[Job]]:
        """Prompts for the rest of a step: those begun, then as many of the waiting line as get some of it."""
        left = budget - sum(map(self._claim, filling))
        may_admit = may_admit and self.capacity.accepts_new
        while may_admit and self.waiting and left > 0 and len(self.capacity.running) < self.max_batch_size:
            head = self.waiting[0]
            # Without chunked context, only tokens made before a pause can make a context longer than a whole step.
            tokens = len(head.prompt_token_ids) + len(head.token_ids)
            may_be_cut = self.enable_chunked_context or tokens > self.max_num_tokens
            progress = self.capacity.admit(head, left, self._unit if may_be_cut else None)
            if progress is None:
                break
            self.waiting.popleft()
            filling.append(progress)
            left -= self._claim(progress)
        policy = "EQUAL_PROGRESS" if self._equal else "FIRST_COME_FIRST_SERVED"
        sizes = chunk_sizes([p.remaining for p in filling], budget, self._unit, policy) if filling else []
        chunks = []
        for progress, count in zip(filling, sizes, strict=True):
            if count:
                start, progress.cached = progress.cached, progress.cached + count
                chunks.append(ContextChunk(progress.request, start, count, not progress.remaining))
                self._uncommitted.append(progress)
        return chunks

    def _claim(self, progress: Progress[Job]) -> int:
        """Tokens of the step that those behind this request leave to it."""
        return min(self._unit, progress.remaining) if self._equal else progress.remaining
