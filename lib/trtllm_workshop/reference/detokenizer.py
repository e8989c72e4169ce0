"""Token ids to text, one token at a time, without broken characters or lost blanks.

A token alone often has no text of its own: byte-level vocabularies split a character over several tokens, SentencePiece
drops a leading blank. So the text of a token is the difference between two decodings that share a short left context,
and it is held back while it ends inside a character.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT = 6  # tokens of left context; enough for a character of four byte tokens and the blank before it, at the least


@dataclass
class IncrementalDetokenizer:
    """Feed tokens, get text.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: the prompt's token ids, the left context of the first new token.
        skip_special_tokens: leave special tokens out of the text.
    """

    tokenizer: Any
    prompt: list[int] = field(default_factory=list)
    skip_special_tokens: bool = True
    text: str = ""

    def __post_init__(self) -> None:
        count = CONTEXT
        # A context that starts inside a character spoils more than that one: some tokenizers decode a whole run of byte
        # tokens as one text or not at all. So it is widened until it reads well.
        while REPLACEMENT in self._decode(self.prompt[-count:]) and count < len(self.prompt):
            count *= 2
        self._ids = list(self.prompt[-count:])
        self._prefix, self._read = 0, len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def add(self, token: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        self._ids.append(token)
        before, after = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._ids)
        self.text += after[len(before) :]
        return after[len(before) :]

    def flush(self) -> str:
        """What is still held back at the end of the answer: an incomplete character, shown once."""
        before, after = self._decode(self._ids[self._prefix : self._read]), self._decode(self._ids[self._prefix :])
        self._prefix, self._read = self._read, len(self._ids)
        piece = after[len(before) :]
        self.text += piece
        return piece


def find_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """The first stop string in a text: (where it starts, which one), or None."""
    hits = [(text.find(s), s) for s in stops if s and s in text]
    return min(hits, key=lambda hit: hit[0]) if hits else None
