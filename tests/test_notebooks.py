"""Every notebook of the course: in canonical form, listed in the syllabus, and executed to its last cell on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_models import tiny_model
from trtllm_workshop import course, run_status
from trtllm_workshop.notebook_format import check_folder, find
from trtllm_workshop.workspace import Workspace

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


def test_every_notebook_is_canonical_and_keeps_the_rules() -> None:
    findings = check_folder(find([FOLDER]))
    assert not findings, "run `make fix`, then mend the rest:\n" + "\n".join(map(str, findings))


def test_the_syllabus_lists_every_notebook_in_order() -> None:
    lessons = yaml.safe_load((FOLDER / "syllabus.yml").read_text(encoding="utf-8"))["lessons"]
    assert [lesson["notebook"] for lesson in lessons] == NOTEBOOKS
    numbers = [lesson["notebook"][:2] for lesson in lessons]
    for number, lesson in zip(numbers, lessons, strict=True):
        assert set(lesson["minutes"]) == {"teach", "practise"} and all(5 <= m <= 60 for m in lesson["minutes"].values())
        assert all(before in numbers and before < number for before in lesson["after"]), lesson


@pytest.fixture(scope="session")
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, course.Entry]:
    """One run of all notebooks in order, as `workshop run` does it; the entry of each by its file's name."""
    folder = tmp_path_factory.mktemp("course")
    model = tiny_model(folder / "tiny-llama", "llama-gqa")
    options = course.Options(profile="smoke", toolchain="reference", model=str(model), timeout=900, keep_going=True)
    _, entries = course.run(course.select(FOLDER), options, Workspace(folder / "work"))
    return {Path(entry.notebook).name: entry for entry in entries}


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_to_its_last_cell_and_its_checkpoint_holds(
    name: str, executed: dict[str, course.Entry]
) -> None:
    entry = executed[name]
    assert entry.status == run_status.PASSED, run_status.failure_text(entry)
    assert entry.cells_run == entry.cells and not entry.left_behind, entry
