"""The link between the HTTP process and the engine process: JSON messages with their length in front, over a socket pair.

A frame is four bytes, the length of what follows (unsigned, most significant byte first), and a JSON array of messages. A
message is an object with `op`:

| direction | op | fields |
|---|---|---|
| to the engine | start | the options of the LLM (`serve_worker.start_engine`) |
| | submit | id, prompt or prompt_token_ids or messages, params (SamplingParams) |
| | abort | id |
| | ask | id, what (`stats`, `gauges`) |
| | stop | |
| from the engine | ready | what `serve_worker.describe` says |
| | failed | message |
| | accepted | id, prompt_tokens |
| | refused | id, message: the caller's fault |
| | news | id, text, tokens (so far), and if asked logprobs; at the end finish_reason, stop_reason or error |
| | answer | id, value |

JSON, because nothing that arrives can do anything but be data.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator, Sequence
from typing import Any

HEAD = struct.Struct(">I")
_LARGEST = 2**30

Message = dict[str, Any]


class LinkBroken(ConnectionError):
    """The other process is gone, or sent what is no frame."""


def pack(messages: Sequence[Message]) -> bytes:
    """One frame."""
    data = json.dumps(messages, separators=(",", ":"), allow_nan=False).encode("utf-8", "surrogatepass")
    return HEAD.pack(len(data)) + data


def length_of(head: bytes) -> int:
    """The length that a frame's first four bytes announce.

    Raises:
        LinkBroken: for one that no frame of ours has.
    """
    size = int(HEAD.unpack(head)[0])
    if size > _LARGEST:
        raise LinkBroken(f"a frame of {size:,} bytes was announced")
    return size


def read_frames(source: socket.socket) -> Iterator[list[Message]]:
    """The frames of a blocking socket until its other end is closed."""
    with source.makefile("rb") as stream:
        while head := stream.read(HEAD.size):
            if len(head) < HEAD.size:
                return
            data = stream.read(length_of(head))
            yield json.loads(data)
