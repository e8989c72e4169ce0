"""Chunked context: how many prompt tokens each request in the context phase computes in one step."""

from __future__ import annotations

from collections.abc import Sequence

CONTEXT_CHUNKING_POLICIES = ("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS")


def chunk_sizes(remaining: Sequence[int], budget: int, unit: int, policy: str) -> list[int]:
    """Share the tokens of one step among the prompts that are waiting to be computed.

    Args:
        remaining: tokens that each prompt still needs, the oldest request first.
        budget: tokens that the step has left for them.
        unit: a chunk that does not end its prompt is a multiple of this.
        policy: "FIRST_COME_FIRST_SERVED": the oldest gets all that it can use, then the next one. "EQUAL_PROGRESS": each
            gets one unit after the other, until nothing is left.

    Returns:
        Tokens for each, 0 for those that have to wait.
    """
    sizes = [0] * len(remaining)
    if policy == "FIRST_COME_FIRST_SERVED":
        for index, need in enumerate(remaining):
            sizes[index] = need if need <= budget else budget // unit * unit
            budget -= sizes[index]
        return sizes
    open_ones = list(range(len(remaining)))
    while open_ones:
        still_open = []
        for index in open_ones:
            step = min(unit, remaining[index] - sizes[index])
            if 0 < step <= budget:
                sizes[index] += step
                budget -= step
                still_open.append(index)
        open_ones = still_open
    return sizes
