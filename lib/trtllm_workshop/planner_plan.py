"""A plan: what a model needs on given GPUs, what fits, how fast it will be, what it costs and what limits it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from trtllm_workshop.planner_memory import CONTEXT_BYTES, buffer_bytes, kv_pool, largest_batch, rank_weights
from trtllm_workshop.planner_speed import Constants, Seconds, seconds
from trtllm_workshop.planner_throughput import Limits, Load, schedule
from trtllm_workshop.planner_work import Engine, Work

LENGTHS = (512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Plan:
    """Everything predicted. Bytes are those of one rank, times are seconds, prices are those of the table or of --price."""

    model: str
    gpu: str
    tp: int
    pp: int
    dtype: str
    kv_dtype: str
    weights_of_stages: list[int]
    kv_bytes_per_token: int
    kv_heads_per_rank: int
    kv_heads_copied: bool
    buffer_bytes: int
    context_bytes: int
    pool_bytes: int
    pool_tokens: int
    largest_batch_by_length: dict[int, int]
    prompt: int
    answer: int
    requests: int
    batch: int
    batch_limit: str
    time_to_first_token: float
    time_per_token_alone: float
    time_per_token: float
    tokens_per_second: float
    tokens_per_second_per_gpu: float
    limit: str
    shares: dict[str, float]
    communication_share: float
    price_per_hour: float | None
    cost_per_million_tokens: float | None
    warnings: list[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def first_token(engine: Engine, prompt: int, max_num_tokens: int) -> Work:
    """Work on the way of one prompt through all stages, alone; a long one in parts of at most max_num_tokens."""
    parts = math.ceil(prompt / max_num_tokens)
    one = engine.step(prompt / parts, 0, 0, prompt * (prompt + 1) / 2 / parts, 1 / parts)
    return one.times(parts * engine.split.pp)


def next_token(engine: Engine, batch: int, length: float) -> Work:
    """Work between two tokens of a request when `batch` requests of so many tokens run. With stages, the batch goes through
    them in as many parts; a batch smaller than that leaves stages idle, and its way is as long."""
    part = max(1.0, batch / engine.split.pp)
    return engine.step(0, part, part * length).times(engine.split.pp)


def make_plan(
    engine: Engine,
    load: Load,
    limits: Limits | None = None,
    constants: Constants | None = None,
    *,
    model: str = "",
    price: float | None = None,
    used_by_others: float = 0,
) -> Plan:
    """The plan for an engine under a load. Raises PlanProblem where it cannot be split so or nothing fits."""
    limits, spec, split, gpu = limits or Limits(), engine.spec, engine.split, engine.gpu
    split.check(spec)
    gpu_price = gpu.price if price is None else price
    planned = schedule(engine, load, limits, used_by_others)
    buffers = buffer_bytes(spec, split, limits.max_num_tokens, limits.max_batch_size)
    pool = kv_pool(
        gpu.memory,
        engine.weights,
        engine.kv_per_token,
        limits.kv_fraction,
        used_by_others,
        buffers + CONTEXT_BYTES,
    )
    time = seconds(planned.work, constants)
    rate = load.requests * load.answer / time.total
    length = load.prompt + load.answer / 2
    copied = spec.num_key_value_heads < split.tp
    return Plan(
        model=model,
        gpu=gpu.name,
        tp=split.tp,
        pp=split.pp,
        dtype=engine.dtype,
        kv_dtype=engine.kv_dtype,
        weights_of_stages=[rank_weights(spec, engine.dtype, split, stage) for stage in range(split.pp)],
        kv_bytes_per_token=engine.kv_per_token,
        kv_heads_per_rank=split.kv_heads(spec),
        kv_heads_copied=copied,
        buffer_bytes=buffers,
        context_bytes=CONTEXT_BYTES,
        pool_bytes=pool.bytes,
        pool_tokens=pool.tokens,
        largest_batch_by_length={
            each: min(largest_batch(pool.tokens, each), limits.max_batch_size)
            for each in LENGTHS
            if each <= spec.max_position_embeddings
        },
        prompt=load.prompt,
        answer=load.answer,
        requests=load.requests,
        batch=planned.batch,
        batch_limit=planned.batch_limit,
        time_to_first_token=seconds(first_token(engine, load.prompt, limits.max_num_tokens), constants).total,
        time_per_token_alone=seconds(next_token(engine, 1, length), constants).total,
        time_per_token=seconds(next_token(engine, planned.batch, length), constants).total,
        tokens_per_second=rate,
        tokens_per_second_per_gpu=rate / split.ranks,
        limit=time.limit,
        shares=_shares(time),
        communication_share=time.link / time.total,
        price_per_hour=None if gpu_price is None else gpu_price * split.ranks,
        cost_per_million_tokens=None if gpu_price is None else gpu_price * split.ranks / 3600 / rate * 1e6,
        warnings=_warnings(engine, load, pool.warning, copied),
    )


def _shares(time: Seconds) -> dict[str, float]:
    return {name: getattr(time, name) / time.total for name in ("compute", "bandwidth", "link", "overhead")}


def _warnings(engine: Engine, load: Load, pool: str | None, copied: bool) -> list[str]:
    found = [pool] if pool else []
    longest = engine.spec.max_position_embeddings
    if load.prompt + load.answer > longest:
        found.append(
            f"{load.prompt} + {load.answer} tokens are more than the model was made for (max_position_embeddings {longest})"
        )
    if engine.dtype == "nvfp4":
        found.append("FP4 is predicted too fast: published runs reached about a sixth less (benchmarks/planner.py)")
    if copied:
        found.append(
            f"{engine.spec.num_key_value_heads} KV heads on {engine.split.tp} ranks: each is copied, so that the KV cache of all "
            f"ranks together is {engine.split.tp / engine.spec.num_key_value_heads:g} times as large as it need be"
        )
    return found


def text(plan: Plan, note: str = "") -> str:
    """The plan for people: memory, what fits, time, money, what limits."""
    gb = 1e9
    stages = ", ".join(f"{size / gb:.2f}" for size in plan.weights_of_stages)
    fits = ", ".join(f"{batch} x {length}" for length, batch in plan.largest_batch_by_length.items())
    ranks = plan.tp * plan.pp
    lines = [
        f"{plan.model or 'model'} in {plan.dtype}, KV cache in {plan.kv_dtype}, on {ranks} x {plan.gpu} "
        f"(tp {plan.tp}, pp {plan.pp})",
        f"Weights of a rank{' of each stage' if plan.pp > 1 else ''}: {stages} GB",
        f"KV cache: {plan.kv_bytes_per_token} bytes per token and rank ({plan.kv_heads_per_rank} KV heads); the pool takes "
        f"{plan.pool_bytes / gb:.2f} GB = {plan.pool_tokens} tokens",
        f"Buffers, estimated: {plan.buffer_bytes / gb:.2f} GB, and {plan.context_bytes / gb:.2f} GB of CUDA's own",
        f"Fits (requests x tokens each): {fits}",
        f"{plan.requests} requests of {plan.prompt} + {plan.answer} tokens, {plan.batch} at once (limited by "
        f"{plan.batch_limit}):",
        f"  first token, alone:   {1000 * plan.time_to_first_token:.1f} ms",
        f"  next token, alone:    {1000 * plan.time_per_token_alone:.2f} ms",
        f"  next token, {plan.batch} at once: {1000 * plan.time_per_token:.2f} ms",
        f"  throughput: {plan.tokens_per_second:.0f} answer tokens/s, {plan.tokens_per_second_per_gpu:.0f} per GPU",
        f"  limited by {plan.limit} (" + ", ".join(f"{name} {part:.0%}" for name, part in plan.shares.items()) + ")",
    ]
    if ranks > 1:
        lines.append(f"  communication: {plan.communication_share:.0%} of the time")
    if plan.cost_per_million_tokens is not None:
        lines.append(
            f"  cost: {plan.cost_per_million_tokens:.3f} dollars per million answer tokens at {plan.price_per_hour:.2f} dollars "
            "an hour for all GPUs (an example price: give yours with --price)"
        )
    lines += [f"Warning: {warning}" for warning in plan.warnings]
    return "\n".join([*lines, *([note] if note else [])])
