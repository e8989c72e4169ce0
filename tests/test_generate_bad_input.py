"""What people hand to `generate` by mistake: refused by name before any step runs, and the blocks come back."""

from __future__ import annotations

import os
import signal
import sys
import threading

import numpy
import pytest
import torch
from engines import free_running, prompt_of
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.runner import ModelRunnerCpp
from trtllm_workshop.reference.sampling_params import SamplingParams

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def llm(engines):
    return engines.llm()


@pytest.fixture(scope="module")
def runner(engines):
    return ModelRunnerCpp.from_dir(str(engines.engine()))


def assert_all_free(llm):
    assert not llm._executor.busy and llm._executor.kv_cache.stats().usedNumBlocks == 0


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (5, "inputs is a int"),
        (None, "inputs is a NoneType"),
        (iter([5]), "expected a text, a list of token ids"),
        (numpy.array([5, 6]), r"ndarray.*\.tolist\(\)"),
        (torch.tensor([5, 6]), r"Tensor.*\.tolist\(\)"),
        ([True, False], "whole numbers"),
        ([[True]], "whole numbers"),
        ([[1.0]], "whole numbers"),
        ([[5], None], "whole numbers"),
        ("half \ud83e of a llama", "half a surrogate pair"),
    ],
)
def test_a_prompt_of_the_wrong_type_is_named(llm, inputs, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(inputs, free_running(2))
    assert_all_free(llm)


@pytest.mark.parametrize("params", ["abc", {"max_tokens": 2}, ["abc"]])
def test_sampling_params_of_the_wrong_type_are_named(llm, params):
    with pytest.raises(ValueError, match=r"expected SamplingParams"):
        llm.generate([PROMPT], params)


def test_none_in_a_list_of_sampling_params_means_the_defaults(llm):
    first, second = llm.generate([PROMPT, PROMPT], [None, free_running(2)])
    assert len(first.outputs[0].token_ids) <= 32 and len(second.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": float("inf")},
        {"repetition_penalty": float("inf")},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("-inf")},
        {"seed": 2**64},
        {"seed": -1},
    ],
)
def test_values_that_no_sampler_can_use_are_refused(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))}=.* is out of range"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    "values", [{"temperature": 1e-300, "top_k": 5}, {"top_p": 1e-300}, {"temperature": 1e-300, "top_p": 0.9}]
)
def test_the_smallest_values_are_greedy_and_no_error(llm, values):
    expected, got = llm.generate([PROMPT, PROMPT], [free_running(8), free_running(8, **values)])
    assert got.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_tiny_repetition_penalty_still_gives_probabilities(llm):
    output = llm.generate(PROMPT, free_running(8, repetition_penalty=1e-320, top_k=3))
    assert output.outputs[0].length == 8


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"bad_token_ids": [512]}, "bad token id 512 is outside the vocabulary of 512"),
        ({"bad_token_ids": [-1]}, "bad token id -1 is outside"),
        ({"bad_token_ids": list(range(512)), "top_k": 3}, "exclude all 512 tokens"),
        ({"bad_token_ids": list(range(3, 512)), "stop_token_ids": [0, 1, 2], "min_tokens": 2}, "exclude all 512"),
    ],
)
def test_bad_words_beyond_or_all_of_the_vocabulary(llm, values, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(PROMPT, SamplingParams(max_tokens=4, **values))
    assert_all_free(llm)


def test_an_end_token_beyond_the_vocabulary_is_held_back_without_error(llm):
    output = llm.generate(PROMPT, SamplingParams(max_tokens=4, min_tokens=2, end_id=9999, stop_token_ids=[10**30]))
    assert output.outputs[0].length == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_config": "big"}, r"kv_cache_config is 'big', expected KvCacheConfig"),
        ({"build_config": 5}, r"build_config is 5, expected BuildConfig"),
        ({"max_batch_size": "4"}, r"max_batch_size='4' must be a whole number"),
        ({"kv_cache_config": {"max_tokens": 0}}, r"max_tokens=0 of KvCacheConfig"),
    ],
)
def test_arguments_of_the_llm_of_the_wrong_type(engines, options, said):
    with pytest.raises(ValueError, match=said):
        LLM(engines.engine(), **options)


def test_a_dictionary_is_taken_as_the_config_it_describes(engines):
    llm = LLM(engines.engine(), kv_cache_config={"max_tokens": 32})
    assert llm._executor.kv_cache.num_blocks == 4


def test_a_tokenizer_that_is_nowhere_is_named(engines, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"tokenizer 'no/such' is no folder here"):
        LLM(engines.engine(), tokenizer="no/such")


@pytest.mark.parametrize(
    ("batch", "change", "said"),
    [
        ([torch.tensor([5, 600])], {}, "prompt 0 of the batch has 600"),
        ([torch.tensor([-1])], {}, "has -1, which is no token id"),
        ([torch.tensor([1.5])], {}, "has 1.5, which is no token id"),
        ([torch.tensor([[5, 6]])], {}, r"has \[5, 6\], which is no token id"),
        (5, {}, "one 1-D tensor of token ids per prompt"),
        ([5], {}, "one 1-D tensor of token ids per prompt"),
        ([torch.tensor([5])], {"end_id": "2"}, "end_id='2' must be a whole number"),
        ([torch.tensor([5])], {"max_new_tokens": "5"}, "max_new_tokens='5' must be a whole number"),
    ],
)
def test_batches_that_the_runner_refuses(runner, batch, change, said):
    with pytest.raises(ValueError, match=said):
        runner.generate(batch, **{"end_id": 2, "pad_id": 0, "max_new_tokens": 3, **change})


@pytest.mark.parametrize("name", ["max_seq_len", "max_batch_size", "max_num_tokens"])
def test_a_limit_beyond_every_engine_is_refused(name):
    with pytest.raises(ValueError, match=f"{name}=1000000000000000000 is more than any engine holds"):
        BuildConfig(**{name: 10**18})


def test_blocks_without_tokens_and_a_negative_optimum_are_refused():
    with pytest.raises(ValueError, match="tokens_per_block=0 must be from 1"):
        PluginConfig(tokens_per_block=0)
    with pytest.raises(ValueError, match="opt_num_tokens=-5 must be at least 1"):
        BuildConfig(opt_num_tokens=-5)


def test_four_threads_get_the_answers_of_one(llm):
    jobs = [(prompt_of(5 + i % 7, i), free_running(6 + i % 5)) for i in range(24)]
    expected = [llm.generate(*job).outputs[0].token_ids for job in jobs]
    got: list[list] = [[] for _ in range(4)]

    def work(mine: list) -> None:
        for job in jobs:
            mine.append(llm.generate(*job).outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in got]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert got == [expected] * 4
    assert_all_free(llm)


def test_an_interrupted_generate_frees_its_blocks_and_the_next_one_works(llm, monkeypatch):
    run, calls = llm._executor.engine.run, 0

    def interrupted(*inputs):
        nonlocal calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return run(*inputs)

    expected = llm.generate(PROMPT, free_running(8)).outputs[0].token_ids
    with monkeypatch.context() as patch:
        patch.setattr(llm._executor.engine, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt_of(8, i) for i in range(16)], free_running(100))
    assert_all_free(llm)
    assert llm.generate(PROMPT, free_running(8)).outputs[0].token_ids == expected
