"""Text from tokens, one at a time: the pieces together are the full decoding, and no piece is half a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, DecodeOnly, answer_text, full_text, metaspace_tokenizer, tokenizer_of
from trtllm_workshop.reference.detokenizer import REPLACEMENT, IncrementalDetokenizer
from trtllm_workshop.reference.token_bytes import TokenBytes

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
TEXTS = [
    "The capital of France is Paris.",
    "Caf\u00e9 na\u00efve \u2014 \u201cquoted\u201d",
    "\U0001f600 and \U0001f680!",
    FAMILY + " a family joined by ZWJ",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3068\u4e2d\u6587\u53e5\u5b50",
    "\ud55c\uad6d\uc5b4 and \u0440\u0443\u0441\u0441\u043a\u0438\u0439",
    "  two blanks,\n\nnew lines\tand a tab ",
    "x",
]
BOTH = pytest.mark.parametrize("kind", KINDS)
WAYS = pytest.mark.parametrize("way", ["table", "decode only"])
UNICODE = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30)


def tokenizer_for(kind, way):
    tokenizer = tokenizer_of(kind)
    assert TokenBytes.of(tokenizer) is not None, "the fast path is what is tested here"
    return tokenizer if way == "table" else DecodeOnly(tokenizer)


def stream(tokenizer, prompt, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    pieces = [detokenizer.add(token) for token in ids]
    pieces.append(detokenizer.flush())
    assert detokenizer.text == "".join(pieces)
    assert detokenizer.flush() == "", "a second flush has nothing left"
    return pieces


def test_the_metaspace_tokenizer_falls_back_to_bytes():
    tokenizer = tokenizer_of("metaspace")
    tokens = tokenizer.convert_ids_to_tokens(tokenizer.encode("\U0001f600"))
    assert tokens[-4:] == ["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("the cat"))[0].startswith("\u2581")


@WAYS
@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_P83_the_pieces_are_the_text_and_no_piece_is_half_a_character(kind, way, text):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("The answer:")
    ids = tokenizer.encode(" " + text, add_special_tokens=False) if kind == "byte-level" else tokenizer.encode(text)
    pieces = stream(tokenizer_for(kind, way), prompt, ids)
    full = full_text(tokenizer, prompt + ids)
    assert "".join(pieces) == full[len(full_text(tokenizer, prompt)) :] == " " + text
    assert not any(REPLACEMENT in piece for piece in pieces)


@WAYS
@BOTH
@settings(max_examples=150, deadline=None)
@given(text=UNICODE, cut=st.integers(0, 90), end=st.integers(0, 3))
def test_P83_any_text_cut_into_prompt_and_answer_at_any_token(kind, way, text, cut, end):
    """The cut may be inside a character, and the answer may end inside one."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    ids = ids[: len(ids) - end]
    prompt, made = ids[:cut], ids[cut:]
    expected = answer_text(kind, prompt, made)
    if way == "decode only" and kind == "metaspace" and REPLACEMENT in full_text(tokenizer, ids):
        return  # a run of bytes that breaks off changes text from before it, which decode alone cannot tell
    pieces = stream(tokenizer_for(kind, way), prompt, made, byte_run_limit=200)
    assert "".join(pieces) == expected
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces[:-1])


@BOTH
@pytest.mark.parametrize("interval", [1, 2, 8])
def test_P80_deltas_of_any_interval_join_to_the_full_decode(kind, interval):
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("Animals:"), tokenizer.encode("one cat, two dogs and \U0001f408 three")
    detokenizer, deltas = IncrementalDetokenizer(tokenizer, prompt), []
    for start in range(0, len(ids), interval):
        deltas.append("".join(detokenizer.add(token) for token in ids[start : start + interval]))
    deltas.append(detokenizer.flush())
    full = full_text(tokenizer, prompt + ids)
    assert full_text(tokenizer, prompt) + "".join(deltas) == full
    assert "one cat, two dogs and" in "".join(deltas)


@WAYS
def test_P80_blanks_between_words_are_kept_without_and_with_a_prompt(way):
    tokenizer = tokenizer_of("metaspace")
    ids = tokenizer.encode("one cat and one dog")
    tested = tokenizer_for("metaspace", way)
    assert "".join(stream(tested, [], ids)) == "one cat and one dog"
    assert "".join(tokenizer.decode([token]) for token in ids) != "one cat and one dog", "the trap: decoding each alone"
    assert "".join(stream(tested, tokenizer.encode("Animals:"), ids)) == " one cat and one dog"


@WAYS
@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("start", [[], ["<s>"], ["<s>"] * 8, ["\u2581"], ["<s>", "\u2581"], ["a", *["<s>"] * 8]])
def test_P80_a_blank_is_dropped_only_at_the_very_start_of_the_text(way, skip, start):
    tokenizer = tokenizer_of("metaspace")
    prompt = tokenizer.convert_tokens_to_ids(start)
    ids = tokenizer.encode("  cat") + tokenizer.encode("dog")
    assert tokenizer.convert_ids_to_tokens(ids)[0].startswith("\u2581")
    pieces = stream(tokenizer_for("metaspace", way), prompt, ids, skip_special_tokens=skip)
    assert full_text(tokenizer, prompt, skip) + "".join(pieces) == full_text(tokenizer, prompt + ids, skip)


def test_P80_a_decoder_that_strips_nothing_keeps_the_first_blank():
    tokenizer = metaspace_tokenizer(strip=False)
    assert TokenBytes.of(tokenizer) is not None
    ids = tokenizer.encode("one cat")
    assert "".join(stream(tokenizer, [], ids)) == " one cat" == full_text(tokenizer, ids)


def test_P81_two_requests_on_one_tokenizer_keep_two_cursors_and_get_only_what_is_new():
    tokenizer = tokenizer_of("byte-level")
    texts = ["caf\u00e9 and \U0001f600 twice \U0001f600", "\u65e5\u672c\u8a9e \U0001f680 done"]
    rows = [tokenizer.encode(text) for text in texts]
    both = [IncrementalDetokenizer(tokenizer, tokenizer.encode("Say:")) for _ in rows]
    shown = ["", ""]
    for step in range(max(map(len, rows))):
        for row, (ids, detokenizer) in enumerate(zip(rows, both, strict=True)):
            if step < len(ids):
                shown[row] += detokenizer.add(ids[step])
                assert texts[row].startswith(shown[row]) and detokenizer.text == shown[row]
    assert shown == texts


@WAYS
@BOTH
def test_P83_a_prompt_that_ends_inside_a_character(kind, way):
    """The answer that completes the character begins with it."""
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("a " + FAMILY + " b")
    tested = tokenizer_for(kind, way)
    for cut in range(len(ids) + 1):
        before, text = (
            full_text(tokenizer, ids[:cut]).rstrip(REPLACEMENT),
            "".join(stream(tested, ids[:cut], ids[cut:])),
        )
        assert REPLACEMENT not in text and ("a " + FAMILY + " b").endswith(text)
        if kind == "byte-level":  # the other kind decodes a broken run as nothing but U+FFFD
            assert before + text == "a " + FAMILY + " b"


@WAYS
@BOTH
def test_P83_a_prompt_that_ends_inside_a_character_which_nothing_completes(kind, way):
    """Its U+FFFD is the prompt's, as in the prompt's own decode."""
    tokenizer, tested = tokenizer_of(kind), tokenizer_for(kind, way)
    prompt, ids = tokenizer.encode("a \U0001f600")[:-1], tokenizer.encode(" b")
    assert "".join(stream(tested, prompt, [])) == ""
    assert full_text(tokenizer, prompt) + "".join(stream(tested, prompt, ids)) == full_text(tokenizer, prompt + ids)


@WAYS
@BOTH
def test_a_prompt_that_ends_in_many_split_characters(kind, way):
    tokenizer = tokenizer_of(kind)
    faces = "\U0001f600" * 7
    ids = tokenizer.encode("a" + faces)
    half = len(tokenizer.encode("a" + faces[:4]))
    assert "".join(stream(tokenizer_for(kind, way), ids[:half], ids[half:])) == faces[4:]


@WAYS
@BOTH
def test_P83_an_answer_that_ends_inside_a_character_shows_it_once(kind, way):
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("Say:"), tokenizer.encode("a \U0001f600")[:-1]
    pieces = stream(tokenizer_for(kind, way), prompt, ids)
    assert not any(REPLACEMENT in piece for piece in pieces[:-1]) and REPLACEMENT in pieces[-1]
    assert full_text(tokenizer, prompt) + "".join(pieces) == full_text(tokenizer, prompt + ids)


@WAYS
def test_special_tokens_are_left_out_unless_asked_for(way):
    tokenizer = tokenizer_of("byte-level")
    ids = [*tokenizer.encode("Hello"), 2, *tokenizer.encode(" there")]
    tested = tokenizer_for("byte-level", way)
    assert "".join(stream(tested, [1], ids)) == "Hello there"
    assert "".join(stream(tested, [1], ids, skip_special_tokens=False)) == "Hello<|im_end|> there"


@WAYS
@BOTH
def test_a_token_that_does_not_exist_has_no_text(kind, way):
    """A model's logits may be wider than its vocabulary."""
    tokenizer = tokenizer_of(kind)
    face = tokenizer.encode("\U0001f600")
    ids = [*face[:-2], 10**6, *face[-2:], 10**6]
    pieces = stream(tokenizer_for(kind, way), tokenizer.encode("a"), ids)
    assert "".join(pieces).strip() == "\U0001f600" and len(pieces) == len(ids) + 1
    with pytest.raises(OverflowError):
        stream(tokenizer_for(kind, way), [], [-1])


@pytest.mark.slow
@pytest.mark.parametrize("skip", [True, False])
def test_P83_the_packaged_smollm2_tokenizer(smollm2, skip):
    import random

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert TokenBytes.of(tokenizer) is not None
    chooser, size = random.Random(0), len(tokenizer)
    texts = [tokenizer.encode(" " + text, add_special_tokens=False) for text in TEXTS]
    noise = [[chooser.randrange(size) for _ in range(200)] for _ in range(50)]
    prompt = tokenizer.encode("The answer:")
    for ids in texts + noise:
        expected = full_text(tokenizer, prompt + ids, skip)[len(full_text(tokenizer, prompt, skip)) :]
        for tested in (tokenizer, DecodeOnly(tokenizer)):
            pieces = stream(tested, prompt, ids, skip_special_tokens=skip, byte_run_limit=len(ids))
            assert "".join(pieces) == expected
            shown = "".join(pieces[:-1])
            assert expected.startswith(shown) and (ids in noise or REPLACEMENT not in shown)
