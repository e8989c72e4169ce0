"""The size of the KV-cache pool: the rule, the words in which it is printed, and loads far beyond it."""

from __future__ import annotations

import pytest
import torch
from engines import TOKENS_PER_BLOCK, free_running, prompt_of
from trtllm_workshop.reference import kv_pool
from trtllm_workshop.reference.configs import KvCacheConfig, SchedulerConfig
from trtllm_workshop.reference.kv_pool import CPU_POOL_CAP, pool_blocks
from trtllm_workshop.reference.llm import LLM

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
GIB = 1 << 30


def rule(monkeypatch, free, config, block_bytes=1 << 20, most_tokens=10**9):
    monkeypatch.setattr(kv_pool, "free_bytes", lambda device: free)
    return pool_blocks(config, block_bytes, 32, most_tokens, CPU)


def test_a_laptop_keeps_its_memory(monkeypatch):
    blocks, why = rule(monkeypatch, 64 * GIB, KvCacheConfig())
    assert blocks == CPU_POOL_CAP >> 20 and why == "the cap of 1 GiB on a CPU"


def test_a_share_of_what_the_process_may_use_when_that_is_little(monkeypatch):
    blocks, why = rule(monkeypatch, GIB // 2, KvCacheConfig(free_gpu_memory_fraction=0.5))
    assert blocks == 256 and why == "50% of the free memory"


def test_no_more_than_the_engine_can_use(monkeypatch):
    blocks, why = rule(monkeypatch, 64 * GIB, KvCacheConfig(), most_tokens=33)
    assert blocks == 2 and why.startswith("max_batch_size x max_seq_len")


def test_with_max_tokens_the_pool_is_exactly_that(monkeypatch):
    """Above the cap and above what the engine can use, too: somebody asked for it."""
    blocks, why = rule(monkeypatch, 64 * GIB, KvCacheConfig(max_tokens=32 * 5000), most_tokens=33)
    assert blocks == 5000 and why == "KvCacheConfig(max_tokens=160000)"
    assert rule(monkeypatch, 64 * GIB, KvCacheConfig(max_tokens=33))[0] == 2, "whole blocks"


def test_but_never_more_than_there_is(monkeypatch):
    blocks, why = rule(monkeypatch, GIB, KvCacheConfig(max_tokens=10**9))
    assert blocks == int(0.9 * 1024) and why == "90% of the free memory"


def test_no_room_for_one_block(monkeypatch):
    with pytest.raises(ValueError, match="no room for a single KV-cache block of 1048576 bytes"):
        rule(monkeypatch, 1 << 20, KvCacheConfig())


@pytest.mark.parametrize("asked", [8, 9, 400, 4000])
def test_the_pool_of_an_engine_and_the_line_that_says_so(engines, asked, capsys):
    llm = LLM(engines.engine(), tokenizer=str(engines.hf()), kv_cache_config=KvCacheConfig(max_tokens=asked))
    blocks = -(-asked // TOKENS_PER_BLOCK)
    assert llm._executor.kv_cache.stats().maxNumBlocks == blocks == llm._executor.pool.shape[1]
    model = llm._executor.engine.pretrained_config
    values = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * model["head_size"]
    size = f"{blocks * TOKENS_PER_BLOCK * values * 4 / 2**20:.1f} MiB"
    line = f"KV cache: {blocks} blocks of 8 tokens = {blocks * 8} tokens, {size} (decided by KvCacheConfig(max_tokens={asked}))"
    assert line in capsys.readouterr().out
    llm.shutdown()


@pytest.mark.parametrize("policy", ["GUARANTEED_NO_EVICT", "MAX_UTILIZATION"])
def test_a_load_ten_times_the_pool_finishes_and_nothing_is_lost(engines, policy):
    """24 requests of 40 tokens against a pool of 96 tokens."""
    prompts = [prompt_of(4 + n % 9, n) for n in range(24)]
    alone = [engines.llm().generate(p, free_running(40 - len(p))).outputs[0].token_ids for p in prompts]
    llm = LLM(
        engines.engine(),
        tokenizer=str(engines.hf()),
        kv_cache_config=KvCacheConfig(max_tokens=96),
        scheduler_config=SchedulerConfig(capacity_scheduler_policy=policy),
    )
    outputs = [llm.generate_async(p, free_running(40 - len(p))) for p in prompts]
    assert [o.result(120).outputs[0].token_ids for o in outputs] == alone
    stats = llm.get_stats()
    paused = sum(s["inflightBatchingStats"]["numPausedRequests"] for s in stats)
    assert (paused > 0) == (policy == "MAX_UTILIZATION")
    assert llm._executor.kv_cache.stats().usedNumBlocks == 0
    llm.shutdown()
