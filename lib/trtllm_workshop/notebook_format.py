"""The one form in which notebooks are stored: ``python -m trtllm_workshop.notebook_format --check|--fix notebooks``.

``--check`` reports every deviation, from stored outputs to a missing hint; ``--fix`` repairs what needs no judgement
(outputs, ids, metadata, the bootstrap cell, the JSON itself); ``--new`` writes a notebook with all the cells that every
lesson has. The rules about content are in notebook_rules.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trtllm_workshop.notebook_rules import Finding, check_rules, tags

METADATA: dict[str, Any] = {
    "accelerator": "GPU",
    "colab": {"gpuType": "A100", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
HIDDEN = ("bootstrap", "solution")  # their source is folded, in JupyterLab and in Colab
TAGS = ("bootstrap", "parameters", "validate", "exercise", "hint", "solution", "checkpoint", "raises-exception")
_REPOSITORY = re.compile(r'^REPOSITORY = "([^"]*)"', re.MULTILINE)


class NotANotebook(ValueError):
    """The file is not JSON, or not of notebook format 4."""


def bootstrap_source(repo: str | None = None) -> str:
    """The text of the first code cell of every notebook, with ``repo`` (a Git address or OWNER/NAME) filled in.

    Raises ValueError for an address that cannot stand in a Python string or that carries a password or token.
    """
    source = Path(__file__).with_name("data").joinpath("bootstrap_cell.py").read_text(encoding="utf-8").rstrip("\n")
    repo = repo or ""
    if re.search(r"[\"'\\\s{}]", repo):
        raise ValueError(f"the repository is {repo!r}; it may not contain quotes, blanks, braces or backslashes")
    if re.search(r"://[^/]*@", repo):
        raise ValueError(
            "the repository's address contains a user name or token before '@'; it would be public, leave it out"
        )
    if re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        repo = f"https://github.com/{repo}.git"
    return _REPOSITORY.sub(f'REPOSITORY = "{repo}"', source, count=1)


def stamped_repository(notebook: dict[str, Any]) -> str:
    """The repository that the bootstrap cell names; empty when it has not been stamped."""
    for cell in notebook["cells"]:
        if "bootstrap" in tags(cell):
            match = _REPOSITORY.search(cell["source"])
            return match.group(1) if match else ""
    return ""


def read(path: Path) -> tuple[dict[str, Any], str]:
    """A notebook with every source as one text, and the file's text. Raises NotANotebook."""
    text = path.read_text(encoding="utf-8")
    try:
        notebook: dict[str, Any] = json.loads(text)
        if notebook["nbformat"] != 4:
            raise NotANotebook(f"{path} is of notebook format {notebook['nbformat']}; save it as format 4")
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, NotANotebook):
            raise
        raise NotANotebook(f"{path} is not a notebook: {type(error).__name__}: {error}") from error
    return notebook, text


def canonical_text(notebook: dict[str, Any]) -> str:
    """The notebook as Jupyter itself writes it: keys sorted, one blank of indentation, a line end at the end."""
    cells = [{**cell, "source": cell["source"].splitlines(keepends=True)} for cell in notebook["cells"]]
    return json.dumps({**notebook, "cells": cells}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def fixed(notebook: dict[str, Any], stem: str, repo: str | None = None) -> dict[str, Any]:
    """A copy in canonical form. ``stem`` is the file's name, from which missing cell ids are made (stable ones)."""
    repo = stamped_repository(notebook) if repo is None else repo
    used = {str(cell["id"]) for cell in notebook["cells"] if cell.get("id")}
    seen: set[str] = set()
    cells: list[dict[str, Any]] = []
    for cell in notebook["cells"]:
        empty = cell["cell_type"] == "code" and not cell["source"].strip() and "bootstrap" not in tags(cell)
        if empty or "injected-parameters" in tags(cell):
            continue
        source = "\n".join(line.rstrip() for line in cell["source"].rstrip().split("\n"))
        if cell["cell_type"] == "markdown":
            source = cell["source"].rstrip()  # two blanks at the end of a line mean a line break there
        if "bootstrap" in tags(cell):
            source = bootstrap_source(repo)
        name = str(cell.get("id") or "")
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) or name in seen:
            name = _new_id(stem, source, used | seen)
        seen.add(name)
        clean = {"cell_type": cell["cell_type"], "id": name, "metadata": _cell_metadata(cell), "source": source}
        if cell["cell_type"] == "code":
            clean.update(execution_count=None, outputs=[])
        elif cell.get("attachments"):
            clean["attachments"] = cell["attachments"]
        cells.append(clean)
    _tag_validation(cells)
    return {"cells": cells, "metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}


def _new_id(stem: str, source: str, used: set[str]) -> str:
    count = 0
    while True:
        digest = hashlib.sha256(f"{stem}\n{count}\n{source}".encode()).hexdigest()[:8]
        name = f"{stem[:2]}-{digest}"
        if name not in used:
            return name
        count += 1


def _cell_metadata(cell: dict[str, Any]) -> dict[str, Any]:
    kept = [tag for tag in TAGS if tag in tags(cell)] + sorted(tag for tag in tags(cell) if tag not in TAGS)
    hint = cell["cell_type"] == "markdown" and "<details" in cell["source"] and "**Hint" in cell["source"]
    if hint and "hint" not in kept:
        kept.append("hint")
    metadata: dict[str, Any] = {"tags": kept} if kept else {}
    if set(HIDDEN) & set(kept):
        metadata.update(cellView="form", jupyter={"source_hidden": True})
    return metadata


def _tag_validation(cells: list[dict[str, Any]]) -> None:
    """The code cell after the parameters is the one that validates them; authors need not tag it."""
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell, following in itertools.pairwise(code):
        if "parameters" in tags(cell) and "course.begin(" in following["source"] and not tags(following):
            following["metadata"]["tags"] = ["validate"]


def check_format(notebook: dict[str, Any], text: str, label: str) -> list[Finding]:
    """What ``--fix`` would change, named one by one so that a reader of the report understands it."""
    found: list[Finding] = []
    ids: set[str] = set()
    for index, cell in enumerate(notebook["cells"]):
        kept = f"{label}, cell {index}"
        if cell["cell_type"] == "code" and (cell.get("outputs") or cell.get("execution_count") is not None):
            found.append(Finding(kept, "stored output or execution count; the repository keeps sources only", True))
        if not cell.get("id"):
            found.append(Finding(kept, "no cell id", True))
        elif cell["id"] in ids:
            found.append(Finding(kept, f"the cell id {cell['id']!r} occurs twice", True))
        ids.add(cell.get("id", ""))
        if cell.get("metadata", {}) != _cell_metadata(cell):
            found.append(Finding(kept, f"cell metadata is {cell.get('metadata')}, not {_cell_metadata(cell)}", True))
        if cell["cell_type"] == "code" and not cell["source"].strip():
            found.append(Finding(kept, "an empty code cell", True))
        if "injected-parameters" in tags(cell):
            found.append(Finding(kept, "a saved 'injected-parameters' cell of an earlier run", True))
        if "bootstrap" in tags(cell) and cell["source"] != bootstrap_source(stamped_repository(notebook)):
            found.append(
                Finding(kept, "the bootstrap cell differs from lib/trtllm_workshop/data/bootstrap_cell.py", True)
            )
    metadata = notebook.get("metadata", {})
    if "widgets" in metadata:
        found.append(
            Finding(label, "stored widget state (metadata.widgets); without its state key viewers refuse it", True)
        )
    elif metadata != METADATA:
        found.append(Finding(label, f"the notebook's metadata must be {json.dumps(METADATA)}", True))
    if not found and text != canonical_text(fixed(notebook, Path(label).stem)):
        found.append(
            Finding(label, "the file is not in canonical form (order, indentation, blanks, missing tag)", True)
        )
    return found


def check_folder(paths: Sequence[Path]) -> list[Finding]:
    """Every finding in the given notebooks: form, rules, and one repository named by all of them."""
    found: list[Finding] = []
    repositories: dict[str, str] = {}
    for path in paths:
        try:
            notebook, text = read(path)
        except (NotANotebook, UnicodeDecodeError) as error:
            found.append(Finding(str(path), str(error)))
            continue
        found += check_format(notebook, text, str(path)) + check_rules(notebook, path)
        repositories[str(path)] = stamped_repository(notebook)
    if len(set(repositories.values())) > 1:
        named = ", ".join(f"{path}: {repo!r}" for path, repo in repositories.items())
        found.append(
            Finding("all notebooks", f"the bootstrap cells name different repositories ({named}); stamp them again")
        )
    return found


def fix_file(path: Path, repo: str | None = None) -> bool:
    """Writes the notebook in canonical form when it is not; True when it changed. The old file stays until the end."""
    notebook, text = read(path)
    new = canonical_text(fixed(notebook, path.stem, repo))
    if new == text:
        return False
    temporary = path.with_suffix(".ipynb.new")
    temporary.write_text(new, encoding="utf-8")
    temporary.replace(path)
    return True


def find(places: Sequence[Path]) -> list[Path]:
    """The notebooks among files and folders, without checkpoints of the editor. Raises FileNotFoundError."""
    found: list[Path] = []
    for place in places:
        if not place.exists():
            raise FileNotFoundError(f"there is no {place}")
        inside = sorted(place.rglob("*.ipynb")) if place.is_dir() else [place]
        found += [path for path in inside if ".ipynb_checkpoints" not in path.parts]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 when something is left to do."""
    parser = argparse.ArgumentParser(
        prog="python -m trtllm_workshop.notebook_format", description=__doc__.split("\n")[0]
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="report deviations; exit code 1 when there are any")
    action.add_argument("--fix", action="store_true", help="repair what needs no judgement, then report the rest")
    action.add_argument("--new", metavar="TITLE", help="write a new notebook with this title at the given path")
    parser.add_argument("places", nargs="+", type=Path, help="notebooks, or folders with notebooks")
    given = parser.parse_args(arguments)
    try:
        if given.new:
            from trtllm_workshop.notebook_new import write_new

            print(f"wrote {write_new(given.places[0], given.new)}")
            return 0
        paths = find(given.places)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in paths if given.fix else []:
        try:
            if fix_file(path):
                print(f"fixed {path}")
        except NotANotebook as error:
            print(error, file=sys.stderr)
    findings = check_folder(paths)
    for finding in findings:
        print(finding)
    fixable = sum(finding.fixable for finding in findings)
    print(
        f"{len(paths)} notebooks, {len(findings)} findings" + (f", {fixable} of them fixable: --fix" if fixable else "")
    )
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
