"""The runner on small real notebooks, executed by papermill in real kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from trtllm_workshop import course, run_process, run_status
from trtllm_workshop.artifacts import describe
from trtllm_workshop.course import Options
from trtllm_workshop.parameters import ParameterProblem
from trtllm_workshop.record import Record, now
from trtllm_workshop.workspace import Workspace

PARAMETERS = (
    'toolchain = "auto"\nmodel = ""\nwork_dir = "../work"\nprofile = "full"\ncount = 2\nstream = False\nsizes = [1]'
)
# What lesson.checkpoint() writes, without the toolchain that these notebooks do not need.
CHECKPOINT = """from pathlib import Path
from trtllm_workshop.record import Record
record = Record("{number}", {{"profile": profile, "model": {{"name": model, "source": ""}}}})
record.checks["made"] = {{"name": "made", "ok": True, "advice": "make it"}}
record.write(Path(work_dir) / "results" / "{number}.json", "ok")"""

Make = Callable[..., Path]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "work")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes notebooks/NN_name.ipynb with a parameters cell, the given code cells and a checkpoint."""

    def write(name: str, *sources: str, parameters: str | None = PARAMETERS, checkpoint: bool = True) -> Path:
        folder = tmp_path / "notebooks"
        folder.mkdir(exist_ok=True)
        cells = [nbformat.v4.new_markdown_cell("# Title")]
        if parameters is not None:
            cells.append(nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
        cells += [nbformat.v4.new_code_cell(source) for source in sources]
        if checkpoint:
            cells.append(nbformat.v4.new_code_cell(CHECKPOINT.format(number=name[:2])))
        path = folder / f"{name}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
        return path

    return write


def record(number: str, workspace: Workspace, ok: bool = True, artifacts: dict | None = None) -> None:
    """What lesson.checkpoint() leaves."""
    made = Record(number, {"profile": "smoke", "model": {"name": "", "source": ""}}, artifacts=artifacts or {})
    made.checks["made"] = {"name": "made", "ok": ok, "advice": "make it"}
    made.write(workspace.results / f"{number}.json", "ok" if ok else "failed")


def run(workspace: Workspace, *wanted: str, **options: object) -> tuple[int, list[course.Entry]]:
    folder = workspace.root.parent / "notebooks"
    return course.run(course.select(folder, wanted), Options(**options), workspace)  # type: ignore[arg-type]


def outputs(workspace: Workspace, name: str) -> str:
    notebook = nbformat.read(workspace.executed / f"{name}.ipynb", as_version=4)
    return "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))


@pytest.mark.slow
def test_a_run_passes_with_values_of_the_right_type_in_the_running_interpreter(
    make: Make, workspace: Workspace, capsys
) -> None:
    make(
        "00_first",
        "import sys; print(sys.executable, repr(model), repr(stream), repr(sizes), count + 1)",
        "",
        "%%capture\n1 + 1",
    )
    given = {"model": "007", "stream": "true", "sizes": "[1, 2]", "count": "3"}
    code, (entry,) = run(workspace, profile="smoke", given=given)
    assert (code, entry.status, entry.error) == (0, "passed", None)
    assert outputs(workspace, "00_first") == f"{sys.executable} '007' True [1, 2] 4\n"
    assert entry.cells_run == entry.cells == 5  # the parameters, the injected ones, two with code, the checkpoint
    assert entry.peak_memory_mb > 20 and entry.seconds > 0
    shown = capsys.readouterr().out
    assert "00_first: passed, 5 cells" in shown and "\r" not in shown
    state = json.loads((workspace.results / "run.json").read_text())
    assert [row["status"] for row in state["notebooks"]] == ["passed"]


@pytest.mark.slow
def test_a_notebook_that_stops_early_fails_and_the_next_is_not_run(make: Make, workspace: Workspace, capsys) -> None:
    make("00_first", "x = 1\nraise ValueError('the shard is gone')", "print('never')")
    make("01_second")
    code, (first, second) = run(workspace)
    assert code == 1 and (first.status, second.status) == ("failed", "not run")
    assert first.error is not None and (first.error["index"], first.error["cell"]) == (2, 3)
    shown = capsys.readouterr().out
    assert "code cell 3 of 5 (cell 2 of the file)" in shown
    assert shown.index("| raise ValueError('the shard is gone')") < shown.index("ValueError: the shard is gone")
    assert not (workspace.executed / "01_second.ipynb").exists()
    assert (workspace.executed / "00_first.ipynb").is_file()


@pytest.mark.slow
def test_keep_going_runs_the_others_and_still_fails(make: Make, workspace: Workspace) -> None:
    make("00_first", "1 / 0")
    make("01_second")
    code, entries = run(workspace, keep_going=True)
    assert code == 1 and [entry.status for entry in entries] == ["failed", "passed"]


@pytest.mark.slow
def test_leaving_by_systemexit_is_not_a_success(make: Make, workspace: Workspace) -> None:
    make("00_first", "import sys; sys.exit(0)", "print('below')")
    code, (entry,) = run(workspace)
    assert code == 1 and entry.status == "failed" and entry.cells_run == 3 < entry.cells
    assert entry.error is not None and (entry.error["name"], entry.error["index"]) == ("SystemExit", 2)


def test_cells_that_did_not_run_are_found_in_the_executed_copy(make: Make) -> None:
    source = nbformat.read(make("00_first", "1", ""), as_version=4)
    executed = nbformat.from_dict(source)
    count = 0
    for cell in executed.cells:
        if cell.cell_type == "code" and cell.source:
            cell.execution_count = count = count + 1
    assert run_status.find_problem(executed, source, {}) is None
    missing = run_status.find_problem(executed, source, {"profile": "smoke"})
    assert missing is not None and "parameters were not injected" in missing["message"]
    executed.cells[2].execution_count = None  # as papermill leaves a cell with the tag skip-execution
    skipped = run_status.find_problem(executed, source, {})
    assert skipped is not None and (skipped["name"], skipped["index"], skipped["cell"]) == ("NotExecuted", 2, 2)
    executed.cells = executed.cells[:2]
    cut = run_status.find_problem(executed, source, {})
    assert cut is not None and "2 code cells fewer" in cut["message"]


@pytest.mark.slow
def test_a_notebook_without_its_checkpoint_fails_also_when_an_old_record_is_there(
    make: Make, workspace: Workspace
) -> None:
    record("00", workspace)
    make("00_first", "print('no end')", checkpoint=False)
    code, (entry,) = run(workspace)
    assert code == 1 and entry.error is not None and "earlier run" in entry.error["message"]


def test_a_record_proves_a_checkpoint_only_when_it_is_whole_new_and_ok(workspace: Workspace) -> None:
    path, before = workspace.results / "00.json", now()
    assert "was not written" in run_status.checkpoint_problem(path, before)
    record("00", workspace)
    assert run_status.checkpoint_problem(path, before) == ""
    assert "earlier run" in run_status.checkpoint_problem(path, now())
    record("00", workspace, ok=False)
    assert run_status.checkpoint_problem(path, before) == "00.json says 'failed': made"
    path.write_text('{"finished": ')
    assert "cannot be read" in run_status.checkpoint_problem(path, before)


@pytest.mark.slow
def test_P124_a_killed_kernel_is_named_and_the_partial_notebook_is_kept(
    make: Make, workspace: Workspace, capsys
) -> None:
    make("00_first", "print('before')", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('after')")
    code, (entry,) = run(workspace)
    assert code == 1 and entry.status == "kernel died"
    assert entry.error is not None and (entry.error["index"], entry.error["cell"]) == (3, 4)
    assert outputs(workspace, "00_first") == "before\n"
    shown = capsys.readouterr().out
    assert "KERNEL DIED  00_first, code cell 4 of 6" in shown and "ran out of memory" in shown


@pytest.mark.slow
def test_a_timeout_is_told_apart_from_a_failure(make: Make, workspace: Workspace, capsys) -> None:
    make("00_first", "while True: pass")
    code, (entry,) = run(workspace, timeout=4)
    assert code == 1 and entry.status == "timed out"
    assert entry.error is not None and "longer than 4 s" in entry.error["message"]
    shown = capsys.readouterr().out
    assert "TIMED OUT  00_first" in shown and "--timeout SECONDS" in shown


@pytest.mark.slow
def test_an_interrupted_run_ends_what_the_notebook_started_and_nothing_else(make: Make, workspace: Workspace) -> None:
    workspace.root.mkdir()
    starter = (
        "import subprocess, sys\nfrom pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        f"Path({str(workspace.root)!r}, 'child').write_text(str(child.pid))\n"
        "while True: pass"
    )
    path, note = make("00_first", starter), workspace.root / "child"
    job = {
        "notebook": str(path),
        "output": str(workspace.root / "out.ipynb"),
        "parameters": {},
        "cwd": str(path.parent),
    }

    def interrupt_when_started(outcome: run_process.Outcome) -> None:
        if note.is_file() and note.read_text():
            raise KeyboardInterrupt

    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        kernel = run_process.write_kernel(workspace.root / "kernel")
        with pytest.raises(KeyboardInterrupt):
            run_process.run_notebook(job, kernel, workspace.root / "log", 300, interrupt_when_started)
        assert not psutil.pid_exists(int(note.read_text()))
        assert bystander.poll() is None
        assert (workspace.root / "out.ipynb").is_file()
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.slow
def test_a_process_left_behind_is_ended_and_reported(make: Make, workspace: Workspace, capsys) -> None:
    start = (
        "import subprocess, sys\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(601)'], start_new_session=True)"
    )
    make("00_first", start)
    code, (entry,) = run(workspace)
    assert code == 0 and len(entry.left_behind) == 1 and "sleep(601)" in entry.left_behind[0]
    assert "left a process running" in capsys.readouterr().out


def test_P121_values_take_the_type_of_the_default_or_are_refused(make: Make, workspace: Workspace) -> None:
    make("00_first")
    for given, part in [
        ({"stream": "maybe"}, "stream is 'maybe'"),
        ({"sizes": "one"}, "'one' is not a list"),
        ({"count": "many"}, "'many' is not a number"),
        ({"count": "2.5"}, "whole number"),
    ]:
        with pytest.raises(ParameterProblem, match=part):
            run(workspace, given=given)
    assert not workspace.executed.exists()


def test_an_unknown_parameter_fails_the_run_before_it_starts(make: Make, workspace: Workspace) -> None:
    make("00_first")
    make("01_second", parameters='profile = "full"\nwork_dir = ""\nmodel = ""')
    with pytest.raises(ParameterProblem, match=r"00_first.ipynb has no parameter 'cuont'. Did you mean 'count'"):
        run(workspace, given={"cuont": "1"})
    with pytest.raises(ParameterProblem, match=r"01_second.ipynb has no parameter 'count'"):
        run(workspace, given={"count": "1"})
    with pytest.raises(ParameterProblem, match=r"profile is 'smok'.*Did you mean 'smoke'"):
        run(workspace, "00", profile="smok")
    assert not workspace.root.exists()


@pytest.mark.parametrize(
    ("parameters", "later", "part"),
    [
        (None, "pass", "0 cells tagged 'parameters'"),
        ("a = 1\nb = a * 2", "pass", "b is computed"),
        ("import os", "pass", "nothing else"),
        ("profile = 'full'", "profile = 'smoke'", "assigns the parameter 'profile' again"),
        ("profile = 'full'", "for profile in ['smoke']: pass", "assigns the parameter 'profile' again"),
    ],
)
def test_P122_a_parameters_cell_that_would_lose_values_is_refused(
    make: Make, workspace: Workspace, parameters: str | None, later: str, part: str
) -> None:
    make("00_first", later, parameters=parameters)
    with pytest.raises(ParameterProblem, match=part):
        run(workspace, profile="smoke")


def test_P122_a_saved_injected_cell_is_refused(make: Make, workspace: Workspace) -> None:
    path = make("00_first")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(2, nbformat.v4.new_code_cell("count = 9", metadata={"tags": ["injected-parameters"]}))
    nbformat.write(notebook, path)
    with pytest.raises(ParameterProblem, match="saved 'injected-parameters' cell"):
        run(workspace)


@pytest.mark.slow
def test_resume_runs_only_what_did_not_pass_or_has_changed(make: Make, workspace: Workspace) -> None:
    make("00_first")
    make("01_second", "1 / 0")
    assert [entry.status for entry in run(workspace)[1]] == ["passed", "failed"]
    before = (workspace.executed / "00_first.ipynb").stat().st_mtime_ns
    make("01_second", "1 / 1")
    code, entries = run(workspace, resume=True)
    assert code == 0 and [entry.resumed for entry in entries] == [True, False]
    assert (workspace.executed / "00_first.ipynb").stat().st_mtime_ns == before

    first, second = course.select(workspace.root.parent / "notebooks")
    state = course.read_state(workspace)
    assert course.still_good(state["00"], first, state["00"].parameters, workspace)
    assert not course.still_good(state["00"], first, {"count": 5}, workspace)
    assert not course.still_good(state["00"], second, state["00"].parameters, workspace)
    record("00", workspace, ok=False)
    assert not course.still_good(state["00"], first, state["00"].parameters, workspace)
    (workspace.executed / "01_second.ipynb").unlink()
    assert not course.still_good(state["01"], second, state["01"].parameters, workspace)


@pytest.mark.slow
def test_catch_up_runs_what_is_missing_before_in_the_smoke_profile(make: Make, workspace: Workspace) -> None:
    folder = [make("00_first"), make("01_second"), make("02_third")][0].parent
    record("00", workspace)
    code, entries = course.catch_up(course.select(folder), "02", Options(), workspace)
    assert code == 0 and [(entry.number, entry.parameters["profile"]) for entry in entries] == [("01", "smoke")]
    assert course.catch_up(course.select(folder), "02", Options(), workspace) == (0, [])
    first = course.select(folder)[0]
    assert course.holds(first, "", workspace) and not course.holds(first, "other/model", workspace)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The numbers of the notebooks that course.run is asked for; nothing is executed."""
    numbers: list[str] = []

    def fake(notebooks, options, workspace, stream=None):
        numbers[:] = [notebook.number for notebook in notebooks]
        return 0, []

    monkeypatch.setattr(course, "run", fake)
    return numbers


def syllabus(folder: Path, **after: list[str]) -> None:
    rows = [{"notebook": f"{name[1:]}_x.ipynb", "after": list(numbers)} for name, numbers in after.items()]
    (folder / "syllabus.yml").write_text(json.dumps({"lessons": rows}), encoding="utf-8")  # JSON is YAML


def test_catch_up_follows_the_syllabus(make: Make, workspace: Workspace, ran: list[str]) -> None:
    for number in ("00", "01", "02", "03", "05"):
        folder = make(f"{number}_x").parent
    notebooks = course.select(folder)
    course.catch_up(notebooks, "05", Options(), workspace)
    assert ran == ["00", "01", "02", "03"], "without a syllabus: everything before"
    syllabus(folder, n00=[], n01=["00"], n02=["01"], n03=["02"], n05=["01"])
    course.catch_up(notebooks, "05", Options(), workspace)
    assert ran == ["00", "01"]
    course.catch_up(notebooks, "03", Options(), workspace)
    assert ran == ["00", "01", "02"]
    record("00", workspace)
    course.catch_up(notebooks, "05", Options(), workspace)
    assert ran == ["01"]
    ran.clear()
    assert course.catch_up(notebooks, "00", Options(), workspace) == (0, []) and ran == []
    syllabus(folder, n00=[], n01=["00"])
    course.catch_up(notebooks, "05", Options(), workspace)
    assert ran == ["01", "02", "03"], "a notebook that the syllabus does not list"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"lessons": [{"notebook": "00_x.ipynb"}]}', "KeyError: 'after'"),
        ("lessons: [", "ParserError"),
        ("lessons: 3", "TypeError"),
        ("", "TypeError"),
        (
            '{"lessons": [{"notebook": "00_x.ipynb", "after": ["01"]}, {"notebook": "01_x.ipynb", "after": ["00"]}]}',
            "builds on itself",
        ),
    ],
)
def test_a_syllabus_that_cannot_be_followed(make: Make, workspace: Workspace, ran: list[str], text, said) -> None:
    folder = [make("00_x"), make("01_x")][0].parent
    (folder / "syllabus.yml").write_text(text, encoding="utf-8")
    with pytest.raises(course.CourseProblem, match=said) as error:
        course.catch_up(course.select(folder), "01", Options(), workspace)
    assert "syllabus.yml" in str(error.value) and ran == []


def test_the_courses_own_lessons_build_on_earlier_ones_only() -> None:
    from trtllm_workshop.syllabus import prerequisites

    folder = course.notebooks_folder()
    numbers = [notebook.number for notebook in course.select(folder)]
    for number in numbers:
        needed = prerequisites(folder, number)
        assert needed is None or all(earlier < number and earlier in numbers for earlier in needed)
    assert prerequisites(folder, "05") == {"00", "01"}


def test_check_finds_a_file_that_is_gone_or_changed(workspace: Workspace) -> None:
    assert course.check("02", workspace) == [
        "02.json was not written, so the notebook never reached lesson.checkpoint()"
    ]
    made = workspace.root / "made" / "part.bin"
    made.parent.mkdir(parents=True)
    made.write_bytes(b"12345")
    record("02", workspace, artifacts={"made": describe(made.parent, workspace.root)})
    assert course.check("02", workspace) == []
    made.write_bytes(b"123")
    assert course.check("02", workspace) == ["made has 3 bytes; it had 5 when the lesson ended"]
    made.unlink()
    assert course.check("02", workspace) == ["made is empty"]


def test_the_texts_are_found_from_copied_notebooks_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebooks = tmp_path / "notebooks"
    notebooks.mkdir()
    monkeypatch.chdir(notebooks)
    own = course.datasets_folder()
    assert own == Path(course.__file__).resolve().parents[2] / "datasets"
    train = tmp_path / "datasets" / "calibration" / "train.jsonl"
    train.parent.mkdir(parents=True)
    train.write_text('{"text": "a"}')
    assert course.datasets_folder() == tmp_path / "datasets"
    monkeypatch.chdir(tmp_path)
    assert course.datasets_folder() == tmp_path / "datasets"
    train.unlink()
    monkeypatch.setattr(course, "__file__", str(tmp_path / "lib" / "package" / "course.py"))
    with pytest.raises(course.CourseProblem, match=r"copy the folder 'datasets'"):
        course.datasets_folder()


def test_selection(make: Make, tmp_path: Path) -> None:
    for name in ("00_a", "01_b", "02_c", "10_d"):
        make(name)
    folder = tmp_path / "notebooks"
    for wanted, numbers in [
        ([], ["00", "01", "02", "10"]),
        (["2", "00"], ["00", "02"]),
        (["01-09"], ["01", "02"]),
        (["notebooks/10_d.ipynb"], ["10"]),
    ]:
        assert [notebook.number for notebook in course.select(folder, wanted)] == numbers
    with pytest.raises(course.CourseProblem, match=r"no notebook '7'.*There is: 00, 01, 02, 10"):
        course.select(folder, ["7"])
    (folder / "03_broken.ipynb").write_text("{")
    with pytest.raises(course.CourseProblem, match=r"03_broken\.ipynb is not a notebook"):
        course.select(folder)


@pytest.mark.slow
def test_a_folder_with_braces_and_blanks_in_its_name(make: Make, tmp_path: Path) -> None:
    make("00_first")
    moved = tmp_path / "odd {name} folder"
    os.rename(tmp_path / "notebooks", moved)
    workspace = Workspace(moved / "work")
    code, (entry,) = course.run(course.select(moved), Options(profile="smoke"), workspace)
    assert code == 0, run_status.failure_text(entry)
    assert (workspace.executed / "00_first.ipynb").is_file()


@pytest.mark.slow
def test_P24_a_token_that_a_cell_prints_is_in_nothing_that_a_run_keeps(
    make: Make, workspace: Workspace, monkeypatch, capsys
) -> None:
    secret = "hf_" + "S3cretS3cret"
    monkeypatch.setenv("HF_TOKEN", secret)
    make("00_a", "import os\nprint('token', os.environ['HF_TOKEN'])\nraise RuntimeError(os.environ['HF_TOKEN'])")
    code, _ = run(workspace, "00")
    assert code == 1 and "token ***" in outputs(workspace, "00_a")
    shown = capsys.readouterr()
    assert secret not in shown.out + shown.err
    kept = [path for path in workspace.root.rglob("*") if path.is_file()]
    assert len(kept) > 2 and not [path for path in kept if secret.encode() in path.read_bytes()]
