"""Token ids to text, one token at a time, without broken characters or lost blanks.

A token alone often has no text of its own: byte-level vocabularies split a character over several tokens, SentencePiece
drops a leading blank. So text is held back while a later token could change it.

Which text belongs to the answer? With full(ids) for the tokenizer's decode of all ids at once, blanks not cleaned up,
the pieces joined, with that of flush(), are what full(prompt + answer) has more than full(prompt). A prompt that ends inside
a character makes full(prompt) end with U+FFFD. If the answer's first bytes complete the character, the answer begins with
it (full(prompt) is then taken without the U+FFFD); if they break it, its U+FFFD stays with the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trtllm_workshop.reference.text_streams import REPLACEMENT, ByteFallbackStream, ByteLevelStream
from trtllm_workshop.reference.token_bytes import TokenBytes
from trtllm_workshop.reference.window_stream import WindowStream

__all__ = ["BYTE_RUN_LIMIT", "REPLACEMENT", "IncrementalDetokenizer"]

BYTE_RUN_LIMIT = 48  # the longest emoji (two people with skin tones, joined) takes 35 bytes


class IncrementalDetokenizer:
    """Feed tokens, get text.

    What add() returned is never taken back: it is a prefix of the text that the tokens have in the end, whatever follows.
    One case is left out to keep the wait bounded, byte-fallback runs above `byte_run_limit` (see text_streams.py).
    U+FFFD comes out of add() only for bytes that no token can make whole any more. Tokenizers of an unknown kind are
    decoded in a moving window (window_stream.py): several times slower, and exact for text that is valid UTF-8.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: the prompt's token ids, the left context of the first new token.
        skip_special_tokens: leave special tokens out of the text.
        byte_run_limit: how many bytes (tokens, for a tokenizer of an unknown kind) are held back at most.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        byte_run_limit: int = BYTE_RUN_LIMIT,
    ) -> None:
        def decode(ids: list[int]) -> str:
            text: str = tokenizer.decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
            return text

        table = TokenBytes.of(tokenizer)
        self._stream: ByteLevelStream | ByteFallbackStream | WindowStream = (
            WindowStream(decode, prompt, byte_run_limit)
            if table is None
            else table.stream(prompt, skip_special_tokens, byte_run_limit)
        )
        self._shown: list[str] = []

    @property
    def text(self) -> str:
        """All text so far."""
        self._shown = ["".join(self._shown)]
        return self._shown[0]

    def add(self, token: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete.

        Raises:
            OverflowError: for a negative id, as the tokenizer's own decode.
        """
        piece = self._stream.add(token)
        self._shown.append(piece)
        return piece

    def flush(self) -> str:
        """What is still held back at the end of the answer: an incomplete character, shown once."""
        piece = self._stream.flush()
        self._shown.append(piece)
        return piece
