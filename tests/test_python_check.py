"""Calls of the tensorrt_llm package are checked against the recorded signatures, without importing it."""

from __future__ import annotations

import pytest
from trtllm_workshop.commands import api, check_python

ENGINE_LLM = "from tensorrt_llm._tensorrt_engine import LLM\n"
PYTORCH_LLM = "from tensorrt_llm import LLM, SamplingParams, BuildConfig\n"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ENGINE_LLM + "LLM(model='e', tokeniser='m')", ["no argument tokeniser", "tokenizer"]),
        (ENGINE_LLM + "LLM(model='e', moe_config=None)", ["moe_config", "only the PyTorch class"]),
        (PYTORCH_LLM + "LLM(model='m', fast_build=True)", ["fast_build", "only the engine class", "_tensorrt_engine"]),
        (PYTORCH_LLM + "LLM()", ["needs model"]),
        (PYTORCH_LLM + "llm = LLM('m')\nllm.save('e')", ["no save()", "PyTorch class"]),
        (ENGINE_LLM + "with LLM('e') as llm:\n    llm.generate(['x'], sampling_parameters=1)", ["sampling_params"]),
        (ENGINE_LLM + "llm = LLM('e')\nllm.generate_async('x', stream=True)", ["streaming"]),
        (PYTORCH_LLM + "SamplingParams(max_new_token=8)", ["no argument max_new_token"]),
        (PYTORCH_LLM + "SamplingParams(0.8)", ["keywords only"]),
        (PYTORCH_LLM + "SamplingParams(temperature=-1)", ["temperature=-1 is below 0"]),
        (PYTORCH_LLM + "BuildConfig(max_sequence_len=8)", ["max_seq_len"]),
        ("import tensorrt_llm as t\nt.llmapi.KvCacheConfig(free_memory_fraction=1)", ["free_gpu_memory_fraction"]),
        (
            "from tensorrt_llm.runtime import ModelRunnerCpp\nr = ModelRunnerCpp.from_dir('e')\nr.generate([1], topk=1)",
            ["top_k"],
        ),
        (
            "from tensorrt_llm.runtime import ModelRunner\nModelRunner.from_dir('e', max_batch_size=1)",
            ["only ModelRunnerCpp.from_dir takes it"],
        ),
    ],
)
def test_wrong_calls_are_named_with_the_right_one(source, words):
    problems = [str(problem) for problem in check_python(source)]
    assert len(problems) == 1, problems
    for word in words:
        assert word in problems[0]


def test_right_calls_foreign_names_and_unknown_keywords_pass():
    assert (
        check_python(ENGINE_LLM + "llm = LLM(model=x, **options)\nllm.generate(prompts, params, use_tqdm=False)") == []
    )
    assert check_python("from vllm import LLM\nLLM(anything=1)") == []
    assert check_python("%%toolchain engine\n" + ENGINE_LLM + "!ls\nllm = LLM(model=engine)\nawait llm.aresult()") == []
    assert check_python(ENGINE_LLM + "llm = LLM('e')\nllm = other()\nllm.generate(bogus=1)") == []
    assert (
        check_python(
            "from tensorrt_llm.runtime import ModelRunner as M\nM.from_dir('e').generate([1], max_new_tokens=3)"
        )
        == []
    )
    with pytest.raises(SyntaxError):
        check_python("llm = = 3")


def test_api_tells_the_two_LLM_classes_apart():
    assert api("tensorrt_llm.LLM").backend == "pytorch"
    assert api("tensorrt_llm._tensorrt_engine.LLM").backend == "tensorrt"
    assert api("SamplingParams").parameters["max_tokens"].default == 32
    with pytest.raises(KeyError, match=r"nearest are .*SamplingParams"):
        api("SamplingParam")
