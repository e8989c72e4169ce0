"""Logits, log probabilities and sampled answers do not depend on block reuse, chunks, pauses or who else is in the batch."""

from __future__ import annotations

import random

import pytest
import torch
from engines import free_running, prompt_of
from trtllm_workshop.reference.configs import KvCacheConfig, SchedulerConfig
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

KINDS = [
    lambda seed: free_running(12, return_context_logits=True),
    lambda seed: SamplingParams(max_tokens=14, ignore_eos=True, top_k=50, temperature=1.1, seed=seed),
    lambda seed: free_running(10, logprobs=2, prompt_logprobs=1),
    lambda seed: free_running(16, return_generation_logits=True),
    lambda seed: free_running(12),
]


def close(a, b):
    return (a is None) == (b is None) and (a is None or (a.shape == b.shape and torch.allclose(a, b, atol=1e-4)))


def agree(a, b):
    """Two lists of log probabilities, each entry a dictionary token -> Logprob."""
    pairs = list(zip(a, b, strict=True))
    return all(set(x) == set(y) and all(abs(x[t].logprob - y[t].logprob) < 1e-3 for t in x) for x, y in pairs)


@pytest.fixture(scope="module")
def jobs(engines):
    """Prompts with a common beginning, each with its parameters and its result when it is alone."""
    llm, chance = engines.llm(), random.Random(3)
    made = []
    for number in range(15):
        prompt = [*prompt_of(40)[: chance.choice([1, 2, 8, 9, 16, 17, 24, 33, 40]) - 1], 10 + chance.randrange(3)]
        params = KINDS[number % len(KINDS)](number)
        made.append((prompt, params, llm.generate(prompt, params)))
    return made


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
@pytest.mark.parametrize("most_tokens", [None, 24, 7])
def test_every_output_is_that_of_a_lone_run(engines, jobs, policy, most_tokens):
    """A pool of 96 tokens for 15 requests of up to 56; with `most_tokens` a step, prompts in chunks."""
    llm = LLM(
        engines.engine(),
        tokenizer=str(engines.hf()),
        gather_generation_logits=True,
        kv_cache_config=KvCacheConfig(max_tokens=96),
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
        enable_chunked_prefill=most_tokens is not None,
        max_num_tokens=most_tokens,
    )
    running = [llm.generate_async(prompt, params) for prompt, params, _ in jobs]
    for output, (_, _, alone) in zip(running, jobs, strict=True):
        mine, wanted = output.result(60).outputs[0], alone.outputs[0]
        assert (mine.token_ids, mine.text) == (wanted.token_ids, wanted.text)
        assert close(output.context_logits, alone.context_logits)
        assert close(mine.generation_logits, wanted.generation_logits)
        assert agree(mine.logprobs, wanted.logprobs) and agree(mine.prompt_logprobs, wanted.prompt_logprobs)
    paused = sum(entry["inflightBatchingStats"]["numPausedRequests"] for entry in llm.get_stats())
    assert (paused > 0) == (policy == "MAX_UTILIZATION") and llm._executor.kv_cache.stats().reusedBlocks > 0
    llm.shutdown()
