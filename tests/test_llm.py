"""The engine LLM: what it accepts as prompt and model, what it refuses, and that it cleans up behind itself."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from engines import free_running, prompt_of
from trtllm_workshop.checkpoint import WrongFolderKind, classify
from trtllm_workshop.reference.configs import BuildConfig, KvCacheConfig
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.sampling_params import SamplingParams

TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def llm(engines):
    return engines.llm()


def ids_of(output):
    return output.outputs[0].token_ids


# Prompts --------------------------------------------------------------------------------------------------------------


def test_every_form_of_a_prompt_means_the_same(llm):
    ids = llm.tokenizer.encode(TEXT)
    forms = (TEXT, ids, tuple(ids), {"prompt": TEXT}, {"prompt_token_ids": ids})
    outputs = [llm.generate(form, free_running(8)) for form in forms]
    assert all(output.prompt_token_ids == ids and ids_of(output) == ids_of(outputs[0]) for output in outputs)
    assert [output.prompt for output in outputs] == [TEXT, None, None, TEXT, None]
    together = llm.generate(list(forms), free_running(8))
    assert isinstance(together, list) and [ids_of(o) for o in together] == [ids_of(o) for o in outputs]


def test_a_flat_list_of_integers_is_one_prompt_and_a_list_of_lists_are_many(llm):
    one = llm.generate([5, 6, 7], free_running(4))
    assert not isinstance(one, list) and one.prompt_token_ids == [5, 6, 7]
    (only,) = llm.generate([[5, 6, 7]], free_running(4))
    assert ids_of(only) == ids_of(one)


def test_results_say_what_was_asked_and_why_they_ended(llm):
    output = llm.generate(TEXT, free_running(5))
    completion = output.outputs[0]
    assert output.finished and output.prompt == TEXT and len(output.outputs) == 1
    assert completion.index == 0 and completion.finish_reason == "length" and completion.length == 5
    assert completion.text == llm.tokenizer.decode([*output.prompt_token_ids, *completion.token_ids])[len(TEXT) :]
    assert completion.logprobs == [] and completion.generation_logits is None and output.context_logits is None


def test_sampling_params_for_all_or_one_for_each(llm):
    params = [free_running(2), free_running(5)]
    assert [len(ids_of(o)) for o in llm.generate([TEXT, TEXT], params)] == [2, 5]
    with pytest.raises(ValueError, match="2 sampling_params for 3 prompts"):
        llm.generate([TEXT] * 3, params)
    assert len(ids_of(llm.generate(TEXT, SamplingParams(ignore_eos=True)))) == 32, "the default of max_tokens"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("", "prompt is an empty text"),
        ([], "inputs is empty"),
        ([[]], "prompt is empty"),
        ([TEXT, ""], "prompt is an empty text"),
        ({"prompt": ""}, "prompt is an empty text"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"promt": TEXT}, "'promt' is not implemented"),
        ([TEXT, 3.5], "must be text or a list of token ids .* not 3.5"),
        ([["a", "b"]], "must be text or a list of token ids"),
        ([5, 512], "token id 512 is outside the vocabulary of 512"),
        ([5, -1], "token id -1 is outside"),
    ],
)
def test_prompts_that_are_refused(llm, prompt, said):
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt, free_running(4))
    assert not llm._executor.busy and llm._executor.kv_cache.stats().usedNumBlocks == 0


def test_P51_prompts_and_answers_beyond_the_engines_limits(llm):
    """max_seq_len 160 counts prompt and answer; with packed tokens the longest prompt is max_seq_len - 1."""
    assert len(ids_of(llm.generate(prompt_of(159), free_running(1)))) == 1
    with pytest.raises(ValueError, match=r"length \(160\) exceeds maximum input length \(159\).*--max_seq_len"):
        llm.generate(prompt_of(160), free_running(1))
    said = r"prompt length \(100\) and max_tokens \(61\) exceeds max_seq_len \(160\).*at most 60 tokens"
    with pytest.raises(ValueError, match=said):
        llm.generate(prompt_of(100), free_running(61))
    assert len(ids_of(llm.generate(prompt_of(100), free_running(60)))) == 60
    cut = llm.generate(prompt_of(300), free_running(4, truncate_prompt_tokens=20))
    assert cut.prompt_token_ids == prompt_of(300)[-20:]


def test_P51_max_input_len_counts_without_context_fmha_only(engines):
    plain = engines.llm(max_input_len=10, plugin_config={"context_fmha": False})
    with pytest.raises(ValueError, match=r"length \(11\) exceeds maximum input length \(10\)"):
        plain.generate(prompt_of(11), free_running(1))
    assert ids_of(plain.generate(prompt_of(10), free_running(4)))
    packed = engines.llm(max_input_len=10)
    assert ids_of(packed.generate(prompt_of(11), free_running(4)))


def test_P51_max_num_tokens_limits_the_prompt_too(engines):
    llm = engines.llm(max_num_tokens=70)
    with pytest.raises(ValueError, match=r"length \(71\) exceeds maximum input length \(70\).*--max_num_tokens"):
        llm.generate(prompt_of(71), free_running(1))


def test_a_request_that_the_pool_can_never_hold(engines):
    llm = engines.llm(pool=64)
    with pytest.raises(ValueError, match=r"need 80 tokens of KV cache, the whole pool holds 64; raise KvCacheConfig"):
        llm.generate([prompt_of(4), prompt_of(60)], free_running(20))
    assert not llm._executor.busy, "the other request of the batch is gone too"
    assert ids_of(llm.generate(prompt_of(4), free_running(20)))


def test_more_prompts_than_max_batch_size_wait_in_line(engines):
    llm = engines.llm(batch=2)
    before = llm._executor.iterations
    outputs = llm.generate([prompt_of(3, n) for n in range(7)], free_running(4))
    assert all(len(ids_of(output)) == 4 for output in outputs)
    assert llm._executor.iterations - before == 16, "seven requests, two at a time, four tokens each"


def test_an_interrupted_generate_leaves_no_request_behind(llm, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(type(llm._executor), "step", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT, TEXT], free_running(8))
    assert not llm._executor.busy and llm._executor.kv_cache.stats().usedNumBlocks == 0
    assert ids_of(llm.generate(TEXT, free_running(3)))


# Arguments ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_batchsize": 4}, "invalid argument: max_batchsize; did you mean 'max_batch_size'"),
        (
            {"enable_lora": True},
            "enable_lora=True is an official argument that the reference toolchain does not implement",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 is not consistent with the engine's 1"),
        ({"max_batch_size": -1}, "max_batch_size=-1 must be at least 1"),
    ],
)
def test_arguments_that_are_refused_by_name(engines, options, said):
    with pytest.raises(ValueError, match=said):
        LLM(engines.engine(), skip_tokenizer_init=True, **options)


def test_unknown_arguments_of_generate(llm):
    with pytest.raises(ValueError, match="invalid argument: samplingparams; did you mean 'sampling_params'"):
        llm.generate(TEXT, samplingparams=SamplingParams())
    with pytest.raises(ValueError, match=r"lora_request=.*does not implement"):
        llm.generate(TEXT, lora_request=object())


def test_without_a_tokenizer_only_token_ids(engines):
    llm = LLM(engines.engine(), skip_tokenizer_init=True)
    output = llm.generate([5, 6], SamplingParams(max_tokens=3))
    assert len(ids_of(output)) == 3 and output.outputs[0].text == ""
    with pytest.raises(ValueError, match=r"needs a tokenizer; pass LLM\(.*tokenizer=HF_FOLDER"):
        llm.generate(TEXT)
    with pytest.raises(ValueError, match="stop and bad words need a tokenizer"):
        llm.generate([5, 6], SamplingParams(stop="x"))


def test_a_tokenizer_folder_without_a_tokenizer(engines):
    with pytest.raises(FileNotFoundError, match="has no tokenizer files; pass the Hugging Face model folder"):
        LLM(engines.engine(), tokenizer=str(engines.checkpoint()))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"free_gpu_memory_fraction": 0}, "above 0 and at most 1"),
        ({"free_gpu_memory_fraction": 90}, "free_gpu_memory_fraction=90.0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_token": 5}, "did you mean 'max_tokens'"),
    ],
)
def test_kv_cache_settings_out_of_range(options, said):
    with pytest.raises(ValueError, match=said):
        KvCacheConfig(**options)


def test_P120_the_pool_says_its_size_and_what_decided_it(engines, capsys):
    LLM(engines.engine(), skip_tokenizer_init=True, kv_cache_config=KvCacheConfig(max_tokens=100))
    assert "KV cache: 13 blocks of 8 tokens = 104 tokens" in (out := capsys.readouterr().out)
    assert "decided by KvCacheConfig(max_tokens=100)" in out


# Models that are built here, and the end ------------------------------------------------------------------------------


def workspaces():
    return sorted(Path(tempfile.gettempdir()).glob("tllm-workspace-*"))


def test_a_hugging_face_folder_is_converted_and_built_inside(engines, llm, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    config = BuildConfig(max_batch_size=2, max_seq_len=64)
    with LLM(str(engines.hf()), dtype="float32", build_config=config) as built:
        assert classify(built.workspace / "engine") == "engine" and len(workspaces()) == 1
        assert ids_of(built.generate(TEXT, free_running(8))) == ids_of(llm.generate(TEXT, free_running(8)))
        built.save(str(tmp_path / "saved"))
        with pytest.raises(FileExistsError, match="saved is not empty"):
            built.save(str(tmp_path / "saved"))
        with pytest.raises(FileExistsError):
            built.save(str(engines.hf()))
    assert workspaces() == [] and os.listdir(tmp_path) == ["saved"]
    again = LLM(tmp_path / "saved", tokenizer=str(engines.hf()))
    assert ids_of(again.generate(TEXT, free_running(8))) == ids_of(llm.generate(TEXT, free_running(8)))
    monkeypatch.setattr(tempfile, "tempdir", None)


def test_a_checkpoint_is_built_inside_and_limits_are_taken(engines, capsys):
    with LLM(engines.checkpoint(), skip_tokenizer_init=True, max_seq_len=24, max_batch_size=2) as llm:
        assert llm._executor.engine.build_config["max_seq_len"] == 24
        with pytest.raises(ValueError, match=r"max_seq_len \(24\)"):
            llm.generate(prompt_of(20), free_running(5))
    LLM(engines.engine(), skip_tokenizer_init=True, max_seq_len=24, build_config=BuildConfig())
    out = capsys.readouterr().out
    assert "max_seq_len=24 is replaced by the engine's own 160" in out and "build_config is ignored" in out


def test_a_build_that_fails_inside_leaves_no_workspace(engines, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(WrongFolderKind, match="nowhere is not there"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="max_seq_len=-5"):
        LLM(engines.hf(), max_seq_len=-5)
    assert os.listdir(tmp_path) == []


def test_after_shutdown_generate_says_so(engines):
    llm = LLM(engines.engine(), skip_tokenizer_init=True)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(RuntimeError, match=r"was shut down.*Make a new LLM"):
        llm.generate([5, 6])
