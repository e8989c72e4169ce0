"""Runs one scheduled batch on the engine, without waiting for it, and gives its tokens when they are asked for.

Two ways lead through the engine. Any batch can be packed and run by the graph (`step_inputs`). A batch in which every request
generates runs under a CUDA graph where the engine allows it (`cuda_graphs`). Either way the most likely tokens are chosen on
the device, so that a next step can start from them before they have been read.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from trtllm_workshop.reference.cuda_graphs import PendingTokens, row_reference
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.rank_step import RankStep, StepResult
from trtllm_workshop.reference.ranks import Ranks
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.scheduler import ContextChunk, ScheduledBatch, Scheduler
from trtllm_workshop.reference.step_inputs import BlockTables, PackedStep, pack
from trtllm_workshop.reference.step_plan import GraphStep, StepPlan


class Place(NamedTuple):
    """The rows `start` … `end - 1` of a step's logits belong to this request; `chunk` is None in the generation phase."""

    request: Request
    chunk: ContextChunk[Request] | None
    start: int
    end: int


@dataclass
class LaunchedStep:
    """A step that the device works on.

    Attributes:
        batch: what was scheduled.
        rows: rows of logits that each request has, context chunks first.
        result: what it leaves on the device; logits only when more than the most likely tokens is needed.
        pending: the most likely token of each row, on their way to the host.
        plain: whether the most likely tokens are all that is wanted, so that the next step may start without the host.
        started: when it was launched, in seconds of time.perf_counter.
        row_of: the row from which each request's next token comes, by request id.
    """

    batch: ScheduledBatch[Request]
    rows: list[int]
    result: StepResult
    pending: PendingTokens
    plain: bool
    started: float
    row_of: dict[int, int] = field(init=False)

    @property
    def logits(self) -> torch.Tensor | None:
        return self.result.logits

    def __post_init__(self) -> None:
        chooses = (place for place in self.places() if place.chunk is None or place.chunk.is_last)
        self.row_of = {place.request.request_id: place.end - 1 for place in chooses}

    def places(self) -> Iterator[Place]:
        """Whose the rows of logits are, in order."""
        parts = [(chunk.request, chunk) for chunk in self.batch.context]
        start = 0
        for (request, chunk), count in zip(
            [*parts, *((r, None) for r in self.batch.generation)], self.rows, strict=True
        ):
            yield Place(request, chunk, start, start + count)
            start += count


class StepRunner:
    """Plans and launches steps, on rank 0 of the engine; the other ranks follow the plans.

    Args:
        steps: runs this rank's share of a step.
        kv_cache: knows the blocks of each request.
        scheduler: knows how many of a request's tokens are in the cache.
        device: where the engine runs.
        ranks: the other ranks, if there are any.
    """

    def __init__(
        self,
        steps: RankStep,
        kv_cache: KvCacheManager,
        scheduler: Scheduler[Request],
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.steps = steps
        self._kv_cache, self._scheduler, self._device, self._ranks = kv_cache, scheduler, device, ranks
        self._tables = BlockTables()

    @property
    def runs_ahead(self) -> bool:
        """Whether it pays to launch a step before the tokens of the one before are known: where the device works alone.

        With pipeline stages the first stage does not have those tokens either.
        """
        return self._device.type == "cuda" and (self._ranks is None or self._ranks.mapping.pp_size == 1)

    def launch(self, batch: ScheduledBatch[Request], before: LaunchedStep | None) -> LaunchedStep:
        """Queue a step.

        Args:
            batch: what to run, not empty.
            before: the step before, if its tokens have not been given to its requests yet.

        Raises:
            RankError: when another rank has ended or does not answer.
        """
        started = time.perf_counter()
        plain = all(r.plain for r in batch.generation) and all(c.request.plain for c in batch.context)
        newest = {}
        if before is not None:
            newest = {request_id: row_reference(row) for request_id, row in before.row_of.items()}
        work: PackedStep | GraphStep
        if self.steps.graphs is not None and not batch.context:
            work, rows = self._graph_step(batch, newest), [1] * len(batch.generation)
        else:
            work, rows = pack(batch, self._kv_cache, self._scheduler.tokens_in_cache, newest, self._tables)
        plan = StepPlan(work, before is not None, not plain)
        previous = None if before is None else before.result
        if self._ranks is None:
            result = self.steps.run(plan, previous)
        else:
            with self._ranks.together():
                self._ranks.announce(plan)
                result = self.steps.run(plan, previous)
        return LaunchedStep(batch, rows, result, PendingTokens(result.tokens), plain, started)

    def tokens_of(self, launched: LaunchedStep) -> list[int]:
        """Wait for the most likely token of each row.

        Raises:
            RankError: when another rank has ended meanwhile.
        """
        if self._ranks is None:
            return launched.pending.wait()
        with self._ranks.together():
            return launched.pending.wait()

    def _graph_step(self, batch: ScheduledBatch[Request], newest: dict[int, int]) -> GraphStep:
        tokens, lengths, blocks = [], [], []
        for request in batch.generation:
            token = newest.get(request.request_id)
            tokens.append(request.token_ids[-1] if token is None else token)
            lengths.append(self._scheduler.tokens_in_cache(request))
            blocks.append(self._kv_cache.blocks(request.request_id))
        return GraphStep(tokens, lengths, blocks)
