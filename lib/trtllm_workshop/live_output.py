"""Output of a child on its way to the reader: shown while it arrives, and kept for the error message."""

from __future__ import annotations

import codecs
import re
import time
from collections import deque
from collections.abc import Callable

_PROGRESS_SECONDS = 0.25  # a progress meter may repaint its line a hundred times a second; a stored notebook keeps each
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LOOKS_LIKE_ERROR = re.compile(r"error|\[E\]|killed|out of memory", re.IGNORECASE)


class Kept:
    """The lines of a long output in bounded memory: the first, the last, and between them those that name errors."""

    def __init__(self, head_lines: int = 500, tail_lines: int = 2000, error_lines: int = 200):
        self._head: list[str] = []
        self._tail: deque[str] = deque(maxlen=tail_lines)
        self._errors: list[str] = []
        self._limits = head_lines, error_lines
        self._dropped = 0

    def add(self, line: str) -> None:
        """Keep one finished line (without its line end); very long lines are cut."""
        line = _COLOUR.sub("", line)
        if len(line) > 20_000:
            line = line[:20_000] + f" ... ({len(line):,} characters)"
        if len(self._head) < self._limits[0]:
            self._head.append(line)
            return
        if len(self._tail) == self._tail.maxlen:
            oldest = self._tail[0]
            if len(self._errors) < self._limits[1] and _LOOKS_LIKE_ERROR.search(oldest):
                self._errors.append(oldest)
            else:
                self._dropped += 1
        self._tail.append(line)

    def text(self) -> str:
        """Everything that was kept; a mark stands where lines were left out."""
        middle = [f"... ({self._dropped:,} lines left out)"] if self._dropped else []
        return "\n".join([*self._head, *self._errors, *middle, *self._tail])

    def last(self, count: int) -> list[str]:
        """The last `count` lines that are not blank."""
        lines = [line for line in [*self._head, *self._tail] if line.strip()]
        return lines[-count:]


class LiveText:
    """Turns arriving bytes into text for `show` at once, and into finished lines for `keep`.

    A line that its program repaints (`\\r`, as progress meters do) is shown at most four times a second, and only its
    final state is kept.
    """

    def __init__(self, show: Callable[[str], None], keep: Callable[[str], None]):
        self._show, self._keep = show, keep
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._line = ""  # since the last line end, with its carriage returns
        self._shown = ""  # what of that line the reader sees
        self._next_repaint = 0.0

    def feed(self, data: bytes) -> None:
        """Take the next piece of output."""
        self._line += self._decoder.decode(data)
        new: list[str] = []
        *finished, self._line = self._line.replace("\r\n", "\n").split("\n")
        for line in finished:
            state = _state(line)
            new += [self._paint(state), "\n"]
            self._shown = ""
            self._keep(state)
        if "\r" in self._line:
            state = _state(self._line)
            if time.monotonic() >= self._next_repaint:
                new.append(self._paint(state))
                self._next_repaint = time.monotonic() + _PROGRESS_SECONDS
            # Earlier states are gone from the screen; forgetting them keeps a long-lived meter from growing.
            self._line = "\r" + state + ("\r" if self._line.endswith("\r") else "")
        elif self._line:
            new.append(self._paint(self._line))
            if len(self._line) > 100_000:  # a line without end is kept in pieces
                self._keep(self._line)
                self._line = self._shown = ""
        if any(new):
            self._show("".join(new))  # one call: every one costs a message to the notebook

    def finish(self) -> None:
        """Show and keep a last line that has no line end."""
        self._line += self._decoder.decode(b"", final=True)
        if self._line:
            state, self._line = _state(self._line), ""
            self._show(self._paint(state) + "\n")
            self._keep(state)
        self._shown = ""

    def _paint(self, state: str) -> str:
        """What to write so that the reader's line reads `state`."""
        grown = state.startswith(self._shown)
        new = state[len(self._shown) :] if grown else "\r" + state.ljust(len(self._shown))
        self._shown = state
        return new


def _state(line: str) -> str:
    """What a terminal shows of a line with carriage returns: the part after the last one that something follows."""
    return line.rstrip("\r").rpartition("\r")[2]
