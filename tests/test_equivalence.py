"""The engine computes what Hugging Face computes: logits and greedy tokens, alone and in any company.

A relative difference is the largest difference in a token's row of logits over the largest logit of that row: logits
near zero have no scale of their own.
"""

from __future__ import annotations

import shutil

import pytest
import torch
from engines import TOKENS_PER_BLOCK, forced_logits, free_running, load_hf, logits_of, prompt_of, quiet
from tiny_models import FAMILIES
from trtllm_workshop.prompts import chat_prompt_ids
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.llm import LLM

NEW = 32


def relative_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float(((found - expected).abs().amax(-1) / expected.abs().amax(-1)).max())


def check_against_hf(llm, hf_logits, prompt):
    output = llm.generate(prompt, free_running(NEW, return_context_logits=True, return_generation_logits=True))
    made = output.outputs[0].token_ids
    expected = hf_logits(prompt + made)
    assert len(made) == NEW and made == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
    found = torch.cat((output.context_logits, output.outputs[0].generation_logits[1:]))
    assert relative_difference(found, expected[:-1]) <= 1e-4
    first = output.outputs[0].generation_logits[0]
    assert torch.equal(first, output.context_logits[-1]), "the first token is chosen from the prompt's last logits"


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_and_greedy_tokens(family, engines):
    check_against_hf(engines.llm(family), lambda ids: engines.hf_logits(ids, family), prompt_of(67))


@pytest.mark.parametrize("length", [1, TOKENS_PER_BLOCK - 1, TOKENS_PER_BLOCK, TOKENS_PER_BLOCK + 1, 127, 128])
def test_prompts_that_end_before_at_and_behind_a_block_boundary(length, engines):
    check_against_hf(engines.llm(), engines.hf_logits, prompt_of(length))


def alone(llm, prompts, tokens=NEW):
    return [llm.generate(prompt, free_running(tokens)).outputs[0].token_ids for prompt in prompts]


def together(llm, prompts, tokens=NEW):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, free_running(tokens))]


PROMPTS = [prompt_of(n, seed) for seed, n in enumerate((9, 1, 40, 8, 23, 64, 16, 5, 31))]


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2"])
def test_a_batch_gives_each_request_what_it_gets_alone(family, engines):
    llm = engines.llm(family)
    assert together(llm, PROMPTS[:8]) == alone(llm, PROMPTS[:8])


@pytest.fixture(scope="module")
def expected(engines):
    """What each prompt gets when it is alone."""
    return alone(engines.llm(), PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"batch": 2}, id="batch of two, nine prompts"),
        pytest.param({"max_num_tokens": 70}, id="several admission rounds"),
        pytest.param({"pool": 128}, id="pool of 128 tokens, requests wait"),
        pytest.param({"pool": 96, "batch": 3, "max_num_tokens": 64}, id="all at once"),
        pytest.param({"max_batch_size": 1}, id="engine of batch size one"),
        pytest.param({"plugin_config": {"tokens_per_block": 1}}, id="blocks of one token"),
        pytest.param({"plugin_config": {"tokens_per_block": 256}}, id="one block holds everything"),
    ],
)
def test_limits_change_the_order_of_work_and_not_the_answers(options, engines, expected):
    llm = engines.llm(**options)
    assert together(llm, PROMPTS) == expected
    cache = llm._executor.kv_cache.stats()
    assert cache.usedNumBlocks == 0, "blocks of finished requests are free again"


def test_the_smallest_engine(engines):
    llm = engines.llm(max_batch_size=1, max_seq_len=2, max_num_tokens=1, gather_context_logits=False)
    (token,) = llm.generate([7], free_running(1)).outputs[0].token_ids
    assert token == int(engines.hf_logits([7])[-1].argmax())


@pytest.mark.parametrize("most", [2, 3])
def test_engines_of_few_tokens_and_requests(most, engines):
    llm = engines.llm(max_batch_size=most, max_seq_len=12, max_num_tokens=most, gather_context_logits=False)
    prompts = [prompt_of(1 + n % most, n) for n in range(5)]
    assert together(llm, prompts, 4) == alone(engines.llm(), prompts, 4)


# 16 bit ---------------------------------------------------------------------------------------------------------------


def unexplained(found: torch.Tensor, expected: torch.Tensor, noise: float) -> list[int]:
    """Rows with another top-1 although the expected top-2 margin is not below the noise."""
    top = expected.topk(2).values
    margin = top[:, 0] - top[:, 1]
    other = found.argmax(-1) != expected.argmax(-1)
    return (other & (margin >= noise)).nonzero().flatten().tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_teacher_forced(dtype, family, engines):
    """Another top-1 only where the top-2 margin is below the measured logit noise.

    All sides have the same 16-bit weights. The yardstick is Hugging Face computing in float32; the noise is how far an
    independent implementation, Hugging Face computing in the same 16-bit type, strays from it: its largest difference of
    any logit. The engine itself may not stray further than that (with a half more, since it rounds at other places).
    """
    prompt, answer = prompt_of(48), prompt_of(NEW, seed=1)
    expected = engines.hf_logits(prompt + answer, family, dtype, "float32")[:-1]
    other = engines.hf_logits(prompt + answer, family, dtype)[:-1]
    found = forced_logits(engines.llm(family, dtype), prompt, answer)
    noise = float((other - expected).abs().max())
    assert 0 < noise < 0.2 * float(expected.abs().max())
    assert unexplained(found, expected, noise) == []
    assert float((found - expected).abs().max()) <= 1.5 * noise


@pytest.fixture(scope="module")
def built_smollm2(smollm2, tmp_path_factory):
    """SmolLM2 as an LLM of a type, made in a folder that goes away with the test."""

    def make(dtype):
        root = tmp_path_factory.mktemp("smollm2")
        checkpoint = convert_checkpoint(smollm2, root / "checkpoint", dtype=dtype, say=quiet).folder
        limits = BuildConfig(max_batch_size=4, max_seq_len=256, gather_context_logits=True)
        engine = build_engine(checkpoint, limits, root / "engine", log=quiet)
        llm = LLM(engine, tokenizer=str(smollm2), gather_generation_logits=True)
        shutil.rmtree(root)
        return llm

    return make


QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.mark.slow
def test_smollm2_in_float32(smollm2, built_smollm2):
    llm, model = built_smollm2("float32"), load_hf(smollm2, "float32")
    check_against_hf(llm, lambda ids: logits_of(model, ids), chat_prompt_ids(llm.tokenizer, QUESTION))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_smollm2_in_16_bit_teacher_forced(dtype, smollm2, built_smollm2):
    """As test_16_bit_teacher_forced, along the answer that the model gives in float32."""
    llm = built_smollm2(dtype)
    prompt = chat_prompt_ids(llm.tokenizer, QUESTION)
    exact = load_hf(smollm2, "float32")
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": [-1], "pad_token_id": 0}
    answer = exact.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
    expected, other = logits_of(exact, prompt + answer)[:-1], logits_of(load_hf(smollm2, dtype), prompt + answer)[:-1]
    found, noise = forced_logits(llm, prompt, answer), float((other - expected).abs().max())
    assert unexplained(found, expected, noise) == []
    assert float((found - expected).abs().max()) <= 1.5 * noise


def test_the_16_bit_check_finds_an_engine_that_is_wrong():
    expected = torch.tensor([[3.0, 1.0, 0.0], [2.0, 1.9, 0.0]])
    assert unexplained(expected.clone(), expected, 0.2) == []
    assert unexplained(torch.tensor([[1.0, 3.0, 0.0], [1.9, 2.0, 0.0]]), expected, 0.2) == [0]
