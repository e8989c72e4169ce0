"""Stop strings in text that comes in pieces: cut exactly, however the text is cut, and nothing of them is ever shown."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_tokenizers import KINDS, tokenizer_of
from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer
from trtllm_workshop.reference.stop_text import StopTextFilter

STOPS = st.lists(st.text("ab\u00e9", min_size=1, max_size=5), max_size=4)
TEXT = st.text("ab\u00e9", max_size=30)


def filtered(pieces, stops, include=False):
    sieve = StopTextFilter(stops, include)
    return "".join([*map(sieve.add, pieces), sieve.flush()]), sieve.matched


def cut_by_hand(text, stops, include):
    """Reading character by character, until the text so far ends with a stop string."""
    for end in range(len(text) + 1):
        complete = sorted((stop for stop in stops if text[:end].endswith(stop)), key=len)
        if complete:
            return text[: end if include else end - len(complete[-1])], complete[-1]
    return text, None


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS, include=st.booleans(), cuts=st.sets(st.integers(0, 30)))
def test_P89_the_same_cut_for_every_way_to_cut_the_text_into_pieces(text, stops, include, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    assert filtered(pieces, stops, include) == cut_by_hand(text, stops, include)


@settings(max_examples=300, deadline=None)
@given(text=TEXT, stops=STOPS)
def test_P89_exactly_the_possible_start_of_a_stop_string_is_held_back(text, stops):
    sieve, shown = StopTextFilter(stops, False), ""
    for end in range(1, len(text) + 1):
        shown += sieve.add(text[end - 1])
        if sieve.matched is not None:
            break
        starts = (size for size in range(end, 0, -1) if any(stop.startswith(text[end - size : end]) for stop in stops))
        assert shown == text[: end - next(starts, 0)]


@pytest.mark.parametrize("stops", ["###", ["###"], ("###",)])
@pytest.mark.parametrize("include", [False, True])
def test_P89_a_stop_string_split_over_pieces_is_cut_exactly(stops, include):
    sieve = StopTextFilter(stops, include)
    pieces = ["An answer #", "# and more#", "#", "# Next question", "and on"]
    shown = [sieve.add(piece) for piece in pieces]
    assert shown == ["An answer ", "## and more", "", "###" if include else "", ""]
    assert sieve.matched == "###" and sieve.flush() == ""


def test_P89_a_start_that_leads_to_nothing_is_shown_at_the_end():
    sieve = StopTextFilter(["\n\nUser:"], False)
    assert [sieve.add("Hello\n\n"), sieve.add("Us"), sieve.matched] == ["Hello", "", None]
    assert sieve.flush() == "\n\nUs" and sieve.flush() == "" and sieve.matched is None


def test_P89_the_first_stop_string_to_be_complete_wins_and_the_longest_of_several():
    assert filtered(["x one two three"], ["three", "two"]) == ("x one ", "two")
    assert filtered(["xabcd"], ["abcd", "bc"]) == ("xa", "bc"), "nothing more is generated to see whether abcd comes"
    assert filtered(["xabc"], ["abc", "bc", "c"]) == ("x", "abc")
    assert filtered(["xabc"], ["c", "bc", "abc"], include=True) == ("xabc", "abc")
    assert filtered(["xab", "c"], ["abc", "ab"]) == ("x", "ab")


def test_without_stop_strings_everything_goes_through_at_once():
    sieve = StopTextFilter([], False)
    assert [sieve.add("a"), sieve.add(""), sieve.add("b"), sieve.flush(), sieve.matched] == ["a", "", "b", "", None]


@pytest.mark.parametrize("stops", [[""], ["a", ""], "", [["x"]], [None], [7]])
def test_P89_what_cannot_be_a_stop_string_is_refused(stops):
    with pytest.raises(ValueError, match="cannot be a stop string; give strings"):
        StopTextFilter(stops, False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", [" dog", "dog", "\U0001f600", "t and", "\u65e5\u672c"])
def test_P89_stop_strings_behind_a_detokenizer_do_not_depend_on_the_tokens(kind, stop):
    """With and without a blank in front, inside a character of several tokens, across tokens."""
    text = "the cat and the dog \U0001f600 say \u65e5\u672c\u8a9e"
    tokenizer = tokenizer_of(kind)
    prompt, ids = tokenizer.encode("Say:"), tokenizer.encode(text if kind == "metaspace" else " " + text)
    detokenizer, sieve, shown = IncrementalDetokenizer(tokenizer, prompt), StopTextFilter([stop], False), ""
    for token in ids:
        shown += sieve.add(detokenizer.add(token))
        assert f" {text[: text.index(stop)]}".startswith(shown)
    shown += sieve.add(detokenizer.flush()) + sieve.flush()
    assert shown == f" {text[: text.index(stop)]}" and sieve.matched == stop
