"""Steps that an engine runs before its first request, so that no request waits for what happens once.

On a GPU the first step of every kind is slow: kernels are compiled or loaded, matrix products choose an algorithm, CUDA graphs are
recorded, memory is taken from the driver. Seen on an H200 with a model of 135 million parameters: 138 ms to the first token of all,
20 ms for a step with a number of requests that had not been met, 0.7 ms for a usual one. The steps here do that before the engine
is said to be ready. They write to a block of the pool that no request gets.

On a processor nothing of this exists, and nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trtllm_workshop.reference.step_inputs import PackedStep
from trtllm_workshop.reference.step_plan import StepPlan

MOST_TOKENS = 8192  # larger steps run the same kernels as this one


def warm_up_plans(
    block: int, tokens_per_block: int, max_batch_size: int, max_num_tokens: int, max_seq_len: int, chunks: bool
) -> Iterator[StepPlan]:
    """One step of each kind that an engine can meet, the largest first, whose memory the others then share.

    Args:
        block: number of the block that all requests of these steps share.
        tokens_per_block, max_batch_size, max_num_tokens, max_seq_len: of the engine.
        chunks: whether context steps may read cached tokens.
    """
    most = min(max_num_tokens, MOST_TOKENS)
    sizes = {most} | {1 << power for power in range(most.bit_length()) if 1 << power < most}
    for size in sorted(sizes, reverse=True):
        longest = min(size, max_seq_len)
        count = min(size // longest, max_batch_size)
        yield _step([(longest, 0)] * count, 0, block, tokens_per_block)
        if count > 1 or size < 4:
            continue
        if chunks and longest + 1 < max_seq_len:
            past = min(max_seq_len - longest, tokens_per_block)
            yield _step([(longest, past)], 0, block, tokens_per_block)
        if max_batch_size > 2 and size + 2 <= max_num_tokens:
            yield _step([(longest, 0)], 2, block, tokens_per_block)


def _step(contexts: list[tuple[int, int]], generations: int, block: int, per_block: int) -> StepPlan:
    """A step of context chunks (new tokens, tokens before them) and of requests that generate their second token."""
    requests = [*contexts, *[(1, 1)] * generations]
    positions = np.concatenate([np.arange(past, past + new) for new, past in requests])
    lengths = np.array([new for new, _ in requests])
    totals = np.array([new + past for new, past in requests])
    blocks = -(-int(totals.max()) // per_block)
    types = [0] * len(contexts) + [1] * generations
    slots = block * per_block + positions % per_block
    table = np.full((len(requests), blocks), block, dtype=np.int64)
    ids = np.zeros(len(positions), dtype=np.int64)
    last = np.cumsum(lengths) - 1
    return StepPlan(PackedStep(ids, positions, slots, last, types, lengths, totals, table), False, False)
