"""Tokens to text, one at a time, for the two kinds of vocabulary whose tokens stand for bytes (see token_bytes.py).

Both hold text back only while a later token could still change it. Both follow the tokenizer's own decode to the letter,
also for bytes that are no UTF-8; the two kinds differ there:

* byte level: the longest start of a character that breaks off becomes one U+FFFD. At most 3 bytes are held back.
* byte fallback: the byte tokens that follow each other are decoded together. If they are UTF-8 they are text, and if not,
  each of them becomes a U+FFFD, good characters before the bad byte included. So a run of byte tokens is held back
  until it ends, but not longer than `byte_run_limit` bytes: from then on each character is let go when it is whole (at
  most 3 bytes are held back), and if the run is broken later, what was let go stays.

A prompt that ends inside a character leaves its bytes to the answer: the answer begins with the whole character if its
tokens complete it. If they do not, the prompt's bytes show in no answer (they are a U+FFFD in the prompt's own text).
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

REPLACEMENT = "\ufffd"


class ByteLevelStream:
    """Text of a byte-level vocabulary.

    Args:
        pieces: token id -> its text, or its bytes where they are no text by themselves.
        prompt: token ids before the first one that is added.
    """

    def __init__(self, pieces: Mapping[int, str | bytes], prompt: Sequence[int]) -> None:
        self._pieces = pieces
        end = b""
        for token in reversed(prompt):  # a character that is not complete began within the last three bytes
            end = _as_bytes(pieces[token]) + end
            if len(end) >= 3:
                break
        end = end[-3:]
        self._held = _decoded(end, "replace")[1]
        self._began_in_prompt = bool(self._held)

    def add(self, token: int) -> str:
        """The text that is certain now."""
        piece = self._pieces[token]
        if not self._held and isinstance(piece, str):
            return piece
        return self._decode(_as_bytes(piece), False)

    def flush(self) -> str:
        """The text of what is held back when nothing follows."""
        return self._decode(b"", True)

    def _decode(self, more: bytes, final: bool) -> str:
        text, self._held = _decoded(self._held + more, "replace", final)
        if text and self._began_in_prompt:
            self._began_in_prompt = False
            return text.removeprefix(REPLACEMENT)  # the prompt's text already ends with it
        return text


class ByteFallbackStream:
    """Text of a SentencePiece vocabulary with byte fallback.

    Args:
        pieces: token id -> its text, or one byte, or b"" for a token that is left out.
        prompt: token ids before the first one that is added.
        strips_blank: whether decode takes one blank away from the start of the text (of the prompt, if it has a text).
        byte_run_limit: how many bytes of one run are held back at most.
    """

    def __init__(
        self, pieces: Mapping[int, str | bytes], prompt: Sequence[int], strips_blank: bool, byte_run_limit: int
    ) -> None:
        self._pieces = pieces
        self._limit = byte_run_limit
        self._strip_next = strips_blank and not any(pieces[token] for token in prompt)
        self._new_run()
        run = bytearray()
        for token in reversed(prompt):
            piece = pieces[token]
            if isinstance(piece, str):
                break
            run += piece
        run.reverse()
        try:
            self._incomplete = _decoded(bytes(run), "strict")[1]
        except UnicodeDecodeError:
            self._broken = True
        self._simple = not (self._strip_next or self._broken or self._incomplete)

    def _new_run(self) -> None:
        self._whole = ""  # held back: characters of the run that are whole
        self._incomplete = b""  # held back: bytes of a character that is not whole yet
        self._own = 0  # how many of the held bytes are the answer's, and not the prompt's
        self._length = 0  # bytes of the run so far
        self._broken = False  # the run is no UTF-8

    def add(self, token: int) -> str:
        """The text that is certain now."""
        piece = self._pieces[token]
        if self._simple and isinstance(piece, str):
            return piece
        if isinstance(piece, str):
            return self._stripped(self._end_run() + piece)
        return self._stripped(self._add_byte(piece)) if piece else ""

    def flush(self) -> str:
        """The text of what is held back when nothing follows."""
        return self._stripped(self._end_run())

    def _stripped(self, text: str) -> str:
        if text and self._strip_next:
            self._strip_next = False
            text = text.removeprefix(" ")
        self._simple = not (self._strip_next or self._length or self._incomplete or self._broken)
        return text

    def _add_byte(self, byte: bytes) -> str:
        self._length += 1
        self._own += 1
        if not self._broken:
            try:
                text, self._incomplete = _decoded(self._incomplete + byte, "strict")
                self._whole += text
            except UnicodeDecodeError:
                self._broken, self._whole, self._incomplete = True, "", b""
        if self._broken:
            count, self._own = self._own, 0
            return REPLACEMENT * count
        if self._length > self._limit and self._whole:
            text, self._whole, self._own = self._whole, "", len(self._incomplete)
            return text
        return ""

    def _end_run(self) -> str:
        text = REPLACEMENT * self._own if self._incomplete else self._whole
        self._new_run()
        return text


def _decoded(data: bytes, errors: str, final: bool = False) -> tuple[str, bytes]:
    """The text of UTF-8, and the bytes at its end that may still become a character (none if `final`)."""
    text, used = utf_8_decode(data, errors, final)
    rest = data[used:]
    if rest[:1] == b"\xed" and rest[1:] >= b"\xa0":
        # Half of a surrogate pair is no character. Python knows that, but waits for the third byte to say so.
        return utf_8_decode(data, errors, True)[0], b""
    return text, rest


def _as_bytes(piece: str | bytes) -> bytes:
    return piece.encode() if isinstance(piece, str) else piece
