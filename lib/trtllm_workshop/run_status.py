"""What became of one notebook: the proof that it ran to its end, and the words for it when it did not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from trtllm_workshop.parameters import tags
from trtllm_workshop.showing import Table

PASSED, FAILED, TIMED_OUT, KERNEL_DIED, NOT_RUN = "passed", "failed", "timed out", "kernel died", "not run"
MARKERS = {PASSED: "✓", FAILED: "✗", TIMED_OUT: "⧗", KERNEL_DIED: "☠", NOT_RUN: "·"}  # never colour alone
ADVICE = {
    TIMED_OUT: "Give it more time with --timeout SECONDS, or less work with --profile smoke.",
    KERNEL_DIED: "The kernel's process ended without an answer: most often the machine ran out of memory, otherwise "
    "native code crashed or something killed it. Close other programs, use --profile smoke or a smaller model; "
    "heavy work belongs in a child process (sh or %%toolchain), which can die without the kernel.",
    NOT_RUN: "An earlier notebook did not pass. Fix it and continue with --resume, or add --keep-going.",
}
_PAPERMILL_MARK = "papermill-error-cell-tag"


@dataclass
class Entry:
    """One notebook in ``work/results/run.json``; in ``error``, ``cell`` counts code cells, ``index`` all from 0."""

    number: str
    name: str
    notebook: str
    status: str = NOT_RUN
    seconds: float = 0.0
    peak_memory_mb: float = 0.0
    cells_run: int = 0
    cells: int = 0
    sha256: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    started: str = ""
    executed: str = ""
    log: str = ""
    resumed: bool = False
    left_behind: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def code_cells(notebook: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """Index and cell of every code cell that has something to run."""
    cells = enumerate(notebook["cells"])
    return [(index, cell) for index, cell in cells if cell["cell_type"] == "code" and cell["source"].strip()]


def source_index(executed: Mapping[str, Any], index: int) -> int:
    """The index in the source notebook of a cell of the executed one, which has papermill's own cells in between."""
    before = executed["cells"][:index]
    return index - sum(1 for cell in before if {"injected-parameters", _PAPERMILL_MARK} & set(tags(cell)))


def _problem(
    executed: Mapping[str, Any], index: int, position: int, name: str, message: str, advice: str
) -> dict[str, Any]:
    return {
        "index": source_index(executed, index),
        "cell": position,
        "name": name,
        "message": message,
        "advice": advice,
        "source": executed["cells"][index]["source"],
    }


def find_problem(
    executed: Mapping[str, Any], source: Mapping[str, Any], parameters: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The first reason why an executed notebook does not count as run to its end, or None.

    papermill takes a SystemExit for success and does not look for skipped cells, so the evidence is read from the
    notebook itself: an execution count in every code cell, no error output, and the cell with the parameters.
    """
    cells = code_cells(executed)
    for position, (index, cell) in enumerate(cells, 1):
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                name, message = output["ename"], output["evalue"]
                advice = advise(f"{name}: {message}")
                if name == "SystemExit":
                    message = f"the cell left the notebook by SystemExit({message}); those below it did not run"
                    advice = "Let the cell raise an error that says what is wrong, or use if/else instead of leaving."
                return _problem(executed, index, position, name, message, advice)
        if cell.get("execution_count") is None:
            message = "the cell was not executed, although papermill reported no error"
            advice = "Look for exit() or a tag such as skip-execution in this cell or the one before it."
            return _problem(executed, index, position, "NotExecuted", message, advice)
    injected = [index for index, cell in cells if "injected-parameters" in tags(cell)]
    if parameters and not injected:
        return {
            "name": "NoParameters",
            "message": "the parameters were not injected",
            "advice": "",
            "cell": 0,
            "index": 0,
        }
    missing = len(code_cells(source)) + len(injected) - len(cells)
    if missing:
        message = (
            f"the executed copy has {abs(missing)} code cells {'fewer' if missing > 0 else 'more'} than its source"
        )
        return {"name": "CellsDiffer", "message": message, "advice": "Run it again.", "cell": 0, "index": 0}
    return None


def checkpoint_problem(results: Path, started: str) -> str:
    """Why the record of a lesson does not prove its checkpoint in this run; '' when it does."""
    if not results.is_file():
        return f"{results.name} was not written, so the notebook never reached lesson.checkpoint()"
    try:
        record = json.loads(results.read_text(encoding="utf-8"))
        finished, status = datetime.fromisoformat(record["finished"]), record["status"]
    except (ValueError, KeyError, TypeError) as error:
        return f"{results} cannot be read as a lesson's record: {type(error).__name__}: {error}"
    if finished < datetime.fromisoformat(started):
        return f"{results.name} is from an earlier run ({record['finished']}); this one reached no checkpoint"
    if status != "ok":
        return f"{results.name} says {status!r}: " + "; ".join(c["name"] for c in record["checks"] if not c["ok"])
    return ""


def advise(text: str) -> str:
    """What to do about an error text, from the table of known errors; '' when it is not known."""
    from trtllm_workshop.advice import advise as known

    return "\n".join(f"{item.cause} {item.fix}" for item in known(text))


def failure_text(entry: Entry) -> str:
    """The failing cell first, then the error, then what to do, then where to look."""
    error = entry.error or {}
    where = (
        f"code cell {error['cell']} of {entry.cells} (cell {error['index']} of the file)" if error.get("cell") else ""
    )
    lines = [f"{MARKERS[entry.status]} {entry.status.upper()}  {entry.name}" + (f", {where}" if where else "")]
    source = str(error.get("source", "")).splitlines()
    lines += [f"    | {line}" for line in source[:6]] + (["    | ..."] if len(source) > 6 else [])
    name, message = error.get("name", ""), str(error.get("message", ""))
    if message or name:
        lines += [f"  {line}" for line in f"{name}: {message}".splitlines()[:25]]
    if error.get("advice"):
        first, *rest = error["advice"].splitlines()
        lines += [f"  What to do: {first}", *(f"    {line}" for line in rest)]
    lines += [
        f"  {label}: {path}" for label, path in (("Partial notebook", entry.executed), ("Log", entry.log)) if path
    ]
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """``1:05`` for 65 seconds, ``4.2 s`` below a minute."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min" if seconds >= 60 else f"{seconds:.1f} s"


def summary_table(entries: list[Entry]) -> str:
    """One row a notebook, as plain text."""
    rows = [
        {
            "notebook": entry.name,
            "status": f"{MARKERS[entry.status]} {entry.status}" + (" (earlier)" if entry.resumed else ""),
            "code cells": f"{entry.cells_run}/{entry.cells}",
            "time": duration(entry.seconds) if entry.seconds else "",
            "peak memory": f"{entry.peak_memory_mb:,.0f} MB" if entry.peak_memory_mb else "",
        }
        for entry in entries
    ]
    return str(Table(rows))
