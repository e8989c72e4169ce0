"""The notebook check: a good notebook passes, and each way of breaking it is found, named and, where possible, mended."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest
from trtllm_workshop import course, run_status
from trtllm_workshop import notebook_format as form
from trtllm_workshop.course import CourseProblem
from trtllm_workshop.notebook_new import write_new
from trtllm_workshop.stamp import stamp
from trtllm_workshop.workspace import Workspace

Break = Callable[[dict[str, Any]], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_new(tmp_path / "05_lesson.ipynb", "A lesson")


def broken(path: Path, change: Break) -> list[form.Finding]:
    """The findings after ``change`` was applied to the stored notebook (written canonically, so only it is found)."""
    notebook, _ = form.read(path)
    change(notebook)
    path.write_text(form.canonical_text(notebook), encoding="utf-8")
    return form.check_folder([path])


def text(findings: list[form.Finding]) -> str:
    return "\n".join(map(str, findings))


def cell(notebook: dict[str, Any], tag: str) -> dict[str, Any]:
    return next(c for c in notebook["cells"] if tag in c["metadata"].get("tags", []))


def code(source: str, *, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    metadata = {"tags": list(tags)} if tags else {}
    base = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": metadata}
    return {**base, "id": f"new-{abs(hash(source))}", "source": source}


def insert(source: str, place: int = 5) -> Break:
    return lambda notebook: notebook["cells"].insert(place, code(source))


def markdown(source: str) -> Break:
    return lambda notebook: notebook["cells"][4].update(source=source)


def test_a_new_notebook_is_canonical_valid_and_written_as_jupyter_writes_it(path: Path) -> None:
    assert form.check_folder([path]) == []
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert nbformat.writes(notebook) + "\n" == path.read_text(encoding="utf-8")


def test_fixing_twice_changes_nothing_and_ids_are_stable(path: Path) -> None:
    notebook, before = form.read(path)
    assert not form.fix_file(path) and path.read_text(encoding="utf-8") == before
    ids = [c.pop("id") for c in notebook["cells"]]
    assert [c["id"] for c in form.fixed(notebook, path.stem)["cells"]] == ids
    notebook["cells"][5]["source"] += "  # changed"
    for c, name in zip(notebook["cells"], ids, strict=True):
        c["id"] = name
    assert [c["id"] for c in form.fixed(notebook, path.stem)["cells"]] == ids


def set_output(notebook: dict[str, Any]) -> None:
    notebook["cells"][5]["outputs"] = [{"name": "stdout", "output_type": "stream", "text": "2\n"}]


def set_count(notebook: dict[str, Any]) -> None:
    notebook["cells"][5]["execution_count"] = 3


def drop_id(notebook: dict[str, Any]) -> None:
    del notebook["cells"][5]["id"]


def double_id(notebook: dict[str, Any]) -> None:
    notebook["cells"][5]["id"] = notebook["cells"][6]["id"]


def add_metadata(notebook: dict[str, Any]) -> None:
    notebook["cells"][5]["metadata"] = {"colab": {"base_uri": "x"}}


def other_kernel(notebook: dict[str, Any]) -> None:
    notebook["metadata"] = {**notebook["metadata"], "kernelspec": {"name": "my-venv"}}


def no_gpu(notebook: dict[str, Any]) -> None:
    notebook["metadata"] = {k: v for k, v in notebook["metadata"].items() if k != "accelerator"}


def edited_bootstrap(notebook: dict[str, Any]) -> None:
    cell(notebook, "bootstrap")["source"] += "\nprint('mine')"


def unfolded_solution(notebook: dict[str, Any]) -> None:
    cell(notebook, "solution")["metadata"] = {"tags": ["solution"]}


def empty_cell(notebook: dict[str, Any]) -> None:
    notebook["cells"].insert(6, code("\n"))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (set_output, "cell 5: stored output"),
        (set_count, "cell 5: stored output or execution count"),
        (drop_id, "cell 5: no cell id"),
        (double_id, "occurs twice"),
        (add_metadata, "cell metadata is {'colab'"),
        (other_kernel, "metadata must be"),
        (no_gpu, "metadata must be"),
        (edited_bootstrap, "bootstrap cell differs"),
        (unfolded_solution, "source_hidden"),
        (empty_cell, "an empty code cell"),
        (lambda notebook: notebook["cells"][5].update(source="a = 1   \n\n"), "not in canonical form"),
        (lambda notebook: cell(notebook, "validate")["metadata"].clear(), "not in canonical form"),
    ],
)
def test_what_the_form_forbids_is_found_and_fixed(path: Path, change: Break, part: str) -> None:
    findings = broken(path, change)
    assert part in text(findings) and any(finding.fixable for finding in findings)
    assert form.main(["--check", str(path)]) == 1
    assert form.main(["--fix", str(path)]) == 0
    assert form.check_folder([path]) == []


def test_other_json_layout_is_found_and_fixed(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), indent=2), encoding="utf-8")
    assert "not in canonical form" in text(form.check_folder([path]))
    assert form.fix_file(path) and form.check_folder([path]) == []


def test_P127_widget_state_is_found_and_removed(path: Path) -> None:
    def widgets(notebook: dict[str, Any]) -> None:
        notebook["metadata"] = {**notebook["metadata"], "widgets": {"application/vnd.jupyter.widget-state+json": {}}}

    assert "stored widget state (metadata.widgets)" in text(broken(path, widgets))
    assert form.fix_file(path) and "widgets" not in form.read(path)[0]["metadata"]


def test_P122_a_saved_injected_cell_is_found_and_removed(path: Path) -> None:
    def inject(notebook: dict[str, Any]) -> None:
        notebook["cells"].insert(3, code('profile = "smoke"', tags=("injected-parameters",)))

    assert "injected-parameters" in text(broken(path, inject))
    assert form.main(["--fix", str(path)]) == 0


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda n: cell(n, "parameters").update(source='import os\nmodel = ""'), "nothing else"),
        (lambda n: cell(n, "parameters").update(source="a = 1\nb = a"), "b is computed"),
        (lambda n: cell(n, "parameters").update(source='model = ""'), "lacks toolchain, work_dir, profile"),
        (lambda n: cell(n, "parameters")["metadata"].update(tags=[]), "0 code cells are tagged 'parameters'"),
        (insert('profile = "smoke"'), "cell 5 assigns the parameter 'profile' again"),
    ],
)
def test_P122_parameters_are_one_cell_of_literals_and_stay(path: Path, change: Break, part: str) -> None:
    assert part in text(broken(path, change))


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from mpi4py import MPI", "imports mpi4py.MPI"),
        ("%%toolchain\nfrom mpi4py import MPI", "imports mpi4py.MPI"),
        ("import torch.distributed as dist", "imports torch.distributed"),
        ("from torch import distributed", "imports torch.distributed"),
        ("import torch\nmodel = torch.nn.DataParallel(None)", "calls torch.nn.DataParallel()"),
        ("from tensorrt_llm import LLM", "runs in %%toolchain cells"),
    ],
)
def test_P129_code_for_several_processes_is_kept_out_of_the_kernel(path: Path, source: str, part: str) -> None:
    assert part in text(broken(path, insert(source)))


def test_P129_a_toolchain_cell_and_a_script_may_use_tensorrt_llm(path: Path) -> None:
    fine = "%%toolchain engine --out n\nfrom tensorrt_llm._tensorrt_engine import LLM\nllm = LLM(model=engine)\nn = 1"
    assert broken(path, insert(fine)) == []


UNGUARDED = "%%writefile run_it.py\nfrom tensorrt_llm import LLM\n{0}"


@pytest.mark.parametrize(
    ("body", "good"),
    [
        ('llm = LLM(model="x")', False),
        ('if __name__ == "__main__":\n    print(1)\nllm = LLM(model="x")', False),
        ('def main():\n    LLM(model="x")\n\nmain()', False),
        ('def main():\n    LLM(model="x")\n\nif __name__ == "__main__":\n    main()', True),
        ('if __name__ == "__main__":\n    llm = LLM(model="x")', True),
        ("print(LLM)", True),
    ],
)
def test_P130_a_script_that_makes_an_llm_has_a_main_guard(path: Path, body: str, good: bool) -> None:
    findings = broken(path, insert(UNGUARDED.format(body)))
    assert (findings == []) is good, text(findings)
    assert good or "workers hang" in text(findings)


@pytest.mark.parametrize("source", ["raise SystemExit", "import sys\nsys.exit(0)", "exit()"])
def test_ending_a_run_early_is_found(path: Path, source: str) -> None:
    assert "as if it had succeeded" in text(broken(path, insert(source)))


def swap(first: int, second: int) -> Break:
    def change(notebook: dict[str, Any]) -> None:
        cells = notebook["cells"]
        cells[first], cells[second] = cells[second], cells[first]

    return change


def drop(tag: str) -> Break:
    return lambda notebook: notebook["cells"].remove(cell(notebook, tag))


def move_to_end(tag: str) -> Break:
    def change(notebook: dict[str, Any]) -> None:
        found = cell(notebook, tag)
        notebook["cells"].remove(found)
        notebook["cells"].append(found)

    return change


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda n: n["cells"].pop(0), "the first cell must be Markdown"),
        (markdown("# Another title"), "top-level heading"),
        (swap(1, 2), "tagged 'bootstrap', but the first code cell"),
        (swap(3, 5), "tagged 'validate', but the third code cell"),
        (drop("hint"), "must be a collapsed hint"),
        (drop("solution"), "after its hint"),
        (drop("exercise"), "a solution without an exercise"),
        (drop("checkpoint"), "0 code cells are tagged 'checkpoint'"),
        (lambda n: cell(n, "checkpoint").update(source="print('done')"), "does not call lesson.checkpoint()"),
        (move_to_end("checkpoint"), "behind the checkpoint there is no section 'When it goes wrong"),
        (move_to_end("solution"), "behind the checkpoint"),
        (lambda n: n["cells"][5]["metadata"].update(tags=["skip-execution"]), "every cell of a lesson runs"),
        (insert("for x in:"), "not valid Python"),
    ],
)
def test_the_order_of_a_lesson_is_kept(path: Path, change: Break, part: str) -> None:
    assert part in text(broken(path, change))


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("![](https://example.org/a.png)", "no alternative text"),
        ("<img src='data:image/png;base64,AA'>", "no alternative text"),
        ("<img src='x' alt=' '>", "no alternative text"),
        ("[next](06_missing.ipynb)", "the link to 06_missing.ipynb leads nowhere"),
        ("[next](05_lesson.ipynb#part)", ""),
        ("![a tree](https://example.org/a.png) and `[x](nowhere.md)`", ""),
    ],
)
def test_links_resolve_and_pictures_have_words(path: Path, source: str, part: str) -> None:
    findings = broken(path, markdown(source))
    assert part in text(findings) if part else findings == []


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ('lesson.show(figure, "bytes")', "without an alternative text"),
        ('lesson.show(figure, "bytes", alt="")', "without an alternative text"),
        ('lesson.show(figure, "bytes", "Bars of bytes")', ""),
        ("import matplotlib.pyplot as plt\nplt.show()", "use lesson.show"),
    ],
)
def test_figures_have_alternative_text(path: Path, source: str, part: str) -> None:
    findings = broken(path, insert(source))
    assert part in text(findings) if part else findings == []


def test_the_repository_is_stamped_into_every_notebook_alike(tmp_path: Path, path: Path) -> None:
    other = write_new(tmp_path / "06_more.ipynb", "More")
    address = "https://example.org/course.git"
    assert stamp(tmp_path, address) == [path, other]
    first, second = (cell(form.read(p)[0], "bootstrap")["source"] for p in (path, other))
    assert first == second == form.bootstrap_source(address) and f'REPOSITORY = "{address}"' in first
    assert form.check_folder([path, other]) == [] and stamp(tmp_path, address) == []
    assert form.bootstrap_source("me/course").count('REPOSITORY = "https://github.com/me/course.git"') == 1
    form.fix_file(other, "")
    assert "name different repositories" in text(form.check_folder([path, other]))


@pytest.mark.parametrize("address", ["https://me:secret@example.org/x.git", 'a"b', "a b", "{x}"])
def test_an_address_that_would_break_or_leak_is_refused(tmp_path: Path, path: Path, address: str) -> None:
    before = path.read_bytes()
    with pytest.raises(CourseProblem) as error:
        stamp(tmp_path, address)
    assert path.read_bytes() == before and "secret" not in str(error.value)


def test_files_that_are_no_notebooks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "07_bad.ipynb"
    bad.write_text("{", encoding="utf-8")
    assert form.main(["--fix", str(bad)]) == 1 and "is not a notebook" in capsys.readouterr().out
    assert bad.read_text(encoding="utf-8") == "{"
    assert form.main(["--check", str(tmp_path / "none")]) == 1
    assert "there is no" in capsys.readouterr().err


def test_a_new_notebook_needs_a_numbered_name_and_a_free_place(path: Path) -> None:
    for name in (path, path.with_name("lesson.ipynb"), path.with_name("08_x.py")):
        with pytest.raises(ValueError):
            write_new(name, "Title")


def test_the_form_does_not_change_what_was_read(path: Path) -> None:
    notebook, _ = form.read(path)
    before = copy.deepcopy(notebook)
    form.fixed(notebook, path.stem)
    assert notebook == before


@pytest.mark.slow
def test_a_new_notebook_runs_as_it_is(path: Path, tmp_path: Path) -> None:
    options = course.Options(profile="smoke", toolchain="reference", model="any/model", timeout=300)
    code_, (entry,) = course.run([course.load(path)], options, Workspace(tmp_path / "work"))
    assert code_ == 0, run_status.failure_text(entry)
