"""Server-sent events, parsed from bytes that may be cut anywhere.

The format is that of the WHATWG HTML standard, section "Server-sent events": lines end in CR, LF or CRLF, a blank line ends
an event, `data:` lines of one event are joined by a line feed, lines that begin with a colon are comments.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

DONE = "[DONE]"


class BadEvent(ValueError):
    """An event whose data is not what an OpenAI-compatible server sends; the message has its number and its beginning."""


@dataclass(frozen=True)
class Event:
    """One event: its type (`message` unless the server names another) and its data."""

    data: str
    type: str = "message"


class SseParser:
    """Takes bytes as the network delivers them and gives each event once, whole.

    Bytes are decoded incrementally, so that a character whose bytes arrive in two pieces is not damaged.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._line = ""
        self._after_cr = False
        self._data: list[str] = []
        self._type = ""
        self._begun = False

    def feed(self, chunk: bytes, final: bool = False) -> list[Event]:
        """The events that `chunk` completes. With `final`, what was begun and not ended is dropped, as the standard says.

        Raises:
            BadEvent: for bytes that are not UTF-8.
        """
        try:
            text = self._decoder.decode(chunk, final)
        except UnicodeDecodeError as problem:
            raise BadEvent(f"the stream is not UTF-8: {problem.reason} near {problem.object[:40]!r}") from None
        if not self._begun and text:
            self._begun = True
            text = text.removeprefix("\ufeff")
        if self._after_cr and text:
            text = text.removeprefix("\n")
            self._after_cr = False
        if text.endswith("\r"):
            self._after_cr = True
        lines = (self._line + text.replace("\r\n", "\n").replace("\r", "\n")).split("\n")
        self._line = lines.pop()
        events = []
        for line in lines:
            event = self._take(line)
            if event is not None:
                events.append(event)
        return events

    def _take(self, line: str) -> Event | None:
        if not line:
            data, kind = self._data, self._type
            self._data, self._type = [], ""
            return Event("\n".join(data), kind or "message") if data else None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._type = value
        return None  # comments, and fields that nothing here needs


def event_json(event: Event, number: int) -> dict[str, Any]:
    """The JSON object in an event.

    Raises:
        BadEvent: when it is none, with the event's number (the first is 1).
    """
    try:
        value = json.loads(event.data)
    except ValueError as problem:
        raise BadEvent(f"event {number} is not JSON ({problem}): {event.data[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadEvent(f"event {number} is not a JSON object: {event.data[:80]!r}")
    return value
