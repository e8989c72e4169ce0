"""What each token of a vocabulary stands for: whole characters, or bytes that only make a character with others.

A tokenizer's own `decode` takes tens of microseconds a call, whatever it decodes. The two kinds of decoder that Llama,
Mistral, Qwen and their relatives have work token by token, so the meaning of a token can be looked up once and kept:

* byte level (GPT-2 and what came after it): each character of a token's name is one byte, and the bytes of all tokens
  together are UTF-8. A token whose name has any other character (some added tokens do) stands for its name.
* byte fallback (SentencePiece models in transformers): a token's name is its text, with a mark for blanks, except for
  256 tokens named `<0x00>` to `<0xFF>`, which are one byte each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from trtllm_workshop.reference.text_streams import ByteFallbackStream, ByteLevelStream

SAMPLE = 256  # tokens of the vocabulary that are compared with the tokenizer's own decode before a table is trusted
_ATTRIBUTE = "_workshop_token_bytes"


class Pieces(dict[int, "str | bytes"]):
    """Token id to its text (str), or to its bytes where these are no text of their own; filled in when first asked for.

    A token that is left out, because it is special or does not exist, is b"".
    """

    def __init__(self, piece_of: Callable[[int], str | bytes]) -> None:
        super().__init__()
        self._piece_of = piece_of

    def __missing__(self, token: int) -> str | bytes:
        piece = self[token] = self._piece_of(token)
        return piece


class TokenBytes:
    """The table of one tokenizer. Get it with `TokenBytes.of(tokenizer)`.

    Args:
        backend: the tokenizers.Tokenizer inside a fast Hugging Face tokenizer.
        steps: the steps of its decoder, each as a dictionary with its "type".

    Raises:
        ValueError: for a decoder of another kind than the two described above.
    """

    def __init__(self, backend: Any, steps: list[dict[str, Any]]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added = list(added)
        self._special = frozenset(token.content for token in added.values() if token.special)
        self._replaced: list[tuple[str, str]] = []
        self._strips_blank = False
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            self._byte_of = byte_alphabet()
        elif _is_byte_fallback(steps):
            self._byte_of = {}
            self._replaced = [
                (step["pattern"]["String"], step["content"]) for step in steps if step["type"] == "Replace"
            ]
            self._strips_blank = any(step["type"] == "Strip" and step["start"] for step in steps)
        else:
            raise ValueError(f"no table for a decoder of the steps {kinds}: use the tokenizer's own decode")
        self._pieces = Pieces(self._with_special), Pieces(self._without_special)

    @classmethod
    def of(cls, tokenizer: Any) -> TokenBytes | None:
        """The tokenizer's table; None where it has none and its own decode must be used.

        The table is kept on the tokenizer object, so it is made once and goes with it. Tokens that are added to the
        tokenizer, or declared special, after the first call are not noticed.
        """
        kept = getattr(tokenizer, "__dict__", {})
        if _ATTRIBUTE not in kept:
            kept[_ATTRIBUTE] = cls._made_for(tokenizer)
        found: TokenBytes | None = kept[_ATTRIBUTE]
        return found

    @classmethod
    def _made_for(cls, tokenizer: Any) -> TokenBytes | None:
        try:
            backend = tokenizer.backend_tokenizer
            steps = json.loads(backend.decoder.__getstate__())
            table = cls(backend, steps["decoders"] if steps["type"] == "Sequence" else [steps])
        except (AttributeError, KeyError, TypeError, ValueError):
            return None  # no fast tokenizer, no decoder, or one of another kind
        return table if table._agrees_with(tokenizer) else None

    def _agrees_with(self, tokenizer: Any) -> bool:
        count = self._backend.get_vocab_size(with_added_tokens=False)
        sample = [*range(0, count, max(1, count // SAMPLE)), *self._added[:SAMPLE]]
        for skip in (False, True):
            stream = self.stream([], skip, byte_run_limit=len(sample))
            text = "".join(map(stream.add, sample)) + stream.flush()
            if text != tokenizer.decode(sample, skip_special_tokens=skip, clean_up_tokenization_spaces=False):
                return False
        return True

    def pieces(self, skip_special_tokens: bool) -> Pieces:
        """Token id -> what it stands for; special tokens stand for nothing where they are skipped."""
        return self._pieces[skip_special_tokens]

    def stream(
        self, prompt: Sequence[int], skip_special_tokens: bool, byte_run_limit: int
    ) -> ByteLevelStream | ByteFallbackStream:
        """A stream of text that goes on where the prompt ends."""
        pieces = self.pieces(skip_special_tokens)
        if self._byte_of:
            return ByteLevelStream(pieces, prompt)
        return ByteFallbackStream(pieces, prompt, self._strips_blank, byte_run_limit)

    def _with_special(self, token: int) -> str | bytes:
        return self._meaning(self._backend.id_to_token(token))

    def _without_special(self, token: int) -> str | bytes:
        name = self._backend.id_to_token(token)
        return b"" if name in self._special else self._meaning(name)

    def _meaning(self, name: str | None) -> str | bytes:
        if name is None:
            return b""
        if not self._byte_of:
            for mark, text in self._replaced:
                name = name.replace(mark, text)
            byte = _fallback_byte(name)
            return name if byte is None else bytes([byte])
        try:
            data = bytes([self._byte_of[character] for character in name])
        except KeyError:
            data = name.encode()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data


def byte_alphabet() -> dict[str, int]:
    """Which byte each character of a byte-level token's name is.

    Printable characters of Latin-1 stand for themselves; the other 68 bytes, in order, are the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _fallback_byte(name: str) -> int | None:
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        try:
            return int(name[3:5], 16)
        except ValueError:
            return None
    return None


def _is_byte_fallback(steps: list[dict[str, Any]]) -> bool:
    """Whether the steps are Replace (any number), ByteFallback, Fuse and perhaps Strip of one blank in front."""
    rest = list(steps)
    while rest and rest[0]["type"] == "Replace" and "String" in rest[0]["pattern"]:
        rest.pop(0)
    strip = rest[2:]
    return [step["type"] for step in rest[:2]] == ["ByteFallback", "Fuse"] and (
        not strip or (len(strip) == 1 and strip[0] == {"type": "Strip", "content": " ", "start": 1, "stop": 0})
    )
