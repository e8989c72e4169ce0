"""Tokens to text, one at a time, with nothing but the tokenizer's own decode: right for any tokenizer, and slow.

The text of a token is the difference between two decodings that share a short left context. It is held back while it
ends with U+FFFD, which is how half a character reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trtllm_workshop.reference.text_streams import REPLACEMENT

CONTEXT = 6  # tokens of left context; enough for a character of four byte tokens and the blank before it, at the least


class WindowStream:
    """Text of any vocabulary.

    Args:
        decode: token ids -> text, as the tokenizer does it.
        prompt: token ids before the first one that is added.
        limit: tokens that are held back at most. After that all but the last U+FFFD is taken for final.
    """

    _seam: list[str]

    def __init__(self, decode: Callable[[list[int]], str], prompt: Sequence[int], limit: int) -> None:
        self._decode, self._limit = decode, limit
        count = CONTEXT
        # A context without text hides whether a blank starts the text, and one that starts inside a character spoils
        # more than that one: some tokenizers decode a whole run of byte tokens as one text or not at all. So it is
        # widened until it reads well.
        while count < len(prompt):
            text = decode(list(prompt[-count:]))
            if text.strip() and REPLACEMENT not in text:
                break
            count *= 2
        self._ids = list(prompt[-count:])
        self._set_before()
        if self._before.endswith(REPLACEMENT):
            # The prompt ends inside a character: which part of the text is the prompt's shows when that is complete.
            self._seam = [decode(self._ids[: len(self._ids) - drop]) for drop in range(4)]

    def _set_before(self) -> None:
        self._before = self._decode(self._ids)
        self._context, self._waiting = len(self._ids), 0
        self._seam = []

    def _known(self, after: str) -> int:
        """How many characters of the window's text were there before."""
        if self._seam:
            return max(_common(before, after) for before in self._seam)
        return len(self._before)

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._ids.append(token)
        after = self._decode(self._ids)
        if not after.endswith(REPLACEMENT):
            return self._take(after)
        self._waiting += 1
        if self._waiting <= self._limit:
            return ""
        certain = after[:-1]
        piece = certain[self._known(after) :]
        if piece:
            self._before, self._seam = certain, []
        return piece

    def flush(self) -> str:
        """The text of what is held back when nothing follows."""
        return self._take(self._decode(self._ids))

    def _take(self, after: str) -> str:
        piece = after[self._known(after) :]
        if piece:  # the tokens that made it are the next context, with the prompt's while they share a character
            self._ids = self._ids[0 if self._seam else self._context :]
            self._set_before()
        return piece


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
