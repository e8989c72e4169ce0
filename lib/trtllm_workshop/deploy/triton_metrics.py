"""Triton's /metrics page, read so that a figure that nobody measured is never shown as one.

The nv_trt_llm_… families exist only with TensorRT-LLM's C++ backend and stand at zero in some releases; the time to the first token
is in none of them and comes from the client's clock alone (`load_client`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

NOT_REPORTED = "not reported"
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class Sample:
    """One line of the page."""

    family: str
    labels: dict[str, str]
    value: float


def read_metrics(text: str) -> list[Sample]:
    """The samples of a page in Prometheus' text format; lines that are none are left out."""
    found = []
    for line in text.splitlines():
        parts = _LINE.match(line.strip())
        if parts is None or line.startswith("#"):
            continue
        try:
            value = float(parts.group(3))
        except ValueError:
            continue
        found.append(Sample(parts.group(1), dict(_LABEL.findall(parts.group(2) or "")), value))
    return found


def reported(samples: Iterable[Sample], family: str, **labels: str) -> float | None:
    """The sum of a family's samples with these labels; None when there is none, or all are zero, infinite or no number.

    A gauge that stands at zero while the server works says nothing, and as a time it would be wrong.
    """
    values = [s.value for s in samples if s.family == family and labels.items() <= s.labels.items()]
    values = [value for value in values if math.isfinite(value) and value != 0]
    return sum(values) if values else None


def shown(value: float | None, unit: str = "", scale: float = 1.0) -> str:
    """A figure for a table: `value` x `scale` with its unit, or `not reported`."""
    if value is None or not math.isfinite(value) or value == 0:
        return NOT_REPORTED
    return f"{value * scale:.4g} {unit}".rstrip()


def latency_table(before: str, after: str, model: str) -> list[dict[str, str]]:
    """Averages of the requests between two pages of /metrics, as rows with `quantity` and `value`; times are milliseconds.

    The server's times come from Triton's counters (microseconds). TTFT has no row: only the client can measure it.
    """
    first, last = read_metrics(before), read_metrics(after)

    def grown(family: str) -> float | None:
        end = reported(last, family, model=model)
        return None if end is None else end - (reported(first, family, model=model) or 0.0)

    count = grown("nv_inference_request_success")
    rows = [{"quantity": "requests", "value": shown(count)}]
    for name, family in (
        ("whole request", "request"),
        ("waiting in Triton", "queue"),
        ("in the model", "compute_infer"),
    ):
        total = grown(f"nv_inference_{family}_duration_us")
        rows.append({"quantity": name, "value": shown(total / count if total and count else None, "ms", 1e-3)})
    for name, kind in (("KV-cache blocks in use", "used"), ("KV-cache blocks free", "free")):
        value = reported(last, "nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind)
        rows.append({"quantity": name, "value": shown(value)})
    return rows
