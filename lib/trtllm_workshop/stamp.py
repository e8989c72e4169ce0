"""``workshop stamp --repo``: tells every notebook's bootstrap cell where a fresh machine gets the course from."""

from __future__ import annotations

import re
from pathlib import Path

from trtllm_workshop.course import CourseProblem, select
from trtllm_workshop.parameters import tags
from trtllm_workshop.record import write_text

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+|(https://|git@|file://)\S+")


def stamp(folder: Path, repository: str) -> list[Path]:
    """Sets the bootstrap cell of every numbered notebook in ``folder`` and returns those that changed.

    ``repository`` is OWNER/NAME on GitHub or the address of any git repository. Raises CourseProblem for another text and
    for a notebook without exactly one cell tagged ``bootstrap``; no file is written then.
    """
    from trtllm_workshop.notebook_format import canonical_text, fixed

    if not _REPOSITORY.fullmatch(repository):
        raise CourseProblem(f"{repository!r} is not a repository: give OWNER/NAME, or an address such as https://...")
    texts = {}
    for notebook in select(folder):
        count = sum("bootstrap" in tags(cell) for cell in notebook.content["cells"])
        if count != 1:
            raise CourseProblem(f"{notebook.path} has {count} cells tagged 'bootstrap'; it needs exactly one")
        try:
            texts[notebook.path] = canonical_text(fixed(notebook.content, notebook.name, repository))
        except ValueError as error:
            raise CourseProblem(str(error)) from error
    changed = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        write_text(path, texts[path])
    return changed
