"""Text of a config.pbtxt, with a comment for everything that a reader may want to change."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """An input or output of a Triton model.

    Attributes:
        name: as clients send it.
        kind: Triton's type without `TYPE_`: STRING, INT32, UINT64, FP32, BOOL …
        dims: shape without the batch; -1 is any size.
        optional: may be left out; for inputs only.
        note: a comment behind it.
    """

    name: str
    kind: str
    dims: Sequence[int] = (1,)
    optional: bool = False
    note: str = ""


def quoted(value: object) -> str:
    """A string of protobuf's text format: in double quotes, everything unusual escaped."""
    return json.dumps(str(value), ensure_ascii=False)


def comment(text: str) -> str:
    """Lines that begin with `# `."""
    return "\n".join(textwrap.wrap(text, 118, initial_indent="# ", subsequent_indent="# "))


def tensors(section: str, rows: Iterable[Tensor]) -> str:
    """The `input` or `output` list; one tensor a line."""
    rows, lines = list(rows), [f"{section} ["]
    for number, row in enumerate(rows):
        optional = ", optional: true" if row.optional else ""
        body = (
            f"name: {quoted(row.name)}, data_type: TYPE_{row.kind}, dims: [ {', '.join(map(str, row.dims))} ]{optional}"
        )
        comma = "," if number < len(rows) - 1 else ""
        lines.append(f"  {{ {body} }}{comma}" + (f"  # {row.note}" if row.note else ""))
    return "\n".join([*lines, "]"])


def parameter(key: str, value: object, note: str) -> str:
    """One entry of `parameters` under its explanation. Booleans are written as Triton's backends read them: true, false."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{comment(note)}\nparameters {{ key: {quoted(key)} value: {{ string_value: {quoted(text)} }} }}"


def instances(count: int, note: str) -> str:
    """The instance group: so many copies of the model, none bound to a GPU by Triton (the engine takes its own)."""
    return f"{comment(note)}\ninstance_group [ {{ count: {count}, kind: KIND_CPU }} ]"


def decoupled(value: bool, note: str) -> str:
    """Whether a request may have more than one response."""
    return f"{comment(note)}\nmodel_transaction_policy {{ decoupled: {str(value).lower()} }}"


def document(*parts: str) -> str:
    """The whole file: parts with an empty line between them."""
    return "\n\n".join(part for part in parts if part) + "\n"
