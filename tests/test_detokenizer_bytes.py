"""Bytes that are no text: what is shown, when, and never before it is certain. The oracle is the tokenizer's own decode."""

from __future__ import annotations

import itertools
import os.path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, DecodeOnly, answer_text, byte_ids, full_text, tokenizer_of
from trtllm_workshop.reference.detokenizer import BYTE_RUN_LIMIT, REPLACEMENT, IncrementalDetokenizer

BOTH = pytest.mark.parametrize("kind", KINDS)
# Both ends of every range that the second byte of some character may come from, and bytes that are never UTF-8.
EDGES = bytes.fromhex("41 7F 80 8F 90 9F A0 BF C1 C2 DF E0 E1 EC ED EE EF F0 F1 F3 F4 F5 FF")
# Together these complete or break every beginning of a character, so what all of them share is certain.
ENDINGS = [
    b"",
    b"A",
    b"\xff",
    *(bytes([first]) + b"\x80" * more for first in (0x80, 0x90, 0xA0, 0xBF) for more in range(3)),
]


def tokens(kind):
    """Bytes more often than other tokens; special tokens and ids outside the vocabulary as well."""
    edges = st.sampled_from(byte_ids(kind, EDGES))
    face = st.just(byte_ids(kind, "\U0001f600".encode())).flatmap(st.sampled_from)
    return st.lists(st.one_of(edges, face, st.integers(0, 610)), max_size=12)


def pieces_of(tokenizer, prompt, ids, **options):
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    pieces = [detokenizer.add(token) for token in ids]
    return [*pieces, detokenizer.flush()]


@BOTH
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_P83_any_tokens_at_all_show_what_is_certain_and_end_as_their_full_decoding(kind, skip, data):
    """After every token: shown is exactly what all possible endings share, no less and no more."""
    tokenizer = tokenizer_of(kind)
    ids = data.draw(tokens(kind))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, made = ids[:cut], ids[cut:]
    endings = [byte_ids(kind, ending) for ending in ENDINGS]
    shown = ""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip)
    for count, token in enumerate(made, 1):
        shown += detokenizer.add(token)
        texts = [answer_text(kind, prompt, made[:count] + ending, skip) for ending in endings]
        if kind == "metaspace":  # a token that is no byte ends the run
            texts.append(answer_text(kind, prompt, [*made[:count], tokenizer.convert_tokens_to_ids("e")], skip))
        assert shown == os.path.commonprefix(texts)  # noqa: RUF071
        fresh = "".join(pieces_of(tokenizer, prompt, made[:count], skip_special_tokens=skip))
        assert fresh == answer_text(kind, prompt, made[:count], skip)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_table_and_decode_alone_agree_on_broken_bytes(data):
    tokenizer = tokenizer_of("byte-level")
    ids = data.draw(tokens("byte-level"))
    cut = data.draw(st.integers(0, len(ids)))
    fast, general = ("".join(pieces_of(tested, ids[:cut], ids[cut:])) for tested in (tokenizer, DecodeOnly(tokenizer)))
    assert fast == general == answer_text("byte-level", ids[:cut], ids[cut:])


@BOTH
def test_P83_every_sequence_of_three_edge_bytes(kind):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode("a")
    before = full_text(tokenizer, prompt)
    for data in itertools.product(EDGES, repeat=3):
        ids = byte_ids(kind, bytes(data))
        assert before + "".join(pieces_of(tokenizer, prompt, ids)) == full_text(tokenizer, prompt + ids), bytes(data)


@BOTH
def test_P83_every_pair_of_edge_bytes_at_the_end_of_the_prompt(kind):
    tokenizer = tokenizer_of(kind)
    for data, more in itertools.product(itertools.product(EDGES, repeat=2), [b"A", b"\x80A", b"\x80\x80A"]):
        prompt, ids = [*tokenizer.encode("a"), *byte_ids(kind, bytes(data))], byte_ids(kind, more)
        assert "".join(pieces_of(tokenizer, prompt, ids)) == answer_text(kind, prompt, ids), (bytes(data), more)


@BOTH
def test_half_of_a_surrogate_pair_is_broken_as_soon_as_its_second_byte_is_there(kind):
    """U+D800 to U+DFFF would be ED A0 80 to ED BF BF; they are no characters, so nothing can follow ED A0."""
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("a"), byte_ids(kind, b"\xed\xa0\x80")
    assert pieces_of(tokenizer, prompt, ids) == ["", REPLACEMENT * 2, REPLACEMENT, ""]
    assert "".join(pieces_of(tokenizer, prompt + ids[:2], ids[2:])) == REPLACEMENT
    assert pieces_of(tokenizer, prompt, byte_ids(kind, b"\xed\x9f\xbf"))[:2] == ["", ""]


@BOTH
def test_P83_an_endless_stream_of_broken_bytes_does_not_stall(kind):
    tokenizer = tokenizer_of(kind)
    ids = byte_ids(kind, b"\x80" * 300)
    assert pieces_of(tokenizer, tokenizer.encode("a"), ids) == [REPLACEMENT] * 300 + [""]
    slow = pieces_of(DecodeOnly(tokenizer), tokenizer.encode("a"), ids, byte_run_limit=5)
    assert "".join(slow) == REPLACEMENT * 300 and not any(slow[:5]) and all(slow[6:])


def held_bytes(text, shown):
    return len(text.encode()) - len(shown.encode())


@settings(max_examples=100, deadline=None)
@given(text=st.text(min_size=1, max_size=40).filter(lambda text: text.isprintable()))
def test_P83_a_byte_level_stream_holds_at_most_three_bytes(text):
    ids = byte_ids("byte-level", text.encode())
    detokenizer, shown = IncrementalDetokenizer(tokenizer_of("byte-level"), []), ""
    for count, token in enumerate(ids, 1):
        shown += detokenizer.add(token)
        assert text.startswith(shown) and 0 <= count - len(shown.encode()) <= 3


@pytest.mark.parametrize("limit", [0, 1, 4, 10, BYTE_RUN_LIMIT])
def test_P83_a_long_run_of_bytes_is_held_up_to_the_limit_and_then_shown_by_character(limit):
    text = "\U0001f600\u65e5\u00e9" * 20
    ids = byte_ids("metaspace", text.encode())
    detokenizer, shown = IncrementalDetokenizer(tokenizer_of("metaspace"), ids[:9], byte_run_limit=limit), ""
    text = text[3:]
    for count, token in enumerate(ids[9:], 1):
        shown += detokenizer.add(token)
        assert text.startswith(shown) and count - len(shown.encode()) <= max(limit, 3)
        assert count > limit or not shown
    assert shown == text and detokenizer.flush() == ""


def test_a_run_that_breaks_after_the_limit_keeps_what_was_shown():
    tokenizer = tokenizer_of("metaspace")
    ids = byte_ids("metaspace", "\U0001f600\U0001f600".encode() + b"\xe6\x97\xff\x41")
    after = tokenizer.convert_tokens_to_ids("e")
    pieces = pieces_of(tokenizer, tokenizer.encode("a"), [*ids, after], byte_run_limit=4)
    assert "".join(pieces) == "\U0001f600\U0001f600" + REPLACEMENT * 4 + "e"
    half = "".join(pieces_of(tokenizer, tokenizer.encode("a"), [*ids[:-2], after], byte_run_limit=4))
    assert half == "\U0001f600\U0001f600" + REPLACEMENT * 2 + "e", "one for each byte that was not shown yet"
    exact = "".join(pieces_of(tokenizer, tokenizer.encode("a"), [*ids, after]))
    assert exact == REPLACEMENT * 12 + "e", "below the limit the text is the tokenizer's own"


def test_a_byte_run_that_answer_and_prompt_share_keeps_the_prompts_characters():
    """The prompt's face has been read by then; only the answer's own bytes are shown as broken."""
    tokenizer = tokenizer_of("metaspace")
    face = byte_ids("metaspace", "\U0001f600".encode())
    bad = byte_ids("metaspace", b"\xff")
    assert pieces_of(tokenizer, face, bad) == [REPLACEMENT, ""]
    assert pieces_of(tokenizer, face + face[:2], face[2:]) == ["", "", "\U0001f600"]
    assert pieces_of(tokenizer, face + face[:2], face[2:] + bad) == ["", "", REPLACEMENT * 3, ""]
    assert pieces_of(tokenizer, bad, face) == [REPLACEMENT] * 4 + [""]


def test_a_blank_that_comes_as_a_byte_is_dropped_at_the_start_too():
    tokenizer = tokenizer_of("metaspace")
    ids = [*byte_ids("metaspace", b" "), *tokenizer.encode("cat")]
    assert "".join(pieces_of(tokenizer, [], ids)) == " cat" == full_text(tokenizer, ids)
    assert "".join(pieces_of(tokenizer, ids[:1], ids[1:])) == " cat"
