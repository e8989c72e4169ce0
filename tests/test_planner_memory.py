"""Memory of ranks, pools and batches: worked out by hand, and against what a server really takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop.planner import memory_need
from trtllm_workshop.planner_gpus import PlanProblem, load_gpus
from trtllm_workshop.planner_memory import (
    Split,
    buffer_bytes,
    kv_pool,
    largest_batch,
    rank_kv_per_token,
    rank_weights,
)
from trtllm_workshop.planner_published import llama
from trtllm_workshop.planner_throughput import Limits, pool_tokens
from trtllm_workshop.planner_work import Engine

EIGHT = llama("8B")


@pytest.mark.parametrize(("size", "count"), [("8B", 8_030_261_248), ("70B", 70_553_706_496), ("405B", 405_853_388_800)])
def test_the_published_models_have_the_parameter_counts_of_their_files(size, count):
    assert llama(size).parameter_count() == count


@pytest.mark.parametrize("dtype", ["float32", "float16", "fp8", "int8", "int4", "int4_awq", "nvfp4"])
def test_one_rank_holds_what_the_whole_model_needs(dtype):
    assert rank_weights(EIGHT, dtype) == memory_need(EIGHT, dtype).weights


def test_weights_of_two_ranks_by_hand():
    """Per layer: qkv 6144, dense 4096, three matrices of 14336, all x 4096, halved; two norms of 4096 on each rank."""
    layer = (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096) // 2 + 2 * 4096
    assert rank_weights(EIGHT, "float16", Split(tp=2)) == 2 * (32 * layer + 128256 * 4096 + 64128 * 4096 + 4096)


def test_sixteen_ranks_copy_the_eight_kv_heads():
    layer = (256 + 2 * 128) * 4096 + 256 * 4096 + 3 * 896 * 4096 + 2 * 4096
    assert rank_weights(EIGHT, "float16", Split(tp=16)) == 2 * (32 * layer + 128256 * 4096 + 8016 * 4096 + 4096)
    assert rank_kv_per_token(EIGHT, "float16", Split(tp=16)) == 2 * 32 * 1 * 128 * 2
    assert rank_kv_per_token(EIGHT, "float16", Split(tp=8)) == 131072 // 8


def test_stages_share_the_layers_and_only_the_ends_hold_the_tables():
    seventy, split = llama("70B"), Split(pp=3)
    assert [split.layers(seventy, stage) for stage in range(3)] == [27, 27, 26]
    layer = 10240 * 8192 + 8192 * 8192 + 3 * 28672 * 8192 + 2 * 8192
    table = 128256 * 8192
    assert [rank_weights(seventy, "float16", split, stage) for stage in range(3)] == [
        2 * (27 * layer + table),
        2 * 27 * layer,
        2 * (26 * layer + table + 8192),
    ]
    assert sum(rank_kv_per_token(seventy, "fp8", split, stage) for stage in range(3)) == 2 * 80 * 8 * 128


def test_scales_of_four_bit_floats_are_one_byte_for_sixteen_values():
    values = 32 * 218_103_808
    tables = 2 * (2 * 128256 * 4096 + 65 * 4096)
    assert rank_weights(EIGHT, "nvfp4") == values // 2 + values // 16 + 32 * 5 * 8 + tables


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (Split(tp=3), ["--tp 3", "32 attention heads", "1, 2, 4, 8, 16, 32"]),
        (Split(pp=33), ["--pp 33", "32 layers"]),
        (Split(tp=0), ["--tp 0", "at least 1"]),
    ],
)
def test_impossible_splits_are_refused_with_both_numbers(split, words):
    with pytest.raises(PlanProblem) as problem:
        split.check(EIGHT)
    assert all(word in str(problem.value) for word in words)


def test_P120_a_server_takes_nine_tenths_of_what_is_free():
    """80 GB, weights 16 GB: 64 GB are free, 57.6 GB become KV cache, which is 439,453 tokens of 131,072 bytes."""
    pool = kv_pool(80e9, 16e9, 131072, 0.9)
    assert pool.bytes == 57_600_000_000
    assert pool.tokens == 439_453
    assert pool.warning is None


def test_P120_a_second_server_gets_its_share_of_what_is_left_and_is_warned():
    first = kv_pool(80e9, 16e9, 131072, 0.4)
    second = kv_pool(80e9, 16e9, 131072, 0.9, used_by_others=16e9 + first.bytes)
    assert second.bytes == int((80e9 - 2 * 16e9 - first.bytes) * 0.9) == 20_160_000_000
    assert second.warning is not None
    assert "41.6 GB of this GPU are held by another process" in second.warning
    assert "20.2 GB" in second.warning and "free_gpu_memory_fraction" in second.warning
    greedy = kv_pool(80e9, 16e9, 131072, 0.9)
    assert kv_pool(80e9, 16e9, 131072, 0.9, used_by_others=16e9 + greedy.bytes).tokens == 0


def test_P52_the_default_build_needs_far_more_than_the_weights():
    """Buffers grow with max_batch_size (float32 logits) and with max_num_tokens (activations)."""
    small, large = buffer_bytes(EIGHT, Split(), 1024, 8), buffer_bytes(EIGHT, Split(), 8192, 2048)
    assert large - small == 2 * 7168 * (3 * 4096 + 3 * 14336) + 4 * 2040 * 128256
    assert large > 1.9e9


def test_the_pool_of_a_measured_engine_is_met():
    """CONTEXT_BYTES comes from this run, buffers are estimated on top.

    An H200 held 60,242 blocks of 32 tokens for Llama 3 8B in FP8 (datasets/measurements/2026-12-03-h200-engine.json).
    """
    engine = Engine(EIGHT, load_gpus()["H200"], "fp8", "fp8")
    assert pool_tokens(engine, Limits(max_batch_size=1024)) == pytest.approx(60242 * 32, rel=0.02)


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(PlanProblem, match="above 0 and at most 1"):
        kv_pool(80e9, 16e9, 131072, fraction)


@given(
    memory=st.floats(1e9, 3e11), more=st.floats(0, 1e11), weights=st.floats(0, 2e11), others=st.floats(0, 1e11),
    length=st.integers(1, 200_000),
)  # fmt: skip
def test_more_memory_never_fits_less(memory, more, weights, others, length):
    small = kv_pool(memory, weights, 131072, 0.9, others)
    large = kv_pool(memory + more, weights, 131072, 0.9, others)
    assert small.tokens <= large.tokens
    assert largest_batch(small.tokens, length) <= largest_batch(large.tokens, length)
    assert 0 <= small.bytes <= memory


@given(
    tp=st.sampled_from([1, 2, 4, 8, 16, 32]), pp=st.integers(1, 32), dtype=st.sampled_from(["float16", "fp8", "nvfp4"])
)
def test_ranks_hold_the_whole_model_between_them_and_the_more_ranks_the_less_each(tp, pp, dtype):
    split = Split(tp, pp)
    split.check(EIGHT)
    together = tp * sum(rank_weights(EIGHT, dtype, split, stage) for stage in range(pp))
    assert together >= rank_weights(EIGHT, dtype)
    if tp > 1:
        assert rank_weights(EIGHT, dtype, split) < rank_weights(EIGHT, dtype, Split(1, pp))
