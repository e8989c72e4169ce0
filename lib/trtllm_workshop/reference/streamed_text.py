"""The runners' streamed outputs as new text only.

A runner yields everything made so far at every step: rows of token ids, prompt included. Printing each of them in full
shows the same text again and again, so here every row keeps a cursor and gives only what was added since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trtllm_workshop.reference.detokenizer import IncrementalDetokenizer

Step = TypeVar("Step")


def throttle(steps: Iterable[Step], interval: int) -> Iterator[Step]:
    """The first step, every `interval`-th after it, and always the last one, which holds the full answer.

    Raises:
        ValueError: for an interval below 1.
    """
    if interval < 1:
        raise ValueError(f"a streaming interval of {interval}: give 1 or more steps")
    held: list[Step] = []
    for number, step in enumerate(steps):
        held = [step]
        if number % interval == 0:
            yield held.pop()
    yield from held


@dataclass(frozen=True)
class Piece:
    """Text that a row gained. `rewritten`: the row's earlier tokens changed, so `text` starts from its beginning."""

    text: str
    rewritten: bool = False


class StreamedRow:
    """One row's cursor.

    Args:
        tokenizer: a Hugging Face tokenizer.
        prompt: the prompt's token ids, the left context of the answer.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        self._tokenizer, self._prompt = tokenizer, list(prompt)
        self._start()

    def _start(self) -> None:
        self._seen: list[int] = []
        self._detokenizer = IncrementalDetokenizer(self._tokenizer, self._prompt)

    @property
    def text(self) -> str:
        """Everything given so far."""
        return self._detokenizer.text

    def update(self, answer: Sequence[int]) -> Piece:
        """What is new in the answer's tokens so far (prompt and padding left out); incomplete characters wait.

        The tokens of a beam search may change afterwards. Such a row starts again, whatever its new length.
        """
        rewritten = list(answer[: len(self._seen)]) != self._seen
        if rewritten:
            self._start()
        added = list(answer[len(self._seen) :])
        self._seen += added
        return Piece("".join(self._detokenizer.add(token) for token in added), rewritten)

    def finish(self) -> Piece:
        """What was held back: the bytes of a character that the answer broke off."""
        return Piece(self._detokenizer.flush())


def text_of(tokenizer: Any, prompt: Sequence[int], answer: Sequence[int]) -> str:
    """The text of a complete answer, the same as its streamed pieces joined."""
    row = StreamedRow(tokenizer, prompt)
    row.update(answer)
    row.finish()
    return row.text
