"""What notebooks call: parameter values, predictions, exercises, figures and the checkpoint."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from trtllm_workshop import course, exercise, figure_store, showing
from trtllm_workshop.lesson import DEFAULT_MODEL, CheckpointFailed, Lesson, MissingPrerequisite
from trtllm_workshop.parameters import ParameterProblem, typed
from trtllm_workshop.workspace import Workspace


@pytest.fixture
def lesson(tmp_path: Path) -> Lesson:
    return course.begin("02", toolchain="reference", work_dir=str(tmp_path / "work"), profile="smoke")


def recorded(lesson: Lesson) -> dict:
    return json.loads(lesson.results_file.read_text(encoding="utf-8"))


# Parameters


@pytest.mark.parametrize(
    ("value", "kind", "result"),
    [
        ("false", bool, False),
        ("True", bool, True),
        (False, bool, False),
        (4, float, 4.0),
        (4.0, int, 4),
        ([1, 2], list[int], [1, 2]),
        ((1, 2), list, [1, 2]),
        ("007", str, "007"),
        (None, int | None, None),
    ],
)
def test_P121_values_of_the_right_kind_pass(value: object, kind: object, result: object) -> None:
    found = typed("x", value, kind)
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("value", "kind", "part"),
    [
        ("maybe", bool, "must be true or false"),
        (1, bool, "must be true or false"),
        ("[1, 2]", list[int], "-y 'x: [1, 2]'"),
        ([1, "2"], list[int], r"x\[1\] is the text '2'"),
        (7, str, "-r x TEXT keeps the text"),
        (True, str, "must be text"),
        (True, int, "must be a number"),
        ("4", int, "the text '4'"),
        (2.5, int, "whole number"),
        (float("nan"), float, "finite"),
        (3, dict, "must be a dict"),
    ],
)
def test_P121_other_values_are_refused_with_the_option_that_keeps_them(value: object, kind: object, part: str) -> None:
    with pytest.raises(ParameterProblem, match=part.replace("[1, 2]", r"\[1, 2\]")):
        typed("x", value, kind)


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"profile": "fast"}, "profile is 'fast'; it must be one of 'smoke', 'full'"),
        ({"toolchain": "tensorrt-llm"}, "Did you mean 'tensorrt_llm'"),
        ({"toolchain": False}, "toolchain is False"),
        ({"model": 7}, "-r model TEXT"),
        ({"work_dir": ""}, "work_dir is empty"),
        ({"work_dir": __file__}, "which is a file"),
        ({"values": {"stream": ("perhaps", bool)}}, "stream is 'perhaps'"),
        ({"number": "2"}, "two digits"),
        ({"number": 2}, "two digits"),
    ],
)
def test_P121_begin_names_the_value_that_it_cannot_use(tmp_path: Path, wrong: dict, part: str) -> None:
    arguments = {"number": "02", "toolchain": "reference", "work_dir": str(tmp_path / "work"), **wrong}
    with pytest.raises(ParameterProblem, match=part):
        course.begin(arguments.pop("number"), **arguments)
    assert not (tmp_path / "work").exists()


def test_begin_resolves_folders_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path / "notebooks")
    lesson = course.begin("03", toolchain="reference", values={"stream": ("false", bool)})
    os.chdir(tmp_path)  # a later change of folder moves nothing
    assert lesson.workspace.root == (tmp_path / "work").resolve()
    assert (lesson.model, lesson.smoke, lesson.values) == (DEFAULT_MODEL, False, {"stream": False})
    assert lesson.checkpoint_dir("bfloat16", tp=3).is_relative_to(lesson.workspace.root)
    shown = capsys.readouterr().out
    for part in ("Lesson 03", "reference 1.2.1", "asked for by name", DEFAULT_MODEL, str(tmp_path / "work"), "full"):
        assert part in shown


def test_begin_twice_starts_two_records(tmp_path: Path) -> None:
    first = course.begin("02", toolchain="reference", work_dir=str(tmp_path))
    first.measure("size", 1, "MB")
    second = course.begin("02", toolchain="reference", work_dir=str(tmp_path))
    assert first.record.quantities and not second.record.quantities
    assert not second.results_file.exists()  # nothing of an earlier run is touched before the checkpoint


def test_later_lessons_know_where_the_weights_came_from(lesson: Lesson, capsys) -> None:
    lesson.model_source("packaged copy, from 4 bits")
    lesson.check("x", True, "y")
    lesson.checkpoint()
    (lesson.results_file.parent / "03.json").write_text("{")
    later = course.begin("04", toolchain="reference", work_dir=str(lesson.workspace.root))
    assert later.record.context["model"]["source"] == "packaged copy, from 4 bits"
    assert f"{DEFAULT_MODEL} (packaged copy, from 4 bits)" in capsys.readouterr().out
    other = course.begin("04", toolchain="reference", work_dir=str(lesson.workspace.root), model="a/b")
    assert other.record.context["model"] == {"name": "a/b", "source": ""}


# Predictions and measurements


def test_a_measurement_meets_its_prediction(lesson: Lesson, capsys) -> None:
    lesson.predict("size", 200, "MB")
    lesson.measure("size", 250.0, "MB")
    lesson.measure("time", unit="s", samples=[3, 1, 2])
    assert "250 MB  (1.25 times the prediction of 200 MB)" in capsys.readouterr().out
    lesson.compare()
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "Prediction and measurement" and "2 s" in shown
    lesson.check("measured", True, "measure it")
    lesson.checkpoint()
    size, time = recorded(lesson)["quantities"]
    assert (size["predicted"], size["measured"], size["ratio"], size["unit"]) == (200, 250.0, 1.25, "MB")
    assert time["samples"] == {"count": 3, "min": 1, "median": 2, "max": 3, "stdev": 1.0} and time["predicted"] is None


@pytest.mark.parametrize(
    ("predicted", "measured", "said"),
    [
        (4, 4, "4 MB  (as predicted)"),
        (4000.2, 4000.4, "4,000 MB  (as predicted)"),
        (4001, 4003, "4,003 MB  (as predicted: 4,001 MB)"),
        (10, 8, "8 MB  (0.8 times the prediction of 10 MB)"),
        (0, 3, "3 MB  (predicted 0 MB)"),
        (0, 0, "0 MB  (as predicted)"),
    ],
)
def test_how_a_measurement_stands_to_its_prediction(lesson: Lesson, capsys, predicted, measured, said) -> None:
    lesson.predict("size", predicted, "MB")
    lesson.measure("size", measured, "MB")
    assert capsys.readouterr().out.splitlines()[-1] == f"measured   size: {said}"


def test_quiet_measurements_are_recorded_and_not_printed(lesson: Lesson, capsys) -> None:
    capsys.readouterr()
    assert lesson.measure("loss of FP8", 0.25, "nats", quiet=True) == 0.25
    lesson.measure("seconds", 3, "s")
    lesson.predict("size", 2, "MB")
    lesson.measure("size", 4, "MB", quiet=True)
    assert "loss" not in capsys.readouterr().out
    lesson.compare()
    shown = capsys.readouterr().out
    assert "loss" not in shown and shown.index("size") < shown.index("seconds"), "what was not predicted comes last"
    lesson.compare("loss of FP8")
    assert "0.25 nats" in capsys.readouterr().out
    lesson.check("x", True, "y")
    lesson.checkpoint()
    (loss, *_) = recorded(lesson)["quantities"]
    assert (loss["name"], loss["measured"]) == ("loss of FP8", 0.25)


def test_numbers_that_cannot_be_compared_are_refused(lesson: Lesson) -> None:
    lesson.predict("size", 200, "MB")
    with pytest.raises(ValueError, match="'MB' before and now in 'GB'"):
        lesson.measure("size", 0.2, "GB")
    with pytest.raises(ValueError, match="finite"):
        lesson.measure("speed", float("inf"), "tokens/s")
    with pytest.raises(TypeError, match="must be a number"):
        lesson.measure("speed", "fast", "tokens/s")
    with pytest.raises(TypeError, match="value or samples"):
        lesson.measure("speed", unit="tokens/s")
    with pytest.raises(KeyError, match=r"there is: size"):
        lesson.compare("sise")


def test_numpy_and_torch_scalars_are_recorded_as_plain_numbers(lesson: Lesson) -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    lesson.measure("a", numpy.float32(1.5), "")
    lesson.measure("b", torch.tensor(3), "")
    lesson.check("x", numpy.bool_(True), "y")
    lesson.checkpoint()
    assert [item["measured"] for item in recorded(lesson)["quantities"]] == [1.5, 3]


# Exercises


def test_an_exercise_cell_runs_as_it_stands(lesson: Lesson, capsys) -> None:
    for answer in (None, ..., "...", " ", {"layers": ...}, [1, None]):
        assert lesson.exercise("1", answer, check=30, minutes=3) is False
        assert capsys.readouterr().out == "Exercise 1: not answered yet. It takes about 3 minutes.\n"


@pytest.mark.parametrize(
    ("answer", "check", "state", "part"),
    [
        (30, 30, "right", ""),
        (30.1, 30, "right", ""),
        (60, 30, "wrong", "2 times the right value"),
        (-3, 30, "wrong", "not the right value"),
        ("30", 30, "wrong", "should be a number; yours is str"),
        (True, 1, "wrong", "should be a number"),
        ("gate", "gate", "right", ""),
        (["gate"], "gate", "wrong", "should be of type str; yours is list"),
        (3, lambda x: x == 3, "right", ""),
        (3, lambda x: "Count the KV heads, not the heads.", "wrong", "KV heads"),
        (3, lambda x: (True, "Three, because 9 / 3."), "right", "because 9 / 3"),
        ("a", lambda x: x + 1 > 2, "wrong", r"\(str\) could not be checked: TypeError"),
    ],
)
def test_verdicts(answer: object, check: object, state: str, part: str) -> None:
    verdict = exercise.judge(answer, check)
    assert verdict.state == state
    assert re.search(part, verdict.message)


def test_an_assertion_of_the_check_is_the_message_and_a_forgotten_return_is_a_mistake() -> None:
    def check(answer: int) -> bool:
        if answer <= 5:
            raise AssertionError("More than five.")
        return True

    assert exercise.judge(2, check).message == "More than five." and exercise.judge(6, check).state == "right"
    with pytest.raises(TypeError, match="returned None"):
        exercise.judge(2, lambda answer: None)


def test_a_solution_must_pass(lesson: Lesson, capsys) -> None:
    lesson.exercise("1", ..., check=30, minutes=3)
    assert lesson.exercise("1", 30, check=30, minutes=3, solution=True)
    assert "solution: passes" in capsys.readouterr().out
    with pytest.raises(exercise.ExerciseFailed, match=r"solution of exercise 1 does not pass its check: .*2 times"):
        lesson.exercise("1", 60, check=30, minutes=3, solution=True)
    with pytest.raises(exercise.ExerciseFailed, match="gives no answer"):
        lesson.exercise("1", None, check=30, minutes=3, solution=True)
    assert lesson.record.exercises["1"]["state"] == "open"  # the reader's own answer is not the solution's


def test_a_wrong_answer_gets_the_hint(lesson: Lesson, capsys) -> None:
    lesson.exercise("1", 9, check=3, minutes=1, hint="Look at num_key_value_heads.")
    assert capsys.readouterr().out.endswith("3 times the right value.\nHint: Look at num_key_value_heads.\n")


# Checkpoint and prerequisites


def test_the_checkpoint_lists_every_miss_and_still_writes_the_record(lesson: Lesson) -> None:
    lesson.check("config.json is there", True, "run the conversion")
    lesson.check("30 layers", False, "the model folder holds another model: delete it and download again")
    lesson.check("text is English", 0, "use the chat template")
    with pytest.raises(CheckpointFailed, match="2 of 3 checks of lesson 02") as failure:
        lesson.checkpoint()
    assert "download again" in str(failure.value) and "chat template" in str(failure.value)
    assert failure.value._render_traceback_() == [f"CheckpointFailed: {failure.value}"]
    data = recorded(lesson)
    assert data["status"] == "failed" and [check["ok"] for check in data["checks"]] == [True, False, False]
    lesson.check("30 layers", True, "again")
    lesson.check("text is English", True, "again")
    lesson.checkpoint()
    data = recorded(lesson)
    assert data["status"] == "ok" and data["profile"] == "smoke" and data["finished"] >= data["started"]
    assert data["toolchain"]["name"] == "reference" and data["machine"]["summary"] and data["python"]


def test_a_checkpoint_without_checks_proves_nothing(lesson: Lesson) -> None:
    with pytest.raises(CheckpointFailed, match="nothing was checked"):
        lesson.checkpoint()
    assert recorded(lesson)["status"] == "failed"


def test_a_record_that_cannot_be_written_leaves_the_earlier_one(lesson: Lesson) -> None:
    lesson.check("x", True, "y")
    lesson.checkpoint()
    before = lesson.results_file.read_bytes()
    lesson.record.notes.append("\ud800")  # cannot be encoded
    with pytest.raises(UnicodeEncodeError):
        lesson.checkpoint()
    assert lesson.results_file.read_bytes() == before
    assert [path.name for path in lesson.results_file.parent.iterdir()] == ["02.json"]


def test_require_names_the_command_that_catches_up(lesson: Lesson, tmp_path: Path) -> None:
    with pytest.raises(MissingPrerequisite) as missing:
        lesson.require("01", lesson.model_dir)
    text = str(missing.value)
    assert "Lesson 01 makes it" in text and str(lesson.model_dir) in text
    assert f"catch-up 02 --toolchain reference --model {DEFAULT_MODEL} --work-dir {lesson.workspace.root}" in text
    lesson.model_dir.mkdir(parents=True)
    with pytest.raises(MissingPrerequisite, match="is empty"):
        lesson.require("01", lesson.model_dir)
    (lesson.model_dir / "config.json").write_text("{}")
    assert lesson.require("01", lesson.model_dir) == lesson.model_dir


def test_made_checks_files_and_kinds(lesson: Lesson) -> None:
    folder = lesson.checkpoint_dir()
    assert lesson.made(folder, "run the conversion cell") is False
    folder.mkdir(parents=True)
    (folder / "part").write_bytes(b"12")
    assert lesson.made(folder, "run the conversion cell") is True
    assert lesson.made(folder, "run the conversion cell", kind="checkpoint") is False
    assert [entry["bytes"] for entry in lesson.record.artifacts.values()] == [2]
    with pytest.raises(ValueError, match="needs an advice"):
        lesson.check("x", True, " ")


# Figures and tables

GOOD_ALT = "Two curves: latency grows with the batch, throughput grows faster."


@pytest.mark.parametrize("alt", ["", "plot", "A figure 1.", "averyveryverylongsingleword", "   \n  ", None])
def test_a_figure_needs_an_alternative_text_that_says_something(lesson: Lesson, alt: str) -> None:
    with pytest.raises(ValueError, match="figure '02-x' needs an alternative text"):
        lesson.show("<svg xmlns='http://www.w3.org/2000/svg'/>", "x", alt)
    assert not lesson.record.figures


def test_a_figure_is_stored_with_its_alternative_text_and_shown_with_it(lesson: Lesson, capsys) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.plot([1, 2])
    lesson.show(figure, "curves", GOOD_ALT + ' "quoted" <b>')
    stored = lesson.workspace.results / "figures" / "02-curves.svg"
    assert stored.read_bytes().startswith(b"<?xml") and not plt.get_fignums()
    assert lesson.record.figures["curves"]["file"] == "figures/02-curves.svg"
    assert "[Figure curves: Two curves" in capsys.readouterr().out
    shown = figure_store.StoredFigure(stored, GOOD_ALT + ' "q" <b>', b"x", "image/svg+xml").html()
    assert 'alt="Two curves' in shown and "&quot;q&quot; &lt;b&gt;" in shown
    with pytest.raises(TypeError, match="not int"):
        lesson.show(3, "curves", GOOD_ALT)
    with pytest.raises(ValueError, match="must consist of letters"):
        lesson.show("<svg/>", "../curves", GOOD_ALT)


def test_tables_line_up_and_escape() -> None:
    table = showing.Table([{"name": "<q>", "size": 1234567}, {"name": "k", "size": 2.5}], "Sizes")
    assert str(table).splitlines() == [
        "Sizes",
        "name       size",
        "----  ---------",
        "<q>   1,234,567",
        "k           2.5",
    ]
    html = table._repr_html_()
    assert "&lt;q&gt;" in html and '<th style="text-align:right">size</th>' in html
    with pytest.raises(ValueError, match="2 values but there are 1"):
        showing.Table([[1, 2]], header=["a"])


@pytest.mark.slow
def test_a_lesson_in_a_real_kernel(tmp_path: Path) -> None:
    """Rich output, ``begin`` twice, the magic, and a failing checkpoint whose message is the whole error."""
    nbformat = pytest.importorskip("nbformat")
    sources = [
        "from trtllm_workshop import course\n"
        "begin = lambda: course.begin('02', toolchain=toolchain, work_dir=work_dir, profile=profile)\n"
        "lesson = begin(); lesson = begin()",
        "lesson.table([{'layer': 1}], 'Layers')",
        "import matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\naxes.plot([1, 2])\n"
        f"lesson.show(figure, 'curves', {GOOD_ALT!r})",
        "%%toolchain --out layers\nlayers = 5 * 6",
        "lesson.exercise('1', layers, check=30, minutes=1, solution=True)\nprint(lesson.headless)",
        "lesson.check('30 layers', layers == 31, 'download the model again')\nlesson.checkpoint()",
    ]
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    parameters = 'toolchain = "reference"\nwork_dir = "../work"\nprofile = "full"'
    cells.insert(0, nbformat.v4.new_code_cell(parameters, metadata={"tags": ["parameters"]}))
    path = tmp_path / "notebooks" / "02_convert.ipynb"
    path.parent.mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), path)
    workspace = Workspace(tmp_path / "work")
    code, (entry,) = course.run(course.select(path.parent), course.Options(profile="smoke"), workspace)
    assert code == 1 and entry.error is not None and (entry.error["index"], entry.cells_run) == (6, 8), entry.error
    assert entry.error["name"] == "CheckpointFailed" and "download the model again" in entry.error["message"]
    executed = nbformat.read(workspace.executed / path.name, as_version=4)
    outputs = [output for cell in executed.cells for output in cell.get("outputs", [])]
    html = "".join(output["data"].get("text/html", "") for output in outputs if "data" in output)
    assert "<caption" in html and f'alt="{GOOD_ALT}"' in html and html.count("<img") == 1
    assert not any("image/png" in output.get("data", {}) for output in outputs)  # matplotlib does not show it again
    printed = "".join(output.get("text", "") for output in outputs)
    assert "Exercise 1, solution: passes." in printed and printed.rstrip().endswith("download the model again")
    (error,) = [output for output in outputs if output.output_type == "error"]
    assert len(error.traceback) == 1
    assert json.loads((workspace.results / "02.json").read_text())["status"] == "failed"
