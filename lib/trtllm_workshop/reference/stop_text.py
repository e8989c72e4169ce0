"""Stop strings in text that comes in pieces.

A stop string may be split over any number of pieces, so text that could be the start of one must wait. The text ends
where a stop string is first complete, reading character by character, so the result never depends on how the text was
cut into pieces, and no token is generated just to see whether a longer stop string would follow. If several stop strings
are complete at the same character, the longest of them counts: it starts first.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopTextFilter:
    """Let text through up to the first stop string, and nothing after it.

    The text that is held back is always the longest end of the text so far that begins some stop string, so its length
    is below the longest stop string's. It is also the state of the search (the automaton of Aho and Corasick).

    Args:
        stops: the stop strings; one string alone is one stop string.
        include_stop: whether the stop string that ended the text is part of it.

    Raises:
        ValueError: for an empty stop string, or something that is not a string.

    Attributes:
        matched: the stop string that ended the text, or None.
    """

    def __init__(self, stops: str | Sequence[str], include_stop: bool = False) -> None:
        stops = [stops] if isinstance(stops, str) else list(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ValueError(
                    f"stop={stops!r}: {stop!r} cannot be a stop string; give strings of at least one character, "
                    "or leave stop out"
                )
        self.matched: str | None = None
        self._include_stop = include_stop
        self._held = ""
        self._longest_first = sorted(set(stops), key=len, reverse=True)
        self._first = frozenset(stop[0] for stop in stops)
        self._beginnings = frozenset(stop[:end] for stop in stops for end in range(1, len(stop) + 1))
        self._alphabet = frozenset("".join(stops))
        self._next: dict[str, tuple[str, str | None]] = {}

    def add(self, piece: str) -> str:
        """The text that may be shown now; empty once a stop string was found."""
        if self.matched is not None:
            return ""
        if not self._held and self._first.isdisjoint(piece):
            return piece
        text, state = self._held + piece, self._held
        for end, character in enumerate(piece, len(state) + 1):
            state, stop = self._follow(state, character)
            if stop is not None:
                self.matched, self._held = stop, ""
                return text[: end if self._include_stop else end - len(stop)]
        self._held = state
        return text[: len(text) - len(state)]

    def flush(self) -> str:
        """What was held back, at the end of a text in which no stop string was found."""
        held, self._held = self._held, ""
        return held

    def _follow(self, state: str, character: str) -> tuple[str, str | None]:
        """From one state to the next: the longest end of the text that begins a stop string, and what is complete."""
        if character not in self._alphabet:
            return "", None
        text = state + character
        if text not in self._next:
            after = next((text[at:] for at in range(len(text)) if text[at:] in self._beginnings), "")
            self._next[text] = after, next((stop for stop in self._longest_first if after.endswith(stop)), None)
        return self._next[text]
