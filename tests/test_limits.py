"""Length limits and sampling parameters: where they come from, and what would go wrong."""

from __future__ import annotations

import pytest
from trtllm_workshop.limits import PromptTooLong, effective_limits, effective_new_tokens, explain_limits
from trtllm_workshop.sampling_check import check_sampling, is_greedy


def test_P49_every_limit_says_who_set_it():
    config = {"max_position_embeddings": 4096, "rotary_scaling": None}
    limits = {limit.name: limit for limit in effective_limits(config, {"max_batch_size": 8})}
    assert (limits["max_batch_size"].value, limits["max_batch_size"].origin) == (8, "user")
    assert (limits["max_seq_len"].value, limits["max_seq_len"].origin) == (4096, "model")
    assert (limits["max_num_tokens"].value, limits["max_num_tokens"].origin) == (8192, "default")
    text = explain_limits(config, {"--max_seq_len": "512"})
    assert any(line.split()[:3] == ["max_seq_len", "512", "user"] for line in text.splitlines())


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [({"type": "linear", "factor": 4.0}, 8192), ({"rope_type": "llama3", "factor": 8.0}, 2048), (None, 2048)],
)
def test_P49_the_models_limit_is_stretched_by_its_rotary_factor(scaling, expected):
    limits = {v.name: v for v in effective_limits({"max_position_embeddings": 2048, "rope_scaling": scaling}, {})}
    assert limits["max_seq_len"].value == expected
    without = {limit.name: limit for limit in effective_limits({}, {})}["max_seq_len"]
    assert (without.value, without.origin) == (2048, "default")


def test_P51_new_tokens_are_clamped_and_long_prompts_refused():
    assert effective_new_tokens(127, 1, 128) == (1, False, "")
    clamped = effective_new_tokens(100, 64, 128)
    assert clamped.allowed == 28 and clamped.clamped and "64" in clamped.message and "28" in clamped.message
    assert effective_new_tokens(127, 64, 128).allowed == 1
    for prompt in (128, 129):
        with pytest.raises(PromptTooLong, match=rf"{prompt} tokens.*128"):
            effective_new_tokens(prompt, 1, 128)
    with pytest.raises(ValueError, match="empty"):
        effective_new_tokens(0, 1, 128)
    with pytest.raises(ValueError, match="max_tokens is 0"):
        effective_new_tokens(5, 0, 128)


def problems_of(**parameters: object) -> list[str]:
    return [str(problem) for problem in check_sampling(**parameters)]


def test_P91_temperature_without_top_k_or_top_p_has_no_effect():
    for given in ({}, {"top_k": 1}, {"top_k": 1, "top_p": 0.9}, {"top_p": 0.0}):
        (text,) = problems_of(temperature=0.7, **given)
        assert text.startswith("warning: temperature=0.7 has no effect")
    assert problems_of(temperature=0.7, top_k=40) == [] and problems_of(temperature=0.7, top_p=0.9) == []


def test_P91_values_out_of_range_are_errors():
    assert "top_p=100 is not a share" in problems_of(top_p=100)[0] and "100 percent is 1" in problems_of(top_p=100)[0]
    assert "temperature=-1 is below 0" in problems_of(temperature=-1, top_k=40)[0]
    assert "top_k=0 to switch" in problems_of(top_k=-1)[0]
    assert "max_tokens=0 is too small" in problems_of(max_tokens=0)[0]
    assert "not a number" in problems_of(temperature="0.7", top_k=5)[0]
    assert "not a number" in problems_of(temperature=float("nan"), top_k=5)[0]
    assert "min_tokens=40 is above max_tokens=32" in problems_of(min_tokens=40)[0]


def test_P91_temperature_zero_is_greedy_and_unknown_names_are_refused():
    assert problems_of(temperature=0, top_k=40) == [] and is_greedy(0, 40, 0.9)
    assert "use top_k" in problems_of(runtime_top_k=3)[0] and problems_of(runtime_top_k=3)[0].startswith("error")
    assert "use max_tokens" in problems_of(max_new_tokens=3)[0]
    assert "temperatur is not a sampling parameter" in problems_of(temperatur=1)[0]
