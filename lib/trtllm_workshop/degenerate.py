"""A gate for text that no one needs to read to see that it is broken."""

from __future__ import annotations

import re
from collections import Counter

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# A phrase this often in a row is a loop; prose repeats a word two or three times at most.
LOOP = 5


def degenerate_reason(text: str) -> str | None:
    """Why a generated text is degenerate, in words; None for a text that may be good or bad but is text.

    Looks for: nothing at all, replacement characters, one character or phrase in a loop, hardly any different words.
    """
    if not text.strip():
        return "empty: nothing but blanks"
    if text.count(REPLACEMENT) * 10 > len(text):
        return f"{text.count(REPLACEMENT)} of {len(text)} characters could not be decoded"
    if run := re.search(r"([^\W\d_])\1{14,}", text):
        return f"the character {run[1]!r} {len(run[0])} times in a row"
    if run := re.search(r"([^\W\d_]{2,8}?)\1{9,}", text):
        return f"{run[1]!r} {len(run[0]) // len(run[1])} times in a row"
    words = [word for word in text.split() if any(map(str.isalnum, word))]
    if not words and len(text.strip()) >= 20:
        return "no letters and no digits"
    if not words:
        return None
    for size in range(1, 9):
        count, phrase = _longest_loop(words, size)
        if count >= LOOP and size * count >= 8:
            return f"a loop: {' '.join(phrase)!r} {count} times in a row"
    common, count = Counter(words).most_common(1)[0]
    if len(words) >= 20 and count * 2 >= len(words):
        return f"{common!r} is {count} of {len(words)} words"
    if len(words) >= 60 and len(set(words)) * 8 < len(words):
        return f"only {len(set(words))} different words among {len(words)}"
    return None


def _longest_loop(words: list[str], size: int) -> tuple[int, list[str]]:
    """How often a phrase of `size` words follows itself at most, and the phrase."""
    best, phrase = 0, words[:0]
    for start in range(min(size, max(0, len(words) - size + 1))):
        count, previous = 0, words[:0]
        for place in range(start, len(words) - size + 1, size):
            current = words[place : place + size]
            count = count + 1 if current == previous else 1
            previous = current
            if count > best and any(any(c.isalnum() for c in word) for word in current):
                best, phrase = count, current
    return best, phrase
