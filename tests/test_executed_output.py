"""What a cell prints piece by piece is one text in the executed copy, as it was on the screen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from trtllm_workshop import course, run_status
from trtllm_workshop import notebook_format as form
from trtllm_workshop.notebook_new import write_new
from trtllm_workshop.workspace import Workspace

PIECES = """
import time

for piece in ("one", "two", "three"):
    print(piece, end="|", flush=True)
    time.sleep(0.3)
"""


@pytest.mark.slow
def test_a_line_that_came_in_pieces_stays_one_line(tmp_path: Path) -> None:
    path = write_new(tmp_path / "05_lesson.ipynb", "A lesson")
    notebook, _ = form.read(path)
    notebook["cells"].insert(4, {"cell_type": "code", "metadata": {}, "source": PIECES, "outputs": []})
    path.write_text(form.canonical_text(form.fixed(notebook, path.stem)), encoding="utf-8")
    options = course.Options(profile="smoke", toolchain="reference", model="any/model", timeout=300)
    code, (entry,) = course.run([course.load(path)], options, Workspace(tmp_path / "work"))
    assert code == 0, run_status.failure_text(entry)
    executed = json.loads((tmp_path / "work" / "executed" / path.name).read_text(encoding="utf-8"))
    (outputs,) = [cell["outputs"] for cell in executed["cells"] if '("one"' in "".join(cell["source"])]
    assert [("".join(output["text"])) for output in outputs] == ["one|two|three|"]
