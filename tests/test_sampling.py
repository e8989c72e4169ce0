"""Sampling and stopping through the engine: what SamplingParams does to real requests."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from engines import free_running, prompt_of
from trtllm_workshop.prompts import fresh_seeds
from trtllm_workshop.reference.llm import LLM
from trtllm_workshop.reference.runner import ModelRunnerCpp
from trtllm_workshop.reference.sampling_params import SamplingParams, end_of_sequence_ids, stop_rules

PROMPT = prompt_of(12)
NEW = 24


@pytest.fixture(scope="module")
def llm(engines):
    return engines.llm()


@pytest.fixture(scope="module")
def greedy(llm):
    """The first tokens of the plain answer, all different from each other as far as the tests need it."""
    return llm.generate(PROMPT, free_running(NEW)).outputs[0].token_ids


def answer(llm, **params):
    return llm.generate(PROMPT, SamplingParams(**{"max_tokens": NEW, "ignore_eos": True, **params})).outputs[0]


@pytest.mark.parametrize("params", [{}, {"temperature": 1.7}, {"temperature": 0.0, "top_k": 40}, {"top_k": 1}])
def test_P91_a_temperature_alone_changes_nothing(llm, greedy, params):
    assert answer(llm, **params).token_ids == greedy


def test_P92_a_seed_gives_the_same_answer_again_and_another_seed_another_one(llm, greedy):
    drawn = [answer(llm, top_k=50, temperature=1.5, seed=seed).token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2] and greedy not in drawn
    # Without a seed the default is fixed, as in TensorRT-LLM: every run draws the same.
    assert answer(llm, top_k=50).token_ids == answer(llm, top_k=50).token_ids == answer(llm, top_k=50, seed=0).token_ids


def test_P92_a_seed_means_the_same_in_any_batch_and_fresh_seeds_differ(llm):
    params = [SamplingParams(max_tokens=NEW, ignore_eos=True, top_p=0.9, seed=seed) for seed in (5, *fresh_seeds(3), 5)]
    made = [output.outputs[0].token_ids for output in llm.generate([PROMPT] * 5, params)]
    assert made[0] == made[4] == answer(llm, top_p=0.9, seed=5).token_ids
    assert len({tuple(tokens) for tokens in made}) == 4


@pytest.mark.parametrize("penalty", [1.5, 0.7])
def test_the_repetition_penalty_as_in_hugging_face(engines, llm, greedy, penalty):
    made = answer(llm, repetition_penalty=penalty).token_ids
    model = engines.hf_model()
    options = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": penalty, "eos_token_id": [-1]}
    expected = model.generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert made == expected != greedy


def test_a_strong_frequency_penalty_forbids_repetition(llm):
    for name in ("presence_penalty", "frequency_penalty"):
        made = answer(llm, **{name: 1000.0}).token_ids
        assert len(set(made)) == len(made)


# Ends -----------------------------------------------------------------------------------------------------------------


def first_seen(tokens, least):
    """The index, from `least` on, of a token that did not occur before."""
    return next(i for i in range(least, len(tokens)) if tokens[i] not in tokens[:i])


def test_end_tokens_max_tokens_and_ignore_eos(llm, greedy):
    at = first_seen(greedy, 5)
    ended = answer(llm, end_id=greedy[at], ignore_eos=False)
    assert ended.token_ids == greedy[: at + 1] and (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert answer(llm, end_id=greedy[at]).token_ids == greedy, "ignore_eos"
    short = answer(llm, max_tokens=3)
    assert short.token_ids == greedy[:3] and short.finish_reason == "length" and short.length == 3


def test_min_tokens_holds_the_end_back(engines, llm, greedy):
    at = first_seen(greedy, 2)
    made = answer(llm, end_id=greedy[at], ignore_eos=False, min_tokens=10)
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": greedy[at], "min_new_tokens": 10}
    expected = engines.hf_model().generate(torch.tensor([PROMPT]), **options)[0, len(PROMPT) :].tolist()
    assert made.token_ids == expected and made.length >= 10 and greedy[at] not in made.token_ids[:10]


def test_stop_tokens_are_no_part_of_the_answer(llm, greedy):
    at = first_seen(greedy, 5)
    ended = answer(llm, stop_token_ids=[greedy[at]], logprobs=0)
    assert ended.token_ids == greedy[:at] and (ended.finish_reason, ended.stop_reason) == ("stop", greedy[at])
    assert len(ended.logprobs) == at
    with_it = answer(llm, stop_token_ids=[greedy[at]], include_stop_str_in_output=True)
    assert with_it.token_ids == greedy[: at + 1]
    assert answer(llm, stop_token_ids=[greedy[0]]).token_ids == []


@pytest.mark.parametrize("as_list", [False, True])
def test_P89_a_stop_string_that_is_split_over_tokens_is_cut_exactly(llm, greedy, as_list):
    text = answer(llm).text
    pieces = [llm.tokenizer.decode(greedy[:n], skip_special_tokens=True) for n in range(NEW + 1)]
    # From the middle of the answer: the last character of one token and the first one of the next.
    border = next(len(p) for n, p in enumerate(pieces[6:], 6) if 0 < len(p) < len(pieces[n + 1]) and text.startswith(p))
    stop = text[border - 2 : border + 1]
    assert "\ufffd" not in stop and len(stop) == 3
    at = text.index(stop)
    ended = answer(llm, stop=[stop, "never said"] if as_list else stop)
    assert ended.text == text[:at] and (ended.finish_reason, ended.stop_reason) == ("stop", stop)
    assert len(ended.token_ids) < NEW
    assert answer(llm, stop=stop, include_stop_str_in_output=True).text == text[: at + len(stop)]


def test_bad_words_never_appear_in_either_spelling(llm, greedy):
    word = llm.tokenizer.decode(greedy[3:4])
    made = answer(llm, bad=word)
    assert word not in [llm.tokenizer.decode([t]) for t in made.token_ids] and made.token_ids[:3] == greedy[:3]
    assert greedy[3] not in answer(llm, bad_token_ids=[greedy[3]]).token_ids
    assert answer(llm, bad="").token_ids == greedy, "an empty word bans nothing"


class Tokenizer:
    def __init__(self, eos):
        self.eos_token_id = eos


@pytest.mark.parametrize(
    ("eos", "config", "expected"),
    [
        (2, {"eos_token_id": 2}, [2]),
        (2, {"eos_token_id": [2]}, [2]),
        (128009, {"eos_token_id": [128001, 128008, 128009]}, [128009, 128001, 128008]),
        (2, {"eos_token_id": 7}, [2, 7]),
        (2, {}, [2]),
        (2, None, [2]),
        (None, {"eos_token_id": [5, 6]}, [5, 6]),
        (None, None, []),
    ],
)
def test_P87_every_declared_end_counts(eos, config, expected):
    assert end_of_sequence_ids(Tokenizer(eos), config) == expected
    assert stop_rules(SamplingParams(), Tokenizer(eos), config).end_ids == set(expected)
    assert stop_rules(SamplingParams(ignore_eos=True), Tokenizer(eos), config).end_ids == set()


@pytest.fixture
def folder(engines, tmp_path):
    """A model folder whose generation_config.json a test may change."""
    return shutil.copytree(engines.hf(), tmp_path / "hf")


def test_P87_the_list_in_generation_config_ends_answers(engines, folder, greedy):
    at = first_seen(greedy, 4)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [511, greedy[at]]}))
    made = LLM(engines.engine(), tokenizer=str(folder)).generate(PROMPT, SamplingParams(max_tokens=NEW)).outputs[0]
    assert made.token_ids == greedy[: at + 1] and made.finish_reason == "stop"


def test_P87_a_model_without_generation_config_is_no_error(engines, folder, greedy):
    (folder / "generation_config.json").unlink()
    llm = LLM(engines.engine(), tokenizer=str(folder))
    assert llm.generate(PROMPT, SamplingParams(max_tokens=2)).outputs[0].token_ids == greedy[:2]


@pytest.mark.parametrize("pad_is_end", [True, False])
def test_P86_a_rows_real_length_is_told_apart_from_its_padding(engines, greedy, pad_is_end):
    runner = ModelRunnerCpp.from_dir(str(engines.engine()))
    at = first_seen(greedy, 6)
    end, other = greedy[at], prompt_of(9, 3)
    call = {"max_new_tokens": NEW, "end_id": end, "pad_id": end if pad_is_end else 0, "return_dict": True}
    made = runner.generate([torch.tensor(PROMPT), torch.tensor(other)], **call)
    ids, lengths = made["output_ids"][:, 0].tolist(), made["sequence_lengths"][:, 0].tolist()
    assert lengths[0] - len(PROMPT) == at + 1 and ids[0][: lengths[0]] == PROMPT + greedy[: at + 1]
    assert set(ids[0][lengths[0] :]) == {end}, "rows are filled up with end_id: looks like a runaway answer, is padding"
    assert len(ids[0]) == max(lengths)


# Probabilities --------------------------------------------------------------------------------------------------------


def test_logprobs_are_hugging_faces(engines, llm, greedy):
    made = answer(llm, logprobs=3)
    expected = engines.hf_logits(PROMPT + greedy)[len(PROMPT) - 1 : -1].log_softmax(-1)
    assert made.token_ids == greedy and len(made.logprobs) == NEW
    for token, entry, row in zip(greedy, made.logprobs, expected, strict=True):
        best = row.topk(3)
        assert list(entry) == best.indices.tolist() and entry[token].rank == 1
        assert [e.logprob for e in entry.values()] == pytest.approx(best.values.tolist(), abs=1e-4)
    chosen = expected[range(NEW), greedy].sum()
    assert made.cumulative_logprob == pytest.approx(float(chosen), abs=1e-3)


def test_the_chosen_token_is_always_in_its_logprobs(llm):
    made = answer(llm, top_p=1.0, temperature=3.0, seed=3, logprobs=1)
    assert all(token in entry for token, entry in zip(made.token_ids, made.logprobs, strict=True))
    assert any(
        len(entry) == 2 and entry[token].rank > 1 for token, entry in zip(made.token_ids, made.logprobs, strict=True)
    )


def test_prompt_logprobs_are_hugging_faces(engines, llm):
    made = answer(llm, prompt_logprobs=0, max_tokens=1)
    expected = engines.hf_logits(PROMPT)[:-1].log_softmax(-1)[range(len(PROMPT) - 1), PROMPT[1:]]
    assert [list(entry) for entry in made.prompt_logprobs] == [[token] for token in PROMPT[1:]]
    found = [entry[token].logprob for entry, token in zip(made.prompt_logprobs, PROMPT[1:], strict=True)]
    assert found == pytest.approx(expected.tolist(), abs=1e-4)


def test_what_needs_another_build_or_argument_says_which(engines):
    llm = LLM(engines.engine(gather_context_logits=False), tokenizer=str(engines.hf()))
    for params, said in (
        ({"logprobs": 1}, "gather_generation_logits=True"),
        ({"return_generation_logits": True}, "gather_generation_logits=True"),
        ({"prompt_logprobs": 1}, "--gather_context_logits"),
        ({"return_context_logits": True}, "--gather_context_logits"),
    ):
        with pytest.raises(ValueError, match=said):
            llm.generate(PROMPT, SamplingParams(**params))


def test_the_runner_reports_the_same_probabilities(engines, llm, greedy):
    runner = ModelRunnerCpp.from_dir(str(engines.engine(gather_generation_logits=True)))
    call = {"max_new_tokens": NEW, "end_id": -1, "pad_id": 0, "return_dict": True}
    made = runner.generate(
        [torch.tensor(PROMPT)], **call, output_log_probs=True, output_cum_log_probs=True, output_generation_logits=True
    )
    expected = [entry[token].logprob for entry, token in zip(answer(llm, logprobs=0).logprobs, greedy, strict=True)]
    assert made["log_probs"][0][0] == pytest.approx(expected, abs=1e-6)
    assert float(made["cum_log_probs"][0, 0]) == pytest.approx(sum(expected), abs=1e-4)
    assert made["generation_logits"][0].argmax(-1).flatten().tolist() == greedy
