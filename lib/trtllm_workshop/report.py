"""``work/report.html``: one page without outside requests that says what ran, on what, and how predictions fared."""

from __future__ import annotations

import base64
import json
import math
import platform
import re
from pathlib import Path
from typing import Any

from trtllm_workshop import run_status
from trtllm_workshop.course import load, read_state
from trtllm_workshop.record import write_text
from trtllm_workshop.run_status import PASSED, Entry
from trtllm_workshop.showing import number
from trtllm_workshop.workspace import Workspace

TEMPLATE = Path(__file__).parent / "data" / "report.html.j2"
SPAN = 2.0  # the scale of a mark reaches from a quarter to four times the prediction (powers of two)


def write(workspace: Workspace) -> Path:
    """Writes the page from ``results/run.json`` and the lessons' records; returns its path. Any part may be missing."""
    from jinja2 import Environment

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(
        number=number, duration=run_status.duration, day=lambda text: text[:16].replace("T", " ")
    )
    page = environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(**content(workspace))
    write_text(workspace.report, page)
    return workspace.report


def content(workspace: Workspace) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    state = read_state(workspace)
    records = {path.stem: _read(path) for path in sorted(workspace.results.glob("[0-9][0-9].json"))}
    lessons = []
    for key in sorted({*state, *records}):
        entry = state.get(key) or Entry(key, f"lesson {key}", "", status=run_status.NOT_RUN)
        record = records.get(key, {})
        # A record of an earlier run must not stand under a notebook that failed now as if it were its result.
        fresh = bool(record) and (not entry.started or record.get("finished", "") >= entry.started)
        lessons.append(_lesson(entry, record if fresh else {}, key in state, workspace))
    used = [lesson["record"] for lesson in lessons if lesson["record"]]
    entries = list(state.values())
    return {
        "lessons": lessons,
        "passed": sum(entry.status == PASSED for entry in entries),
        "total": len(entries),
        "seconds": sum(entry.seconds for entry in entries),
        "peak": max((entry.peak_memory_mb for entry in entries), default=0.0),
        "date": max((record["finished"] for record in used), default=""),
        "facts": _facts(used),
        "markers": run_status.MARKERS,
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) and "finished" in record else {}
    except ValueError:
        return {}


def _facts(records: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Heading and distinct values; several values, each with its lessons, mean that not all ran under the same conditions."""

    def distinct(values: list[str]) -> list[str]:
        lessons: dict[str, list[str]] = {}
        for value, record in zip(values, records, strict=True):
            # A model without its source is the same model as one with it.
            full = next((other for other in values if other.startswith(f"{value}:")), value)
            if value:
                lessons.setdefault(full, []).append(str(record.get("lesson", "")))
        if len(lessons) < 2:
            return list(lessons)
        return [f"{v} ({'lesson' if len(n) == 1 else 'lessons'} {', '.join(n)})" for v, n in lessons.items()]

    def joined(record: dict[str, Any], key: str, *parts: str) -> str:
        found = record.get(key) or {}
        return ": ".join(text for part in parts if (text := str(found.get(part, ""))))

    packages = [", ".join(f"{name} {version}" for name, version in r.get("packages", {}).items()) for r in records]
    facts = [
        ("Machine", distinct([joined(r, "machine", "summary") for r in records]) or [platform.platform()]),
        ("Toolchain", distinct([_toolchain(r) for r in records])),
        ("Model", distinct([joined(r, "model", "name", "source") for r in records])),
        ("Profile", distinct([r.get("profile", "") for r in records])),
        ("Python", distinct([r.get("python", "") for r in records])),
        ("Packages", distinct(packages)),
    ]
    return [(name, values) for name, values in facts if values]


def _toolchain(record: dict[str, Any]) -> str:
    found = record.get("toolchain") or {}
    name = f"{found.get('name', '')} {found.get('version', '')}".strip()
    return f"{name} ({found['reason']})" if found.get("reason") else name


def _lesson(entry: Entry, record: dict[str, Any], ran: bool, workspace: Workspace) -> dict[str, Any]:
    output = Path(entry.executed) if entry.executed else None
    link = ""
    if output and output.is_file() and output.is_relative_to(workspace.root):
        link = output.relative_to(workspace.root).as_posix()
    return {
        "entry": entry,
        "ran": ran,
        "title": _title(Path(entry.notebook), entry.number) or entry.name,
        "link": link,
        "record": record,
        "quantities": [_quantity(item) for item in sorted(record.get("quantities", []), key=_unpredicted)],
        "figures": [figure for item in record.get("figures", []) if (figure := _figure(item, workspace))],
        "failure": run_status.failure_text(entry) if entry.error and entry.error.get("name") else "",
    }


def _unpredicted(item: dict[str, Any]) -> bool:
    return item.get("predicted") is None


def _title(notebook: Path, number: str) -> str:
    """The H1 of a notebook without its number, or ''."""
    if not notebook.is_file():
        return ""
    for cell in load(notebook).content["cells"]:
        for line in cell["source"].splitlines() if cell["cell_type"] == "markdown" else ():
            if line.startswith("# "):
                return re.sub(rf"^{number}\W+", "", line[2:].strip())
    return ""


def _quantity(item: dict[str, Any]) -> dict[str, Any]:
    """A number with its mark: ``x`` from 0 to 1 on a scale of powers of two, ``beyond`` when it is off the scale."""
    ratio, spread = item.get("ratio"), item.get("samples") or {}
    mark = None
    if ratio and ratio > 0:
        power = math.log2(ratio)
        x = (max(-SPAN, min(SPAN, power)) + SPAN) / (2 * SPAN)
        mark = {"x": round(x, 4), "beyond": abs(power) > SPAN, "text": f"{ratio:.3g} times the prediction"}
    unit = item["unit"]
    note = ""
    if spread.get("count", 0) > 1:
        note = f"median of {spread['count']}, from {number(spread['min'])} to {number(spread['max'], unit)}"
    return {**item, "mark": mark, "note": note, "ratio_text": f"{ratio:.3g}" if ratio is not None else ""}


def _figure(item: dict[str, str], workspace: Workspace) -> dict[str, str] | None:
    path = workspace.results / item["file"]
    if not path.is_file():
        return None
    mime = "image/png" if path.suffix == ".png" else "image/svg+xml"
    return {**item, "uri": f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"}
