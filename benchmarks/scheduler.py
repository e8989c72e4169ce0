"""What does scheduling cost in a step? Scheduler and KV-cache manager alone, without a model.

Requests of 1,000 prompt tokens that each make 1,000 tokens run at full batch; one that ends is replaced at once, so that
starting, growing, ending and (with reuse) looking up are all in the figure. Each figure is microseconds per step of
`schedule` + `finish` in processor time, the median over the rounds. A GPU step of such a batch takes some ten milliseconds.

    .venv/bin/python benchmarks/scheduler.py [--steps 300] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from dataclasses import dataclass, field

from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.scheduler import Scheduler

PROMPT, NEW, PER_BLOCK = 1000, 1000, 32


@dataclass
class Job:
    """A request; its first tokens are shared with all others, the rest are its own."""

    request_id: int
    max_new_tokens: int = NEW
    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_token_ids = [*range(PROMPT // 2), *[self.request_id] * (PROMPT // 2)]


def step_cost(batch: int, policy: str, reuse: bool, steps: int) -> float:
    """Mean seconds per step with `batch` running requests."""
    blocks = batch * -(-(PROMPT + NEW) // PER_BLOCK)
    scheduler: Scheduler[Job] = Scheduler(
        KvCacheManager(blocks, PER_BLOCK, reuse), batch, 8192, policy, enable_chunked_context=True
    )
    number = 0
    spent, counted = 0.0, 0
    ages: dict[int, int] = {}
    while counted < steps:
        while len(scheduler.waiting) < 16:
            # Spread out over their lives, so that every step ends and starts some.
            scheduler.add(Job(number, NEW - (number * 7919) % (NEW - 1)))
            number += 1
        start = time.thread_time()
        chosen = scheduler.schedule()
        middle = time.thread_time()
        ended = []
        for request in [c.request for c in chosen.context if c.is_last] + chosen.generation:
            request.token_ids.append(request.request_id)
            ages[request.request_id] = ages.get(request.request_id, 0) + 1
            if ages[request.request_id] >= request.max_new_tokens:
                ended.append(request)
        again = time.thread_time()
        scheduler.finish(ended)
        if len(scheduler.running) >= 0.98 * batch:  # once the batch is full
            spent += time.thread_time() - again + middle - start
            counted += 1
    return spent / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    figures = {}
    for batch in (64, 1024):
        for policy in ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION"):
            for reuse in (False, True):
                costs = [step_cost(batch, policy, reuse, options.steps) for _ in range(options.rounds)]
                name = f"{batch}_{policy.lower()}_{'reuse' if reuse else 'plain'}"
                figures[name] = round(statistics.median(costs) * 1e6, 1)
                print(
                    f"{batch:5} requests  {policy:20} reuse {'on ' if reuse else 'off'}  {figures[name]:8.1f} µs a step"
                )
    print(json.dumps({"us_per_step": figures, "python": platform.python_version(), "machine": platform.machine()}))


if __name__ == "__main__":
    main()
