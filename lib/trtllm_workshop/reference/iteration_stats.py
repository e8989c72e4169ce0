"""Statistics of the executor's iterations, under the names of TensorRT-LLM's own JSON (`IterationStats`).

What the reference does not measure is left out, never filled in.
"""

from __future__ import annotations

import contextlib
from collections import deque
from dataclasses import asdict
from datetime import datetime
from typing import Any

from trtllm_workshop.reference.kv_cache import KvCacheStats

# TensorRT-LLM keeps as many unless LLM(iter_stats_max_iterations=…) says otherwise.
MOST_ITERATIONS = 1000


class IterationStats:
    """Keeps the statistics of the latest iterations until somebody takes them.

    Args:
        most_active: how many requests a step can serve.
        most: iterations kept; older ones are dropped.

    Raises:
        ValueError: when `most` is negative.
    """

    def __init__(self, most_active: int, most: int | None = None) -> None:
        most = MOST_ITERATIONS if most is None else most
        if most < 0:
            raise ValueError(f"iter_stats_max_iterations={most} must be 0 (keep none) or more")
        self._kept: deque[dict[str, Any]] = deque(maxlen=most)
        self.iterations = 0
        self.most_active = most_active

    def add(
        self,
        seconds: float,
        active: int,
        queued: int,
        completed: int,
        kv_cache: KvCacheStats,
        contexts: int,
        context_tokens: int,
        generations: int,
        paused: int,
    ) -> None:
        """Record an iteration. `active`, `queued` and `kv_cache` as they are when it has ended."""
        self.iterations += 1
        if not self._kept.maxlen:
            return
        self._kept.append(
            {
                "timestamp": datetime.now().strftime("%m-%d-%Y %H:%M:%S.%f"),
                "iter": self.iterations,
                "iterLatencyMS": seconds * 1e3,
                "numActiveRequests": active,
                "numQueuedRequests": queued,
                "numCompletedRequests": completed,
                "maxNumActiveRequests": self.most_active,
                "kvCacheStats": asdict(kv_cache),
                "inflightBatchingStats": {
                    "numScheduledRequests": contexts + generations,
                    "numContextRequests": contexts,
                    "numGenRequests": generations,
                    "numPausedRequests": paused,
                    "numCtxTokens": context_tokens,
                    "avgNumDecodedTokensPerIter": 1.0 if generations else 0.0,
                },
            }
        )

    def take(self) -> list[dict[str, Any]]:
        """The iterations since the last call, oldest first. Safe while another thread adds."""
        taken = []
        # Not `while self._kept`: another thread may take the last one between the question and the answer.
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._kept.popleft())
        return taken
