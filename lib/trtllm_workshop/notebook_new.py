"""A new notebook with the cells that every lesson has, so that an author starts from something that runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_CELLS: list[tuple[str, str, str]] = [
    (
        "markdown",
        "",
        "# {title}\n\nAt the end you have ... \n\n*Teaching … minutes, exercises … minutes. Needs: no GPU.*",
    ),
    ("code", "bootstrap", ""),
    ("code", "parameters", 'toolchain = "auto"\nmodel = ""\nwork_dir = "../work"\nprofile = "full"'),
    (
        "code",
        "validate",
        "from trtllm_workshop import course\n\nlesson = course.begin(\n"
        '    "{number}", toolchain=toolchain, model=model, work_dir=work_dir, profile=profile\n)',
    ),
    ("markdown", "", "## The question\n\nOne idea: what is it, and what do you expect to see?"),
    ("code", "", 'lesson.predict("layers", 2, "layers")'),
    ("code", "", 'lesson.measure("layers", 1 + 1, "layers")'),
    ("markdown", "", "## Exercise\n\nWhat is asked?"),
    ("code", "exercise", 'answer = None\nlesson.exercise("{number}-1", answer, check=2, minutes=2)'),
    ("markdown", "hint", "<details><summary>**Hint**</summary>\n\nWhere to look.\n\n</details>"),
    ("code", "solution", 'lesson.exercise("{number}-1", 2, check=2, minutes=2, solution=True)'),
    ("markdown", "", "## Checkpoint"),
    (
        "code",
        "checkpoint",
        'lesson.check("there are layers", True, "Run the cells above once more.")\nlesson.checkpoint()',
    ),
    ("markdown", "", "## When it goes wrong\n\n| message | cause | what to do |\n|---|---|---|\n| ... | ... | ... |"),
    ("markdown", "", "## Clean up and next"),
    ("code", "", "lesson.toolchain.close()"),
]


def write_new(path: Path, title: str) -> Path:
    """Writes ``notebooks/NN_name.ipynb``. Raises ValueError for another kind of name or when the file is there."""
    from trtllm_workshop.notebook_format import METADATA, canonical_text, fixed

    match = re.fullmatch(r"(\d\d)_[a-z0-9_]+", path.stem)
    if path.suffix != ".ipynb" or match is None:
        raise ValueError(f"{path.name} is not a notebook's name; use two digits and a name, such as 05_quantize.ipynb")
    if path.exists():
        raise ValueError(f"{path} is already there")
    cells: list[dict[str, Any]] = []
    for kind, tag, source in _CELLS:
        text = source.replace("{title}", title).replace("{number}", match.group(1))
        cells.append({"cell_type": kind, "source": text, "metadata": {"tags": [tag]} if tag else {}})
    notebook = fixed({"cells": [c for c in cells], "metadata": METADATA, "nbformat": 4}, path.stem, repo="")
    path.write_text(canonical_text(notebook), encoding="utf-8")
    return path
