"""From logits to a token, without a model: against hand computation and Hugging Face's logits processors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from trtllm_workshop.reference.request import logprobs_of
from trtllm_workshop.reference.sampler import (
    apply_penalties,
    banned_tokens,
    choose,
    is_plain_greedy,
    sampling_distribution,
)
from trtllm_workshop.reference.sampling_params import SamplingParams, StopRules


def random_logits(seed, size=100):
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def hf_distribution(logits, temperature, top_k, top_p):
    scores = logits[None]
    if temperature is not None:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores[0].softmax(-1)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.one_of(st.none(), st.floats(0.1, 5.0)),
    top_k=st.one_of(st.none(), st.integers(0, 120)),
    top_p=st.one_of(st.none(), st.floats(0.01, 1.0)),
)
def test_distributions_are_hugging_faces(seed, temperature, top_k, top_p):
    logits = random_logits(seed)
    found = sampling_distribution(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p))
    expected = hf_distribution(logits, temperature, top_k, top_p)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    # At a cut that falls within rounding of top_p either side may keep one more token.
    different = (found > 0) != (expected > 0)
    assert int(different.sum()) <= 1
    if not different.any():
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_top_k_and_top_p_by_hand():
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()
    two = sampling_distribution(logits, SamplingParams(top_k=2))
    torch.testing.assert_close(two, torch.tensor([5 / 7, 2 / 7, 0, 0, 0]))
    # 0.5 + 0.2 has not reached 0.75, so the token that passes it stays.
    share = sampling_distribution(logits, SamplingParams(top_p=0.75))
    torch.testing.assert_close(share, torch.tensor([0.5, 0.2, 0.15, 0, 0]) / 0.85)
    both = sampling_distribution(logits, SamplingParams(top_k=3, top_p=0.6))  # top_p counts within the three
    torch.testing.assert_close(both, torch.tensor([0.5, 0.2, 0, 0, 0]) / 0.7)
    torch.testing.assert_close(sampling_distribution(logits, SamplingParams(top_p=0.01)), torch.eye(5)[0])
    cold = sampling_distribution(logits, SamplingParams(top_k=2, temperature=0.5))  # squares of the probabilities
    torch.testing.assert_close(cold, torch.tensor([25 / 29, 4 / 29, 0, 0, 0]))


def test_tokens_are_drawn_with_their_probabilities():
    logits, params = torch.tensor([0.5, 0.3, 0.2, 0.0]).log(), SamplingParams(top_k=3, seed=1)
    generator, draws = torch.Generator().manual_seed(1), 3000
    counts = torch.zeros(4)
    for _ in range(draws):
        counts[choose(logits, params, StopRules(), [], [], generator)] += 1
    expected = torch.tensor([0.5, 0.3, 0.2]) * draws
    assert counts[3] == 0
    assert float(((counts[:3] - expected) ** 2 / expected).sum()) < 13.8  # chi squared, two degrees of freedom, p 0.001


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    penalty=st.floats(0.3, 3.0),
    prompt=st.lists(st.integers(0, 99), max_size=8),
    made=st.lists(st.integers(0, 99), max_size=8),
)
def test_the_repetition_penalty_is_hugging_faces(seed, penalty, prompt, made):
    logits = random_logits(seed)
    before = logits.clone()
    found = apply_penalties(logits, SamplingParams(repetition_penalty=penalty), prompt, made)
    assert torch.equal(logits, before), "the logits are kept for logprobs"
    if prompt or made:
        ids = torch.tensor([[*prompt, *made]])
        expected = RepetitionPenaltyLogitsProcessor(penalty)(ids, before.clone()[None])[0]
        torch.testing.assert_close(found, expected)
    else:
        assert torch.equal(found, before)


def test_presence_and_frequency_penalties_by_hand():
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    found = apply_penalties(torch.zeros(5), params, [0, 0], [1, 3, 3, 3])
    # Tokens of the answer count, those of the prompt do not: once 0.5, and 0.25 for each occurrence.
    assert found.tolist() == [0.0, -0.75, 0.0, -1.25, 0.0]
    assert apply_penalties(torch.zeros(5), params, [0], []).tolist() == [0.0] * 5


@settings(max_examples=80, deadline=None)
@given(
    bad=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=4),
    made=st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
def test_bad_sequences_are_hugging_faces(bad, made):
    made = [4, 4, 4, *made]  # Hugging Face skips sequences that are longer than what was made so far
    found = banned_tokens(StopRules(bad_sequences=bad), made)
    scores = NoBadWordsLogitsProcessor(bad, eos_token_id=99)(torch.tensor([made]), torch.zeros(1, 5))[0]
    assert found == set(scores.isinf().nonzero().flatten().tolist())


def test_ends_are_banned_until_min_tokens():
    rules = StopRules(end_ids={2}, stop_ids={4}, min_tokens=2)
    assert banned_tokens(rules, []) == banned_tokens(rules, [7]) == {2, 4}
    assert banned_tokens(rules, [7, 7]) == set()


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"temperature": 0.0, "top_k": 50}, {"top_k": 1, "top_p": 0.9}, {"top_p": 0.0}]
)
def test_P91_greedy_unless_top_k_or_top_p(params):
    logits = random_logits(3)
    params = SamplingParams(**params)
    assert params.greedy and is_plain_greedy(params, StopRules())
    assert choose(logits, params, StopRules(), [], [], None) == int(logits.argmax())


def test_whatever_changes_the_choice_is_not_plain_greedy():
    for change in ({"repetition_penalty": 1.2}, {"presence_penalty": 0.1}, {"frequency_penalty": 0.1}, {"top_k": 5}):
        assert not is_plain_greedy(SamplingParams(**change), StopRules()), change
    for rules in (StopRules(bad_sequences=[[1]]), StopRules(min_tokens=1)):
        assert not is_plain_greedy(SamplingParams(), rules)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"temperature": -1}, "temperature=-1.0 is out of range: 0 or more"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 100}, "top_p=100.0 is out of range: between 0 and 1"),
        ({"top_k": -1}, "top_k=-1 is out of range: 0 or more; 0 turns the limit off"),
        ({"max_tokens": 0}, "max_tokens=0 is out of range: at least 1"),
        ({"min_tokens": 33}, r"min_tokens=33 is out of range: at most max_tokens \(32\)"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"repetition_penalty": 0}, "repetition_penalty=0.0 is out of range: above 0"),
        ({"n": 2}, "n=2 .*one answer a request"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"max_tokens": "many"}, "max_tokens='many': .*integer"),
        ({"stop": 3}, "stop.*=3"),
        ({"temperatur": 1}, "temperatur; did you mean 'temperature'"),
        ({"use_beam_search": True}, "use_beam_search=True is an official argument that the reference .* not implement"),
    ],
)
def test_P91_values_out_of_range_are_refused_in_one_line(values, parts):
    with pytest.raises(ValueError, match=parts) as caught:
        SamplingParams(**values)
    assert "\n" not in str(caught.value) and "pydantic" not in str(caught.value)


def test_values_are_checked_on_assignment_too():
    params = SamplingParams(top_k=5)
    with pytest.raises(ValueError, match="top_p=100"):
        params.top_p = 100


def test_logprobs_hold_the_chosen_and_the_best_with_their_ranks():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    found = logprobs_of(logits, 0, 2)
    assert list(found) == [1, 3, 0] and [entry.rank for entry in found.values()] == [1, 2, 4]
    assert found[0].logprob == pytest.approx(torch.tensor(0.1).log().item())
    assert list(logprobs_of(logits, 2, 0)) == [2] and len(logprobs_of(logits, 2, 99)) == 4
