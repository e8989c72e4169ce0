"""Checks every TensorRT-LLM command line and Python call of a notebook or a Markdown file against the recorded facts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trtllm_workshop.command_check import check_command
from trtllm_workshop.command_extract import FoundCommand, commands_in_code, commands_in_markdown
from trtllm_workshop.command_ranks import WorldSizes
from trtllm_workshop.python_check import check_python
from trtllm_workshop.rank_check import check_rank_code

# A cell with this tag shows a mistake on purpose, and is left out.
WRONG_ON_PURPOSE = "wrong-on-purpose"
# Cell magics whose body is Python; other bodies (%%html, %%writefile notes.txt) are not read.
_PYTHON_MAGIC = re.compile(r"%%(toolchain|time|timeit|capture|python3?|prun)\b|%%writefile\s+\S+\.py\b")
_SHELL_MAGIC = re.compile(r"%%(bash|sh|script)\b")


def _source(cell: dict[str, Any]) -> str:
    source = cell.get("source", "")
    return source if isinstance(source, str) else "".join(source)


def _problems_of(found: Iterable[FoundCommand], sizes: WorldSizes) -> Iterator[str]:
    for command in found:
        for problem in check_command(command.text, command.partial, sizes):
            yield f"line {command.line}: {problem} in: {command.text.strip().splitlines()[0]}"


def check_notebook_commands(path: str | Path) -> list[str]:
    """Problems in a notebook's commands and calls, each with the number of its cell (from 0) and line (from 1).

    The ``%%toolchain`` cells share one process, so their calls are read together. Cells tagged ``wrong-on-purpose`` are
    left out. A code cell that is not valid Python is a problem too.
    """
    notebook = json.loads(Path(path).read_text(encoding="utf-8"))
    found: list[str] = []
    shared: list[str] = []
    sizes = WorldSizes()  # a later cell runs the engine that an earlier one built
    for number, cell in enumerate(notebook["cells"]):
        source = _source(cell)
        if WRONG_ON_PURPOSE in cell.get("metadata", {}).get("tags", []):
            continue
        if cell["cell_type"] == "markdown":
            found.extend(f"cell {number}, {text}" for text in _problems_of(commands_in_markdown(source), sizes))
        elif cell["cell_type"] == "code":
            found.extend(f"cell {number}, {text}" for text in _check_code(source, shared, sizes))
    found.extend(f"toolchain cells, {problem}" for problem in check_python("\n".join(shared)))
    return found


def _check_code(source: str, shared: list[str], sizes: WorldSizes) -> Iterator[str]:
    first = source.lstrip().split("\n", 1)[0]
    python = not first.startswith("%%") or _PYTHON_MAGIC.match(first) is not None
    if not python and not _SHELL_MAGIC.match(first):
        return
    try:
        yield from _problems_of(commands_in_code(source), sizes)
        if first.startswith("%%toolchain"):
            check_python(source)  # raises SyntaxError here, where the cell is known
            shared.append("\n".join(line for line in source.split("\n") if not line.startswith("%%")))
        elif python:
            yield from map(str, (*check_python(source), *check_rank_code(source)))
    except SyntaxError as reason:
        yield f"line {reason.lineno}: not valid Python: {reason.msg}"


def check_markdown_commands(path: str | Path) -> list[str]:
    """Problems in the commands of a Markdown file, each with its line."""
    return list(_problems_of(commands_in_markdown(Path(path).read_text(encoding="utf-8")), WorldSizes()))
