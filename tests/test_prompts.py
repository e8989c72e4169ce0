"""Prompts and answers in token ids: chat templates, BOS, seeds, loops, echoed prompts."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from trtllm_workshop.prompts import (
    chat_prompt_ids,
    find_loop,
    finish_note,
    fresh_seeds,
    missing_template_warning,
    new_tokens_only,
    one_bos,
    text_prompt_ids,
    writes_bos,
)

BOS = 0
WITH_BOS = "{{ bos_token }}{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"
WITHOUT_BOS = "{% for m in messages %}[INST]{{ m['content'] }}[/INST]{% endfor %}"


@pytest.fixture
def tokenizer():
    """One that writes <|endoftext|> (0) before every text, as the tokenizers of Llama do."""
    from tokenizers.processors import TemplateProcessing

    made = tiny_tokenizer()
    made.bos_token = "<|endoftext|>"
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)]
    )
    return made


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_P93_a_chat_has_exactly_one_bos(tokenizer, template):
    tokenizer.chat_template = template
    ids = chat_prompt_ids(tokenizer, "Hello there")
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert tokenizer.decode(ids[1:]) == "[INST]Hello there[/INST]"


def test_P93_two_bos_are_found_and_mended(tokenizer):
    tokenizer.chat_template = WITH_BOS
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    doubled = tokenizer.encode(text)
    assert doubled[:2] == [BOS, BOS], "the trap: template and tokenizer both write it"
    assert one_bos(doubled, tokenizer) == doubled[1:]


def test_P93_a_plain_prompt_keeps_exactly_one(tokenizer):
    assert text_prompt_ids(tokenizer, "Hello") == tokenizer.encode("Hello")
    assert text_prompt_ids(tokenizer, "<|endoftext|>Hello") == tokenizer.encode("Hello")


def test_P93_a_tokenizer_that_writes_no_bos_gets_none():
    tokenizer = tiny_tokenizer()
    assert not writes_bos(tokenizer)
    assert text_prompt_ids(tokenizer, "Hello") == tokenizer.encode("Hello")
    tokenizer.bos_token = None
    assert one_bos([5, 5, 6], tokenizer) == [5, 5, 6]


def test_the_conversation_ends_where_the_answer_begins():
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.decode(chat_prompt_ids(tokenizer, messages))
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n") and "Be kind." in text


def test_empty_and_unformatted_prompts_are_refused(tokenizer):
    for empty in ("", []):
        with pytest.raises(ValueError, match="conversation is empty"):
            chat_prompt_ids(tokenizer, empty)
    with pytest.raises(ValueError, match="empty text"):
        text_prompt_ids(tokenizer, "")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat_prompt_ids(tokenizer, "Hello")


def test_P94_an_instruct_model_without_its_template_is_warned_about():
    tokenizer = tiny_tokenizer()
    for model in ("HuggingFaceTB/SmolLM2-135M-Instruct", "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "google/gemma-2-2b-it"):
        warning = missing_template_warning(model, "What is a cat?", tokenizer)
        assert warning and model in warning and "chat_prompt_ids" in warning
        formatted = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
        assert missing_template_warning(model, formatted, tokenizer) is None
    assert missing_template_warning("Qwen/Qwen2-1.5B", "What is a cat?", tokenizer) is None
    assert missing_template_warning("some/kitchen-itinerary", "What?", tokenizer) is None
    tokenizer.chat_template = None
    assert missing_template_warning("x/y-Instruct", "What?", tokenizer) is None


def test_P94_loops_of_words_and_tokens_are_found():
    text = "The cat sat. I am a cat. I am a cat. I am a cat. I am a cat. I am"
    loop = find_loop(text.split())
    assert loop is not None and loop.times == 4 and loop.start == 3 and loop.part == ("I", "am", "a", "cat.")
    assert find_loop([1, 2, 3, 9, 9, 9, 9]) == ((9,), 4, 3)
    assert find_loop([1, 2, 3, 9, 9, 9]) is None, "three times is emphasis"
    assert find_loop(["one", "two", "three", "four", "five", "six", "seven", "eight"]) is None and find_loop([]) is None
    assert find_loop([7, 7, 7, 7, 1, 2]) is None, "a loop that the answer came out of"


@given(
    head=st.lists(st.integers(0, 3), max_size=6),
    part=st.lists(st.integers(4, 6), min_size=1, max_size=5),
    count=st.integers(4, 7),
)
def test_P94_every_loop_is_found_with_its_period(head, part, count):
    loop = find_loop(head + part * count)
    assert loop is not None and len(loop.part) <= len(part)
    assert loop.times >= (count if len(loop.part) == len(part) else 4), (
        "a shorter loop at the end of the part comes first"
    )
    tail = (head + part * count)[loop.start :]
    assert tail == (list(loop.part) * (loop.times + 1))[: len(tail)]


def test_P94_the_finish_note_says_looping():
    assert finish_note("no no no no no no", "length") == "looping"
    assert finish_note("no no no no no no", "stop") == "stop", "it did end"
    assert finish_note("a plain answer", "length") == "length" and finish_note("", None) == "unfinished"


def test_P92_every_request_gets_its_own_seed():
    seeds = fresh_seeds(100)
    assert len(set(seeds)) == 100 and all(0 <= seed < 2**64 for seed in seeds)
    assert fresh_seeds(3) != fresh_seeds(3) and fresh_seeds(0) == []
    with pytest.raises(ValueError, match="-1"):
        fresh_seeds(-1)


def test_P79_the_prompt_is_cut_by_count_and_not_by_text(tokenizer):
    typed = "Hello  there"
    prompt = [BOS, *tokenizer.encode(typed)]  # decodes to more than was typed: two BOS in front
    answer = tokenizer.encode(" General", add_special_tokens=False)
    row = [*prompt, *answer, 2, 2, 2]
    assert not tokenizer.decode(row).startswith(typed), "the trap: removing the typed text would remove nothing"
    made = new_tokens_only(row, len(prompt), len(prompt) + len(answer))
    assert made == answer and tokenizer.decode(made) == " General"
    assert new_tokens_only(row, len(prompt)) == [*answer, 2, 2, 2]
    for prompt_length, length in ((5, 4), (-1, 3), (1, 99)):
        with pytest.raises(ValueError, match="contradict"):
            new_tokens_only(row, prompt_length, length)


def test_the_module_needs_neither_torch_nor_transformers():
    code = "import sys, trtllm_workshop.prompts; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
