"""Text from tokens, one at a time: the pieces together are the full decoding, and no piece is half a character."""

from __future__ import annotations

import functools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiny_models import CORPUS, tiny_tokenizer
from trtllm_workshop.reference.detokenizer import REPLACEMENT, IncrementalDetokenizer, find_stop

TEXTS = [
    "The capital of France is Paris.",
    "Caf\u00e9 na\u00efve \u2014 \u201cquoted\u201d",
    "\U0001f600 and \U0001f680!",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 a family joined by ZWJ",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3068\u4e2d\u6587\u53e5\u5b50",
    "\ud55c\uad6d\uc5b4 and \u0440\u0443\u0441\u0441\u043a\u0438\u0439",
    "  two blanks,\n\nnew lines\tand a tab ",
    "x",
]


@functools.cache
def metaspace_tokenizer():
    """As SentencePiece models are in transformers: a mark for blanks, and bytes for what the vocabulary lacks."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", behavior="merged_with_next")  # marks begin tokens
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.read_text(encoding="utf-8").splitlines(), trainer)
    # The trainer marks the bytes as special tokens; in a real model they are ordinary ones, so rebuild without the marks.
    plain = Tokenizer.from_str(_without_added(tokenizer.to_str()))
    made = PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.clean_up_tokenization_spaces = False
    return made


def _without_added(text):
    import json

    parts = json.loads(text)
    parts["added_tokens"] = [entry for entry in parts["added_tokens"] if not entry["content"].startswith("<0x")]
    return json.dumps(parts)


@functools.cache
def tokenizer_of(name):
    return tiny_tokenizer() if name == "byte-level" else metaspace_tokenizer()


BOTH = pytest.mark.parametrize("name", ["byte-level", "metaspace"])


def stream(tokenizer, prompt, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    pieces = [detokenizer.add(token) for token in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    return pieces


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_the_metaspace_tokenizer_falls_back_to_bytes():
    tokenizer = metaspace_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("\U0001f600"))
    assert tokens[-4:] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the cat"))[0].startswith("\u2581")


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_P83_the_pieces_are_the_text_and_no_piece_is_half_a_character(name, text):
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.encode("The answer:")
    ids = tokenizer.encode(" " + text, add_special_tokens=False) if name == "byte-level" else tokenizer.encode(text)
    pieces = stream(tokenizer, prompt, ids)
    full = decoded(tokenizer, prompt + ids)
    assert "".join(pieces) == full[len(decoded(tokenizer, prompt)) :] == " " + text
    assert not any(REPLACEMENT in piece for piece in pieces)


@BOTH
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30), cut=st.integers(0, 60))
def test_any_text_cut_into_prompt_and_answer_at_any_token(name, text, cut):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode(text)
    cut = min(cut, len(ids))
    prompt, made = ids[:cut], ids[cut:]
    before = decoded(tokenizer, prompt)
    if before.endswith(REPLACEMENT):
        return  # a prompt that ends inside a character: its rest has no text of its own
    pieces = stream(tokenizer, prompt, made)
    assert before + "".join(pieces) == decoded(tokenizer, ids)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@BOTH
@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(3, 500), min_size=1, max_size=25))
def test_any_tokens_at_all_end_as_their_full_decoding(name, ids):
    """Random tokens are mostly broken characters: those are shown too, once it is certain that they are broken.

    Byte fallback is different: one wrong byte breaks the characters before it as well, which were shown by then.
    """
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.encode("The answer:")
    full = decoded(tokenizer, prompt + ids)
    assume(name == "byte-level" or REPLACEMENT not in full)
    assert decoded(tokenizer, prompt) + "".join(stream(tokenizer, prompt, ids)) == full


@BOTH
def test_a_prompt_that_ends_in_many_split_characters(name):
    tokenizer = tokenizer_of(name)
    faces = "\U0001f600" * 7
    ids = tokenizer.encode("a" + faces)
    half = len(tokenizer.encode("a" + faces[:4]))
    assert "".join(stream(tokenizer, ids[:half], ids[half:])) == faces[4:]


@BOTH
def test_an_answer_that_ends_inside_a_character_shows_it_once(name):
    tokenizer = tokenizer_of(name)
    ids = tokenizer.encode("a \U0001f600")[:-1]
    pieces = stream(tokenizer, tokenizer.encode("Say:"), ids)
    assert not any(REPLACEMENT in piece for piece in pieces[:-1]) and REPLACEMENT in pieces[-1]


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = tiny_tokenizer()
    ids = [*tokenizer.encode("Hello"), 2, *tokenizer.encode(" there")]
    assert "".join(stream(tokenizer, [1], ids)) == "Hello there"
    assert "".join(stream(tokenizer, [1], ids, skip_special_tokens=False)) == "Hello<|im_end|> there"


def test_P80_blanks_between_words_are_kept_without_and_with_a_prompt():
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode("one cat and one dog")
    assert "".join(stream(tokenizer, [], ids)) == "one cat and one dog"
    assert "".join(tokenizer.decode([token]) for token in ids) != "one cat and one dog", "the trap: decoding each alone"
    assert "".join(stream(tokenizer, tokenizer.encode("Animals:"), ids)) == " one cat and one dog"


def test_the_first_of_several_stop_strings_counts():
    assert find_stop("one two three", ["three", "two"]) == (4, "two")
    assert find_stop("one two", ["", "four"]) is None and find_stop("", ["a"]) is None
