"""Which requests may own KV-cache blocks: the capacity scheduler, with the policies of TensorRT-LLM. No tensors here.

* GUARANTEED_NO_EVICT: a request starts only when the blocks for its prompt and all tokens that it and the running ones
  may still make are certain. What has started is never paused. Blocks are handed out as they are needed; until then they
  are only promised.
* MAX_UTILIZATION: a request starts when its prompt fits. When the pool runs out, the youngest running request is paused:
  it gives its blocks back and computes its tokens again later, as far as block reuse does not find them. The oldest
  always goes on, so everything ends.
* STATIC_BATCH: as GUARANTEED_NO_EVICT, but new requests start only when all requests of the last batch have ended. The
  way before in-flight batching, to compare with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from trtllm_workshop.reference.kv_cache import KvCacheManager

CAPACITY_SCHEDULER_POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH")


class Schedulable(Protocol):
    """What a scheduler needs to know about a request.

    A request that also says `reads_whole_context` is computed from its first token on: nothing of it is looked up.
    """

    @property
    def request_id(self) -> int: ...

    @property
    def prompt_token_ids(self) -> list[int]: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def max_new_tokens(self) -> int: ...


Job = TypeVar("Job", bound=Schedulable)


@dataclass(eq=False, slots=True)
class Progress(Generic[Job]):
    """A running request, as far as it has been scheduled. All numbers are tokens, but for `promised`."""

    request: Job
    context: list[int]  # the tokens to compute before the next one can be chosen
    length: int  # of the context
    cached: int  # in the cache, those of the step that was scheduled last included
    room: int  # that its blocks hold
    limit: int  # in the cache when its last token has been chosen; that one is never put there
    promised: int  # blocks that it may still ask for and is certain to get

    @property
    def remaining(self) -> int:
        """Tokens of its context that are still to be computed; 0 or less in the generation phase."""
        return self.length - self.cached


@dataclass
class CapacityScheduler(Generic[Job]):
    """Starts requests, lets them grow, pauses and stops them, all by the blocks that there are.

    Args:
        kv_cache: the block pool.
        policy: one of CAPACITY_SCHEDULER_POLICIES.

    Raises:
        ValueError: for an unknown policy.
    """

    kv_cache: KvCacheManager
    policy: str = "GUARANTEED_NO_EVICT"
    running: dict[int, Progress[Job]] = field(default_factory=dict, init=False)  # by request id, the oldest first
    promised: int = field(default=0, init=False)  # blocks, over all running requests

    def __post_init__(self) -> None:
        if self.policy not in CAPACITY_SCHEDULER_POLICIES:
            known = ", ".join(CAPACITY_SCHEDULER_POLICIES)
            raise ValueError(f"capacity_scheduler_policy={self.policy!r} is unknown; choose one of {known}")

    def refuse_impossible(self, request: Job) -> None:
        """Check that a request can run at all, alone in the pool.

        Raises:
            ValueError: with the numbers, when it can not.
        """
        prompt, total = len(request.prompt_token_ids), len(request.prompt_token_ids) + request.max_new_tokens
        if not prompt or request.max_new_tokens < 1:
            raise ValueError(
                f"request {request.request_id} has {prompt} prompt tokens and may make {request.max_new_tokens}; "
                "it needs at least one of each"
            )
        if self.kv_cache.blocks_for(total) > self.kv_cache.num_blocks:
            pool = self.kv_cache.num_blocks * self.kv_cache.tokens_per_block
            raise ValueError(
                f"prompt ({prompt}) + max_tokens ({request.max_new_tokens}) need {total} tokens of KV cache, the whole pool "
                f"holds {pool}; raise KvCacheConfig(max_tokens=...) or lower max_tokens"
            )

    @property
    def accepts_new(self) -> bool:
        """Whether the policy lets requests start now, if there are blocks for them."""
        return not (self.policy == "STATIC_BATCH" and self.running)

    def admit(self, request: Job, most_tokens: int, unit: int | None) -> Progress[Job] | None:
        """Start a request, with the blocks for its whole context, if the pool and the step have room for it.

        Args:
            request: the request.
            most_tokens: tokens that the step has left.
            unit: tokens of the smallest part of its context that is worth starting for; None for the whole context.

        Returns:
            None when there is no room.
        """
        cache = self.kv_cache
        available = cache.free_blocks - self.promised
        if not available:  # at least the last token needs a block of its own
            return None
        made = request.token_ids
        context = [*request.prompt_token_ids, *made] if made else request.prompt_token_ids
        total = len(request.prompt_token_ids) + request.max_new_tokens
        certain = len(context) if self.policy == "MAX_UTILIZATION" else total
        # Where the logits of all prompt tokens are asked for, all of them are computed.
        looked_up = [] if getattr(request, "reads_whole_context", False) else context
        fit = cache.fit(looked_up, certain)
        remaining = len(context) - fit.cached_tokens
        if fit.free_blocks > available or (remaining if unit is None else min(unit, remaining)) > most_tokens:
            return None
        cached = cache.add_sequence(request.request_id, looked_up)
        cache.reserve(request.request_id, len(context))
        owned = len(cache.blocks(request.request_id))
        promised = cache.blocks_for(certain) - owned
        room = owned * cache.tokens_per_block
        progress = Progress(request, context, len(context), cached, room, total - 1, promised)
        self.promised += promised
        self.running[request.request_id] = progress
        return progress

    def grow(self, full: list[Progress[Job]]) -> list[Progress[Job]]:
        """Give each of these requests a block for its next token, pausing the youngest for it.

        Args:
            full: running requests in the generation phase whose blocks are full, the oldest first.

        Returns:
            The paused requests, the youngest first: running ones of either phase, under MAX_UTILIZATION only.
        """
        paused: list[Progress[Job]] = []
        for progress in full:
            request_id = progress.request.request_id
            while self.policy == "MAX_UTILIZATION" and request_id in self.running and not self.kv_cache.free_blocks:
                youngest = next(reversed(self.running.values()))
                self.stop(youngest)
                paused.append(youngest)
            if request_id in self.running:
                self.kv_cache.reserve(request_id, progress.cached + 1)
                progress.room += self.kv_cache.tokens_per_block
                if progress.promised:
                    progress.promised -= 1
                    self.promised -= 1
        return paused

    def stop(self, progress: Progress[Job], computed: bool = True) -> None:
        """Take a running request's blocks back.

        Args:
            progress: the running request.
            computed: whether its tokens really came into the cache. Its full blocks stay findable then, as far as their
                tokens are known.
        """
        request = progress.request
        if computed:
            known = [*request.prompt_token_ids, *request.token_ids]
            self.kv_cache.commit(request.request_id, known[: progress.cached])
        self.kv_cache.remove_sequence(request.request_id)
        self.promised -= progress.promised
        del self.running[request.request_id]
