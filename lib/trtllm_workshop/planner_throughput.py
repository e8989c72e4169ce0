"""The most that queued requests give: every request is there at the start, as in the published runs of TensorRT-LLM.

Requests run in waves: so many at once as the KV cache holds. A wave's prompts are read in steps of at most max_num_tokens
tokens, into which the answers that are under way are mixed; the steps that are left over make answers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trtllm_workshop.planner_gpus import PlanProblem
from trtllm_workshop.planner_memory import CONTEXT_BYTES, buffer_bytes, kv_pool, largest_batch
from trtllm_workshop.planner_work import Engine, Work

# The defaults of TensorRT-LLM's BuildConfig.
MAX_BATCH_SIZE = 2048
MAX_NUM_TOKENS = 8192


@dataclass(frozen=True)
class Load:
    """`requests` of `prompt` tokens each that ask for `answer` tokens each, all queued at once."""

    prompt: int
    answer: int
    requests: int


@dataclass(frozen=True)
class Limits:
    """Build and run settings that decide how much is done at once."""

    max_batch_size: int = MAX_BATCH_SIZE
    max_num_tokens: int = MAX_NUM_TOKENS
    kv_fraction: float = 0.9


def pool_tokens(engine: Engine, limits: Limits, used_by_others: float = 0) -> int:
    """Tokens that the KV cache of one rank holds; 0 where not even the weights fit."""
    buffers = CONTEXT_BYTES + buffer_bytes(engine.spec, engine.split, limits.max_num_tokens, limits.max_batch_size)
    return kv_pool(
        engine.gpu.memory, engine.weights, engine.kv_per_token, limits.kv_fraction, used_by_others, buffers
    ).tokens


@dataclass(frozen=True)
class Wave:
    """`batch` requests from their first prompt token to their last answer token: steps with prompts, and without.

    `mixed` and `pure` are the work of ONE such step on one stage; with several stages, steps of part of the batch follow
    each other through them, and every stage is taken to be always busy.
    """

    batch: int
    mixed_steps: float
    mixed: Work
    pure_steps: float
    pure: Work

    @property
    def work(self) -> Work:
        return self.mixed.times(self.mixed_steps) + self.pure.times(self.pure_steps)


def wave(engine: Engine, load: Load, batch: int, limits: Limits) -> Wave:
    """Work of one step of each kind (averages over the wave), and how many steps there are of it.

    An answer's token reads the prompt and the answer so far: prompt + answer / 2 tokens on average. The first token of an
    answer comes with the prompt, so an answer takes answer - 1 further steps.
    """
    steps, stages = load.answer - 1, engine.split.pp
    part = max(1.0, batch / stages)
    room = max(1.0, limits.max_num_tokens - (part if part < limits.max_num_tokens else 0))
    mixed = max(1.0, batch * load.prompt / room)
    pairs = batch * load.prompt * (load.prompt + 1) / 2
    # A token of an answer rides in a later step than its own prompt's: of the steps with prompts, the first carries none.
    share = min(1.0, max(0.0, mixed / stages - 1) / steps) if steps else 0.0
    length = load.prompt + load.answer / 2
    riding = batch * steps * share / mixed
    first = engine.step(batch * load.prompt / mixed, riding, riding * length, pairs / mixed, batch / mixed)
    left = steps * stages * (1 - share)
    return Wave(batch, mixed, first, left, engine.step(0, part, part * length) if left else Work())


@dataclass(frozen=True)
class Schedule:
    """All requests of a load: full waves and one with the rest; `batch_limit` says what keeps a wave from being larger."""

    waves: tuple[tuple[int, Wave], ...]
    pool_tokens: int
    batch_limit: str

    @property
    def batch(self) -> int:
        return self.waves[0][1].batch

    @property
    def work(self) -> Work:
        return sum((one.work.times(count) for count, one in self.waves), Work())


def schedule(engine: Engine, load: Load, limits: Limits | None = None, used_by_others: float = 0) -> Schedule:
    """The waves of a load. Raises PlanProblem where not one request fits into the KV cache."""
    limits = limits or Limits()
    tokens = pool_tokens(engine, limits, used_by_others)
    fit = largest_batch(tokens, load.prompt + load.answer)
    if fit < 1:
        buffers = buffer_bytes(engine.spec, engine.split, limits.max_num_tokens, limits.max_batch_size)
        takes = [f"a rank's weights take {engine.weights / 1e9:.1f} GB of {engine.gpu.memory / 1e9:.1f} GB"]
        steps = ["more ranks (--tp)", "fewer bytes per weight (--dtype)", "shorter requests"]
        if used_by_others > 0:
            takes.append(f"other processes {used_by_others / 1e9:.1f} GB")
            steps.insert(0, "a GPU that nobody else uses (--used-gb)")
        if buffers > engine.gpu.memory / 10:
            takes.append(f"buffers {buffers / 1e9:.1f} GB")
            steps.insert(
                0, f"a smaller --max-batch-size ({limits.max_batch_size}) or --max-num-tokens ({limits.max_num_tokens})"
            )
        raise PlanProblem(
            f"not one request of {load.prompt} + {load.answer} tokens fits on {engine.split.ranks} x {engine.gpu.name}: "
            f"{', '.join(takes)}, which leaves {tokens} tokens of KV cache; take {', '.join(steps[:-1])}, or {steps[-1]}"
        )
    batch, why = min((fit, "memory"), (limits.max_batch_size, "max_batch_size"), (load.requests, "requests"))
    whole, left = divmod(load.requests, batch)
    found = [(whole, wave(engine, load, batch, limits))]
    if left:
        found.append((1, wave(engine, load, left, limits)))
    return Schedule(tuple(found), tokens, why)


def roofline_tokens_per_second(engine: Engine, load: Load) -> float:
    """Answer tokens per second that no software can pass: all memory is KV cache, no limit of the batch, and everything
    that the GPU does at its peak rates is hidden behind the slowest of it."""
    room = engine.gpu.memory - engine.weights
    if room <= 0:
        return 0.0
    # Requests in all states hold prompt + answer / 2 tokens on average.
    most = min(float(load.requests), room / engine.kv_per_token / (load.prompt + load.answer / 2))
    if most <= 0:
        return 0.0
    rounds = max(1.0, load.requests / most)
    pairs = load.requests * load.prompt * (load.prompt + 1) / 2
    tokens = load.requests * (load.answer - 1)
    work = engine.step(
        load.requests * load.prompt, tokens, tokens * (load.prompt + load.answer / 2), pairs, load.requests
    )
    reads = rounds * load.answer * work.weights
    seconds = max(work.matrices + work.scores, reads + work.cache, work.link)
    return load.requests * load.answer / seconds if seconds else math.inf
