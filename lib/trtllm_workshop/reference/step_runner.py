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

from trtllm_workshop.reference.cuda_graphs import GenerationGraphs, PendingTokens, resolve_tokens, row_reference
from trtllm_workshop.reference.cuda_kernels import can_capture
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.kv_pool import KvPool
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.scheduler import ContextChunk, ScheduledBatch, Scheduler
from trtllm_workshop.reference.step_inputs import BlockTables, pack


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
        logits: [sum of rows, vocabulary]; None when only the most likely tokens are needed.
        device_tokens: [sum of rows], the most likely token of each row, on the device.
        pending: the same, on their way to the host.
        started: when it was launched, in seconds of time.perf_counter.
        row_of: the row from which each request's next token comes, by request id.
    """

    batch: ScheduledBatch[Request]
    rows: list[int]
    logits: torch.Tensor | None
    device_tokens: torch.Tensor
    pending: PendingTokens
    in_graph: bool
    started: float
    row_of: dict[int, int] = field(init=False)

    @property
    def plain(self) -> bool:
        """Whether the most likely tokens are all that is wanted, so that the next step may start without the host."""
        return self.logits is None

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
    """Launches steps of one engine.

    Args:
        engine: the loaded engine.
        pool: its KV cache, with one spare block on CUDA, for the padding rows of graphs.
        kv_cache: knows the blocks of each request.
        scheduler: knows how many of a request's tokens are in the cache.
    """

    def __init__(self, engine: Engine, pool: KvPool, kv_cache: KvCacheManager, scheduler: Scheduler[Request]) -> None:
        self._engine, self._pool, self._kv_cache, self._scheduler = engine, pool, kv_cache, scheduler
        self._tables = BlockTables()
        self._graphs: GenerationGraphs | None = None
        if can_capture(engine):
            most_blocks = kv_cache.blocks_for(engine.build_config["max_seq_len"])
            self._graphs = GenerationGraphs(
                engine.run, pool.tensor, scheduler.max_batch_size, most_blocks, pool.blocks, pool.tokens_per_block
            )

    @property
    def runs_ahead(self) -> bool:
        """Whether it pays to launch a step before the tokens of the one before are known: where the device works alone."""
        return self._engine.device.type == "cuda"

    def launch(self, batch: ScheduledBatch[Request], before: LaunchedStep | None) -> LaunchedStep:
        """Queue a step.

        Args:
            batch: what to run, not empty.
            before: the step before, if its tokens have not been given to its requests yet.
        """
        started = time.perf_counter()
        plain = all(r.plain for r in batch.generation) and all(c.request.plain for c in batch.context)
        if self._graphs is not None and not batch.context:
            return self._launch_graph(batch, before, self._graphs, not plain, started)
        newest = {}
        if before is not None:
            newest = {request_id: row_reference(row) for request_id, row in before.row_of.items()}
        inputs = pack(batch, self._kv_cache, self._scheduler.tokens_in_cache, newest, self._tables, self._engine.device)
        ids, *rest = inputs.tensors
        if before is not None:
            ids = resolve_tokens(ids, before.device_tokens)
        logits = self._engine.run(ids, *rest, self._pool.tensor, *inputs.cache)
        tokens = logits.argmax(-1)
        return LaunchedStep(
            batch, inputs.rows, None if plain else logits, tokens, PendingTokens(tokens), False, started
        )

    def _launch_graph(
        self,
        batch: ScheduledBatch[Request],
        before: LaunchedStep | None,
        graphs: GenerationGraphs,
        want_logits: bool,
        started: float,
    ) -> LaunchedStep:
        rows = {} if before is None else before.row_of
        tokens, lengths, blocks = [], [], []
        for request in batch.generation:
            row = rows.get(request.request_id)
            tokens.append(request.token_ids[-1] if row is None else row_reference(row))
            lengths.append(self._scheduler.tokens_in_cache(request))
            blocks.append(self._kv_cache.blocks(request.request_id))
        previous = before.device_tokens if before is not None and not before.in_graph else None
        done = graphs.step(tokens, lengths, blocks, previous, want_logits)
        pending = PendingTokens(done.tokens)
        return LaunchedStep(batch, [1] * len(tokens), done.logits, done.tokens, pending, True, started)
