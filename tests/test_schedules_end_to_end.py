"""The real executor under random schedules: whatever runs beside a request, it gets the tokens of a lone run.

In float32 the tokens are equal. In 16 bits, and with an FP8 cache, sums of another order may choose another token where two
are nearly as good; there the tokens that a schedule chose are given to a lone run, step by step, and the logits compared.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from engines import TOKENS_PER_BLOCK, Forced, divergence, free_running, prompt_of, quiet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from quantized_checkpoints import quantized_checkpoint
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.capacity_scheduler import CAPACITY_SCHEDULER_POLICIES
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig, PluginConfig, SchedulerConfig
from trtllm_workshop.reference.context_chunking import CONTEXT_CHUNKING_POLICIES
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import StopRules
from trtllm_workshop.reference.step_runner import StepRunner

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = 40  # tokens of a prompt
MOST_NEW = 16
NUMBERS = itertools.count(1)
# Prompts begin with one of these, so that many have a prefix in common.
TEXTS = [prompt_of(LONGEST, seed) for seed in range(3)]


def request(prompt: list[int], new: int, logits: bool, answer: list[int] | None = None) -> Request:
    """A greedy request of exactly `new` tokens, chosen ones or those of `answer`."""
    params = free_running(new, return_generation_logits=logits, detokenize=False)
    if answer is None:
        return Request(next(NUMBERS), prompt, params, StopRules())
    forced = Forced(next(NUMBERS), prompt, params, StopRules())
    forced.forced = answer
    return forced


@dataclass
class Schedule:
    """How an executor is set up, and what happens to it: requests with the step of their arrival, some cancelled."""

    pool_blocks: int
    max_batch_size: int
    max_num_tokens: int
    policy: str
    reuse: bool
    chunked: bool
    ahead: bool
    arrivals: list[tuple[int, Request]]
    aborts: dict[int, int] = field(default_factory=dict)  # request -> step
    chunking: str = "FIRST_COME_FIRST_SERVED"

    def executor(self, engine: Engine) -> Executor:
        return Executor(
            engine,
            KvCacheConfig(max_tokens=self.pool_blocks * TOKENS_PER_BLOCK, enable_block_reuse=self.reuse),
            max_batch_size=self.max_batch_size,
            max_num_tokens=self.max_num_tokens,
            scheduler_config=SchedulerConfig(
                capacity_scheduler_policy=self.policy, context_chunking_policy=self.chunking
            ),
            enable_chunked_context=self.chunked,
        )


@st.composite
def schedules(draw, ahead=True, most=7, aborts=True, logits=None):
    """Pools that hold the largest request at least, and often not much more."""
    chunked = draw(st.booleans(), label="chunked")
    step = draw(st.integers(8, 64)) if chunked else draw(st.integers(LONGEST, 90))
    arrivals = []
    for _ in range(draw(st.integers(1, most))):
        text, shared = draw(st.sampled_from(TEXTS)), draw(st.integers(1, LONGEST))
        own = draw(st.integers(0, LONGEST - shared))
        prompt = text[:shared] + prompt_of(LONGEST, 9)[:own]
        wants = draw(st.booleans()) if logits is None else logits
        arrivals.append((draw(st.integers(0, 12)), request(prompt, draw(st.integers(1, MOST_NEW)), wants)))
    largest = max(len(r.prompt_token_ids) + r.max_new_tokens for _, r in arrivals)
    ids = st.sampled_from([r.request_id for _, r in arrivals])
    return Schedule(
        pool_blocks=-(-largest // TOKENS_PER_BLOCK) + draw(st.integers(0, 6)),
        max_batch_size=draw(st.integers(1, 6)),
        max_num_tokens=step,
        policy=draw(st.sampled_from(CAPACITY_SCHEDULER_POLICIES)),
        reuse=draw(st.booleans(), label="reuse"),
        chunked=chunked,
        ahead=draw(st.booleans()) if ahead else False,
        arrivals=sorted(arrivals, key=lambda a: a[0]),
        aborts=draw(st.dictionaries(ids, st.integers(0, 25), max_size=2)) if aborts else {},
        chunking=draw(st.sampled_from(CONTEXT_CHUNKING_POLICIES)),
    )


@dataclass
class Outcome:
    requests: list[Request]
    paused: int
    reused: int


def run(engine: Engine, schedule: Schedule) -> Outcome:
    """Run a schedule to its end; afterwards no block may be in use."""
    executor, arriving = schedule.executor(engine), deque(schedule.arrivals)
    requests = [r for _, r in schedule.arrivals]
    submitted: list[Request] = []
    for step in itertools.count():
        while arriving and arriving[0][0] <= step:
            submitted.append(arriving.popleft()[1])
            executor.submit(submitted[-1])
        executor.abort([r for r in submitted if schedule.aborts.get(r.request_id) == step])
        if not executor.busy and not arriving:
            break
        executor.step()
        assert step < 2000, "a request starves"
    stats = executor.kv_cache.stats()
    assert stats.usedNumBlocks == 0 and stats.freeNumBlocks == stats.maxNumBlocks == schedule.pool_blocks
    assert executor.scheduler.capacity.promised == 0
    paused = sum(entry["inflightBatchingStats"]["numPausedRequests"] for entry in executor.stats.take())
    return Outcome(requests, paused, stats.reusedBlocks)


class Alone:
    """Lone runs on one engine: nothing beside them, nothing reused, whole prompts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.answer = functools.cache(self._answer)

    def run(self, wanted: Request) -> Request:
        executor = Executor(self.engine, KvCacheConfig(max_tokens=160, enable_block_reuse=False), max_batch_size=1)
        executor.submit(wanted)
        while executor.busy:
            executor.step()
        return wanted

    def _answer(self, prompt: tuple[int, ...]) -> tuple[list[int], torch.Tensor]:
        done = self.run(request(list(prompt), MOST_NEW, True))
        return done.token_ids, torch.stack(done.generation_logits)

    def forced(self, done: Request) -> torch.Tensor:
        """[tokens, vocabulary]: the logits before each token of an answer, from a lone run that is given the answer."""
        again = self.run(request(done.prompt_token_ids, len(done.token_ids), True, answer=done.token_ids))
        return torch.stack(again.generation_logits)

    def at_once(self, done: Request) -> torch.Tensor:
        """The same logits from one context phase over all tokens: the sums of another legitimate order."""
        tokens = done.prompt_token_ids + done.token_ids
        params = free_running(1, return_context_logits=True, detokenize=False)
        context = self.run(Request(next(NUMBERS), tokens, params, StopRules())).context_logits
        return context[len(done.prompt_token_ids) - 1 : -1]


def engine_of(llm: LLM) -> Engine:
    return llm._executor.engine


@pytest.fixture(scope="module")
def exact(engines) -> Alone:
    return Alone(engine_of(engines.llm()))


@pytest.fixture
def set_ahead(monkeypatch):
    """Lets the processor, too, launch a step before the tokens of the one before are read, as a GPU does."""

    def change(ahead: bool) -> None:
        monkeypatch.setattr(StepRunner, "runs_ahead", property(lambda self: ahead))

    return change


def check_exact(alone: Alone, schedule: Schedule) -> Outcome:
    outcome = run(alone.engine, schedule)
    for done in outcome.requests:
        tokens, logits = alone.answer(tuple(done.prompt_token_ids))
        made = done.token_ids
        assert made == tokens[: len(made)]
        if done.finish_reason == "cancelled":
            assert done.request_id in schedule.aborts
        else:
            assert done.finish_reason == "length" and len(made) == done.max_new_tokens
        if done.generation_logits:
            assert len(done.generation_logits) == len(made)
            torch.testing.assert_close(torch.stack(done.generation_logits), logits[: len(made)], atol=1e-3, rtol=1e-3)
    return outcome


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules())
def test_tokens_in_float32_are_those_of_a_lone_run(exact, set_ahead, schedule):
    set_ahead(schedule.ahead)
    check_exact(exact, schedule)


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("policy", CAPACITY_SCHEDULER_POLICIES)
def test_a_crowd_in_a_tiny_pool_under_every_setting(exact, set_ahead, policy, reuse, chunked):
    """Twelve requests at once, with one text in common, against a pool that holds little more than two of them."""
    set_ahead(chunked)
    text = TEXTS[0][:17]
    arrivals = [(n // 4, request(text + prompt_of(9, n), 14 + n % 3, logits=n % 3 == 0)) for n in range(12)]
    schedule = Schedule(9, 6, 30 if chunked else 60, policy, reuse, chunked, chunked, arrivals)
    outcome = check_exact(exact, schedule)
    assert (outcome.paused > 0) == (policy == "MAX_UTILIZATION")
    assert (outcome.reused > 0) == reuse


def compare(alone: Alone, schedule: Schedule, found: list[Any]) -> None:
    """Adds (scheduled, lone, lone at once) logits of every request."""
    for done in run(alone.engine, schedule).requests:
        assert len(done.token_ids) == done.max_new_tokens
        found.append((torch.stack(done.generation_logits), alone.forced(done), alone.at_once(done)))


def test_tokens_in_16_bits_differ_only_where_two_are_as_good(engines):
    """Another most likely token only where the margin is below the noise between two lone runs' logits."""
    alone = Alone(engine_of(engines.llm(dtype="bfloat16")))
    found: list[Any] = []

    @settings(max_examples=8, deadline=None, database=None)
    @given(schedule=schedules(ahead=False, aborts=False, logits=True))
    def collect(schedule):
        compare(alone, schedule, found)

    collect()
    scheduled, lone, at_once = (torch.cat(column) for column in zip(*found, strict=True))
    noise = float((lone - at_once).abs().max())
    assert 0 < noise < 0.1 * float(lone.std()), "the noise of bfloat16, not of something else"
    assert float((scheduled - lone).abs().max()) <= 2 * noise
    other = scheduled.argmax(-1) != lone.argmax(-1)
    best = lone.topk(2).values
    margin = best[:, 0] - best[:, 1]
    assert bool((margin[other] <= 2 * noise).all())
    assert float(other.float().mean()) < 0.05


def test_an_fp8_cache_costs_the_same_in_every_schedule(engines, tmp_path):
    """What a schedule changes (which tokens are read back from the cache) is small beside what FP8 itself costs."""
    plain = engines.checkpoint("qwen2", "float32")
    checkpoint = quantized_checkpoint(plain, tmp_path / "checkpoint", "FP8", "FP8")
    limits = BuildConfig(
        max_batch_size=8,
        max_seq_len=160,
        gather_context_logits=True,
        plugin_config=PluginConfig(tokens_per_block=TOKENS_PER_BLOCK, use_paged_context_fmha=True),
    )
    build_engine(checkpoint, limits, tmp_path / "engine", log=quiet)
    quantized = Alone(engine_of(LLM(tmp_path / "engine", skip_tokenizer_init=True)))
    unquantized = Alone(engine_of(engines.llm("qwen2")))
    found: list[Any] = []
    costs: list[tuple[torch.Tensor, torch.Tensor]] = []

    @settings(max_examples=6, deadline=None, database=None)
    @given(schedule=schedules(ahead=False, aborts=False, logits=True))
    def collect(schedule):
        before = len(found)
        compare(quantized, schedule, found)
        for (_, lone, _), (_, done) in zip(found[before:], schedule.arrivals, strict=True):
            costs.append((unquantized.forced(done), lone))

    collect()
    scheduled, lone, _ = (torch.cat(column) for column in zip(*found, strict=True))
    cost = divergence(*(torch.cat(column) for column in zip(*costs, strict=True)))
    between = divergence(lone, scheduled)
    print(f"FP8 costs KL {cost:.2e}; schedules differ by {between:.2e}")
    assert 0 < cost < 0.5 and between <= 0.1 * cost
