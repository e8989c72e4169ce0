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
        ragged: requests with other sizes may be put into one batch.
        flat: the model gets it without this dimension of 1, as the C++ backend wants it.
    """

    name: str
    kind: str
    dims: Sequence[int] = (1,)
    optional: bool = False
    note: str = ""
    ragged: bool = False
    flat: bool = False


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
        more = (", optional: true" if row.optional else "") + (", allow_ragged_batch: true" if row.ragged else "")
        more += ", reshape: { shape: [ ] }" if row.flat else ""
        body = f"name: {quoted(row.name)}, data_type: TYPE_{row.kind}, dims: [ {', '.join(map(str, row.dims))} ]{more}"
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


def batching(size: int, delay_us: int, waiting: int) -> str:
    """Triton's own queue before a model: `size` requests together, microseconds to wait for them, requests that may wait."""
    delay = (
        f"Microseconds that a request may wait for up to {size} together. 0: none waits. The engine takes new requests into the "
        "running batch, so a delay here is added to the time to the first token and gains nothing."
    )
    full = "Requests that may wait; more are refused at once instead of waiting for minutes. 0: no limit."
    inner = [
        f"preferred_batch_size: [ {size} ]",
        comment(delay),
        f"max_queue_delay_microseconds: {delay_us}",
        comment(full),
        f"default_queue_policy: {{ max_queue_size: {waiting} }}",
    ]
    return "\n".join(["dynamic_batching {", textwrap.indent("\n".join(inner), "  "), "}"])


def ensemble(steps: Iterable[tuple[str, dict[str, str], dict[str, str]]]) -> str:
    """The steps of an ensemble: (model, {its input: name in the ensemble}, {its output: name in the ensemble})."""
    lines = []
    for model, inputs, outputs in steps:
        rows = [f"    model_name: {quoted(model)}", "    model_version: -1  # the newest"]
        for kind, names in (("input_map", inputs), ("output_map", outputs)):
            rows += [f"    {kind} {{ key: {quoted(key)} value: {quoted(value)} }}" for key, value in names.items()]
        lines.append("\n".join(["  step {", *rows, "  }"]))
    return "\n".join(["ensemble_scheduling {", *lines, "}"])


def document(*parts: str) -> str:
    """The whole file: parts with an empty line between them."""
    return "\n\n".join(part for part in parts if part) + "\n"
