"""What a step does, in plain integers: rank 0 decides it, and every rank of the engine carries it out.

The scheduler, the block manager and the sampler live on rank 0 alone. The other ranks need no requests and no prompts: they
run the same packed tokens over the same block numbers, each in its own pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trtllm_workshop.reference.step_inputs import PackedStep

END, PACKED, IN_GRAPH = 0, 1, 2
HEADER = 7


@dataclass(frozen=True)
class GraphStep:
    """The arguments of `GenerationGraphs.step`: of each request the newest token, its length, and its blocks."""

    tokens: Sequence[int]
    lengths: Sequence[int]
    blocks: Sequence[list[int]]


@dataclass(frozen=True)
class StepPlan:
    """One step.

    Attributes:
        work: what is run.
        follows: whether tokens may refer to rows of the step before.
        want_logits: whether rank 0 reads the logits; otherwise the most likely tokens are enough.
    """

    work: PackedStep | GraphStep
    follows: bool
    want_logits: bool


def encode(plan: StepPlan | None) -> np.ndarray:
    """The plan as int64 numbers; None, for the end, as well."""
    if plan is None:
        return np.array([END], dtype=np.int64)
    work, flags = plan.work, [plan.follows, plan.want_logits]
    if isinstance(work, GraphStep):
        counts = [len(blocks) for blocks in work.blocks]
        flat = [block for blocks in work.blocks for block in blocks]
        return np.array(
            [IN_GRAPH, *flags, len(counts), 0, 0, 0, *work.tokens, *work.lengths, *counts, *flat], dtype=np.int64
        )
    header = [PACKED, *flags, len(work.ids), len(work.last), *work.table.shape]
    columns = (work.ids, work.positions, work.slots, work.last, work.types, work.lengths, work.totals)
    return np.concatenate([np.asarray(c, dtype=np.int64) for c in (header, *columns, work.table.reshape(-1))])


def decode(numbers: np.ndarray) -> StepPlan | None:
    """The plan that `encode` made these numbers of.

    Raises:
        ValueError: for numbers that are no plan.
    """
    kind = int(numbers[0]) if len(numbers) else -1
    if kind == END:
        return None
    if kind not in (PACKED, IN_GRAPH):
        raise ValueError(f"a step plan of kind {kind}: rank 0 and this rank run different versions of the library")
    follows, want_logits = bool(numbers[1]), bool(numbers[2])
    sizes, rest = [int(n) for n in numbers[3:HEADER]], numbers[HEADER:]
    if kind == IN_GRAPH:
        tokens, lengths, counts, flat = _cut(rest, [sizes[0]] * 3)
        blocks = [piece.tolist() for piece in np.split(flat, np.cumsum(counts)[:-1])]
        return StepPlan(GraphStep(tokens.tolist(), lengths.tolist(), blocks), follows, want_logits)
    count, chosen, requests, width = sizes
    ids, positions, slots, last, types, lengths, totals, table = _cut(rest, [count] * 3 + [chosen] + [requests] * 3)
    packed = PackedStep(ids, positions, slots, last, types, lengths, totals, table.reshape(requests, width))
    return StepPlan(packed, follows, want_logits)


def _cut(numbers: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Pieces of these sizes, and what is left as the last one."""
    return np.split(numbers, np.cumsum(sizes))
