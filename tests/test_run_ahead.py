"""Steps launched before the tokens of the one before are known, as on CUDA, here on the CPU: same tokens, nothing lost.

The way through `GenerationGraphs` is taken too, without recording.
"""

from __future__ import annotations

import random

import pytest
from engines import TOKENS_PER_BLOCK, free_running, prompt_of
from trtllm_workshop.reference.configs import KvCacheConfig, SchedulerConfig
from trtllm_workshop.reference.cuda_graphs import GenerationGraphs
from trtllm_workshop.reference.executor import Executor
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules
from trtllm_workshop.reference.step_runner import StepRunner

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def run_ahead(monkeypatch):
    monkeypatch.setattr(StepRunner, "runs_ahead", True)


def executor_of(llm, graphs: bool, policy: str = "GUARANTEED_NO_EVICT", pool: int = 400, chunked: bool = False):
    """An executor on the engine of `llm`; `pool` in tokens, one block of it spare for the graphs' padding rows."""
    executor = Executor(
        llm._executor.engine,
        KvCacheConfig(max_tokens=pool),
        max_num_tokens=24 if chunked else None,
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        enable_chunked_context=chunked,
    )
    if graphs:
        # The last block is taken out of circulation, as the spare one is on CUDA.
        spare = executor.kv_cache.num_blocks - 1
        executor.kv_cache._empty.remove(spare)
        executor.kv_cache.num_blocks -= 1
        steps = executor._runner.steps
        blocks = -(-llm._executor.engine.build_config["max_seq_len"] // TOKENS_PER_BLOCK)
        steps.graphs = GenerationGraphs(
            executor.engine.run, executor.pool, executor.max_batch_size, blocks, spare, TOKENS_PER_BLOCK, capture=False
        )
    return executor


def request_of(number: int, prompt: list[int], params: SamplingParams, stop: int | None = None) -> Request:
    return Request(number, prompt, params, StopRules(stop_ids=set() if stop is None else {stop}))


def run(executor: Executor) -> None:
    steps = 0
    while executor.busy:
        executor.step()
        steps += 1
        assert steps < 5000
    assert executor.kv_cache.stats().usedNumBlocks == 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"])
@pytest.mark.parametrize("chunked", [False, True])
def test_same_tokens_as_alone(engines, graphs, policy, chunked):
    """Requests that come, end early by a stop token, are cancelled and paused, in a pool too small for all of them."""
    llm, chance = engines.llm(), random.Random(f"{graphs} {policy} {chunked}")
    executor = executor_of(llm, graphs, policy, pool=128, chunked=chunked)
    requests, wanted, dropped = [], {}, set()
    for number in range(1, 25):
        prompt = prompt_of(chance.choice((1, 3, 8, 9, 16, 20)), chance.randrange(4))
        alone = llm.generate(prompt, free_running(chance.randrange(1, 24))).outputs[0].token_ids
        stop = chance.choice([None, alone[len(alone) // 2]])
        wanted[number] = alone if stop is None else alone[: alone.index(stop)]
        requests.append(request_of(number, prompt, free_running(len(alone), detokenize=False), stop))
    for request in requests:
        executor.submit(request)
        for _ in range(chance.randrange(4)):
            executor.step()
        if chance.random() < 0.2:
            victim = chance.choice(requests[: request.request_id])
            if not victim.finished:
                dropped.add(victim.request_id)
            executor.abort([victim])
    run(executor)
    for request in requests:
        made, whole = request.token_ids, wanted[request.request_id]
        assert made == (whole[: len(made)] if request.request_id in dropped else whole)
        assert request.finished and (request.finish_reason == "cancelled") == (request.request_id in dropped)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_request_that_needs_its_logits_waits_for_them(engines, graphs):
    """Sampling with a seed in the middle of plain requests: the same answer as without running ahead."""
    llm = engines.llm()
    sampled = SamplingParams(max_tokens=12, ignore_eos=True, top_k=20, temperature=0.9, seed=5, detokenize=False)
    alone = llm.generate(prompt_of(9), sampled).outputs[0].token_ids
    plain = llm.generate(prompt_of(7), free_running(15)).outputs[0].token_ids
    executor = executor_of(llm, graphs)
    requests = [
        request_of(1, prompt_of(7), free_running(15, detokenize=False)),
        request_of(2, prompt_of(9), sampled),
        request_of(3, prompt_of(7), free_running(15, detokenize=False)),
    ]
    for request in requests:
        executor.submit(request)
        executor.step()
    run(executor)
    assert [r.token_ids for r in requests] == [plain, alone, plain]


def test_no_row_is_run_for_a_request_whose_length_is_known(engines):
    """A request ends at its length: no superfluous iteration follows."""
    executor = executor_of(engines.llm(), graphs=False)
    executor.submit(request_of(1, prompt_of(5), free_running(6, detokenize=False)))
    run(executor)
    assert executor.iterations == 6


def test_a_failed_step_ends_what_was_launched_after_it(engines, monkeypatch):
    llm = engines.llm()
    executor = executor_of(llm, graphs=False)
    requests = [request_of(n, prompt_of(5, n), free_running(20, detokenize=False)) for n in (1, 2)]
    for request in requests:
        executor.submit(request)
    executor.step()
    engine_run, calls = executor.engine.run, 0

    def broken(*inputs):
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("no more memory")
        return engine_run(*inputs)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more memory"):
        patch.setattr(executor.engine, "run", broken)
        while executor.busy:
            executor.step()
    assert all(r.finish_reason == "cancelled" and isinstance(r.error, RuntimeError) for r in requests)
    assert not executor.busy and executor.kv_cache.stats().usedNumBlocks == 0
    again = request_of(3, prompt_of(5, 1), free_running(20, detokenize=False))
    executor.submit(again)
    run(executor)
    assert again.token_ids == llm.generate(prompt_of(5, 1), free_running(20)).outputs[0].token_ids


def test_a_request_aborted_before_it_was_submitted_never_runs(engines):
    executor = executor_of(engines.llm(), graphs=False)
    request = request_of(1, prompt_of(5), free_running(6, detokenize=False))
    executor.abort([request])
    executor.submit(request)
    run(executor)
    assert request.finish_reason == "cancelled" and request.token_ids == [] and executor.iterations == 0


@pytest.mark.parametrize("way", ["aborted", "stopped"])
def test_nothing_is_left_running_when_the_last_request_has_ended(engines, way):
    """The step that was launched ahead for it is forgotten: an executor without requests is idle."""
    llm = engines.llm()
    answer = llm.generate(prompt_of(5), free_running(20)).outputs[0].token_ids
    executor = executor_of(llm, graphs=False)
    stop = answer[4] if way == "stopped" else None
    request = request_of(1, prompt_of(5), free_running(20, detokenize=False), stop)
    executor.submit(request)
    while not request.finished:
        executor.step()
        if way == "aborted" and len(request.token_ids) == 3:
            executor.abort([request])
    assert not executor.busy and executor.kv_cache.stats().usedNumBlocks == 0
    following = request_of(2, prompt_of(5), free_running(20, detokenize=False))
    executor.submit(following)
    run(executor)
    assert following.token_ids == answer
