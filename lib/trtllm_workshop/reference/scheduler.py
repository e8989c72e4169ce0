"""Which requests run in the next step: in-flight batching with the policy GUARANTEED_NO_EVICT. No tensors here.

A request is admitted only when the blocks for its prompt and all tokens it may generate are free, so a running request
is never paused. Requests are admitted in the order of arrival; one that does not fit holds back those behind it, which
is what keeps long requests from starving.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trtllm_workshop.reference.kv_cache import KvCacheManager


class Schedulable(Protocol):
    """What the scheduler needs to know about a request."""

    @property
    def request_id(self) -> int: ...

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def max_new_tokens(self) -> int: ...


Job = TypeVar("Job", bound=Schedulable)


@dataclass
class Scheduler(Generic[Job]):
    """Keeps the waiting line and the running batch.

    Args:
        kv_cache: the block pool.
        max_batch_size: most requests in one step.
        max_num_tokens: most packed tokens in one step.
    """

    kv_cache: KvCacheManager
    max_batch_size: int
    max_num_tokens: int
    waiting: deque[Job] = field(default_factory=deque)
    running: list[Job] = field(default_factory=list)

    def add(self, request: Job) -> None:
        """Queue a request.

        Raises:
            ValueError: when the request could never run: the whole pool or a whole step is too small for it.
        """
        prompt, total = len(request.prompt_token_ids), len(request.prompt_token_ids) + request.max_new_tokens
        if prompt > self.max_num_tokens:
            raise ValueError(
                f"prompt of {prompt} tokens exceeds max_num_tokens ({self.max_num_tokens}) of the engine; build with "
                f"--max_num_tokens {prompt} or more, or shorten the prompt"
            )
        if self.kv_cache.blocks_for(total) > self.kv_cache.num_blocks:
            pool = self.kv_cache.num_blocks * self.kv_cache.tokens_per_block
            raise ValueError(
                f"prompt ({prompt}) + max_tokens ({request.max_new_tokens}) need {total} tokens of KV cache, the whole pool "
                f"holds {pool}; raise KvCacheConfig(max_tokens=...) or lower max_tokens"
            )
        self.waiting.append(request)

    def schedule(self) -> tuple[list[Job], list[Job]]:
        """Choose the next step.

        Returns:
            (context requests, generation requests): newly admitted requests, and those that each make one token.
        """
        generation = list(self.running)
        budget = self.max_num_tokens - len(generation)
        context: list[Job] = []
        while self.waiting and len(generation) + len(context) < self.max_batch_size:
            head = self.waiting[0]
            prompt = len(head.prompt_token_ids)
            total = prompt + head.max_new_tokens
            if prompt > budget or not self.kv_cache.can_hold(total):
                break
            self.kv_cache.add_sequence(head.request_id, total)
            context.append(self.waiting.popleft())
            budget -= prompt
        self.running.extend(context)
        return context, generation

    def finish(self, requests: Sequence[Job]) -> None:
        """Take requests out of the batch (or the waiting line) and free their blocks."""
        ended = {r.request_id for r in requests}
        self.running = [r for r in self.running if r.request_id not in ended]
        self.waiting = deque(r for r in self.waiting if r.request_id not in ended)
        for request_id in ended:
            self.kv_cache.remove_sequence(request_id)
