"""The ``workshop`` command as a person starts it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from trtllm_workshop import cli
from trtllm_workshop.record import Record


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one small notebook, as the current folder."""
    cells = [
        nbformat.v4.new_markdown_cell("# First"),
        nbformat.v4.new_code_cell("PLACEHOLDER = None", metadata={"tags": ["bootstrap"]}),
        nbformat.v4.new_code_cell('work_dir = "../work"\nprofile = "full"', metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(
            "from pathlib import Path\nfrom trtllm_workshop.record import Record\nr = Record('00', {'profile': profile})\n"
            "r.checks['x'] = {'name': 'x', 'ok': True, 'advice': 'y'}\n"
            "r.write(Path(work_dir) / 'results' / '00.json', 'ok')"
        ),
    ]
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "notebooks" / "00_first.ipynb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def workshop(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trtllm_workshop", *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_run_writes_the_executed_copy_the_report_and_clean_json(checkout: Path) -> None:
    done = workshop("run", "--profile", "smoke", "--json", cwd=checkout)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["notebooks"]
    assert (row["status"], row["parameters"]["profile"]) == ("passed", "smoke")
    assert "00_first: passed" in done.stderr
    for made in ("executed/00_first.ipynb", "report.html", "results/run.json", "logs/00_first.log"):
        assert (checkout / "work" / made).is_file()


def test_mistakes_on_the_command_line_are_explained_before_anything_starts(checkout: Path, capsys) -> None:
    for words, part in [
        (["run", "07"], "there is no notebook '07'"),
        (["run", "-p", "profil=smoke"], "no parameter 'profil'. Did you mean 'profile'?"),
        (["run", "-p", "profile"], "'profile' is not NAME=VALUE"),
        (["run", "-p", "profile=fast"], "must be one of 'smoke', 'full'"),
        (["run", "--model", "a/b"], "00_first.ipynb has no parameter 'model'"),
        (["run", "--notebooks-dir", "nowhere"], "Use --notebooks-dir FOLDER"),
        (["run", "--work-dir", __file__], "is a file"),
        (["run", "--work-dir", f"{__file__}/below"], "lies below the file"),
        (["run", "--work-dir", "n" * 300], "which can be no folder"),
        (["run", "--work-dir", ""], "work_dir is empty"),
        (["exec"], "write it after --"),
        (["exec", "--toolchain", "reference", "--", "no-such-command"], "'no-such-command' was found neither"),
        (["stamp", "--repo", "not a repo"], "OWNER/NAME"),
    ]:
        assert cli.main(words) == 1, words
        assert part in capsys.readouterr().err, words
    assert not (checkout / "work").exists()
    for words in (["run", "--timeout", "-3"], ["run", "--profile", "fast"], ["dance"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(words)
        assert stop.value.code == 2
    assert cli.main([]) == 2


def test_check_reports_each_lesson_and_its_remedy(checkout: Path, capsys) -> None:
    assert cli.main(["check"]) == 1
    assert "✗ 00: 00.json was not written" in capsys.readouterr().out
    record = Record("00", {})
    record.checks["x"] = {"name": "x", "ok": True, "advice": "y"}
    record.write(checkout / "work" / "results" / "00.json", "ok")
    assert cli.main(["check", "00", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ok": True, "lessons": {"00": []}}
    assert cli.main(["catch-up", "00"]) == 0
    assert "Nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(("command", "default"), [("run", "full"), ("catch-up", "smoke")])
def test_the_help_of_a_profile_names_the_default_of_the_command(capsys, command: str, default: str) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert {"full": "full: the lesson as written (default)", "smoke": "smoke: little work; the default here"}[
        default
    ] in text


def test_exec_runs_in_the_toolchain_and_hands_on_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "a script.py"
    script.write_text("import os, sys; print(os.environ['TRTLLM_EXAMPLES'], sys.argv[1:]); sys.exit(7)")
    done = workshop("exec", "--toolchain", "reference", "--", "python", str(script), "--flag", "two words")
    assert done.returncode == 7, done.stderr
    assert done.stdout.strip().endswith("['--flag', 'two words']") and "examples" in done.stdout
    assert done.stderr.startswith("toolchain: reference")


def test_doctor_has_the_last_word_on_its_own_options() -> None:
    done = workshop("doctor", "--json")
    assert isinstance(json.loads(done.stdout), dict), done.stderr


def test_stamp_sets_the_repository_in_every_notebook_and_can_be_repeated(checkout: Path) -> None:
    path = checkout / "notebooks" / "00_first.ipynb"
    for repository in ("someone/course", "https://example.org/course.git"):
        assert cli.main(["stamp", "--repo", repository]) == 0
        notebook = nbformat.read(path, as_version=4)
        assert repository in notebook.cells[1].source
        assert notebook.cells[2].source.startswith("work_dir")
    before = path.read_bytes()
    assert cli.main(["stamp", "--repo", "https://example.org/course.git"]) == 0
    assert path.read_bytes() == before


def test_starting_the_command_imports_nothing_heavy() -> None:
    code = (
        "import sys, trtllm_workshop.course, trtllm_workshop.cli\n"
        "print([name for name in ('torch', 'transformers', 'matplotlib', 'papermill', 'nbformat', 'jinja2', "
        "'huggingface_hub', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_a_work_folder_that_cannot_be_written_is_named(checkout: Path, monkeypatch, capsys) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trtllm_workshop.course.write_json", full)
    assert cli.main(["run", "--work-dir", "place"]) == 1
    assert "--work-dir place cannot be written: the disk is full" in capsys.readouterr().err
