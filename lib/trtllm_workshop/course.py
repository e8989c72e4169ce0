"""The course as a whole: ``course.begin`` for notebooks, and running them headlessly, one process a notebook."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TextIO

from trtllm_workshop import parameters, run_process, run_status
from trtllm_workshop.artifacts import recheck
from trtllm_workshop.lesson import CheckpointFailed, Lesson, MissingPrerequisite, begin
from trtllm_workshop.record import now, write_json
from trtllm_workshop.run_status import FAILED, NOT_RUN, PASSED, Entry
from trtllm_workshop.syllabus import prerequisites
from trtllm_workshop.workspace import Workspace

__all__ = ["CheckpointFailed", "Lesson", "MissingPrerequisite", "begin", "catch_up", "check", "datasets_folder", "run"]

_NAME = re.compile(r"^(\d\d)_\w+\.ipynb$")
DEFAULT_TIMEOUT = 3600.0


class CourseProblem(Exception):
    """The run cannot start; the text says why."""


@dataclass(frozen=True)
class Notebook:
    """One numbered notebook. ``content`` is its JSON, ``sha256`` of the file."""

    number: str
    path: Path
    content: dict[str, Any]
    sha256: str

    @property
    def name(self) -> str:
        return self.path.stem


@dataclass(frozen=True)
class Options:
    """How to run. ``given`` are the values of ``-p name=value`` as text; None means the notebook's own default."""

    profile: str | None = None
    toolchain: str | None = None
    model: str | None = None
    timeout: float = DEFAULT_TIMEOUT
    resume: bool = False
    keep_going: bool = False
    given: Mapping[str, str] | None = None


def notebooks_folder(folder: Path | None = None) -> Path:
    """``folder``, or the nearest folder ``notebooks`` of this checkout. Raises CourseProblem when there is none."""
    here = Path.cwd()
    beside_package = Path(__file__).resolve().parents[2] / "notebooks"
    for candidate in [folder] if folder else [here / "notebooks", here, beside_package]:
        if candidate and any(_NAME.match(path.name) for path in candidate.glob("*.ipynb")):
            return candidate.resolve()
    looked = folder or f"{here}, its folder 'notebooks' and {beside_package}"
    raise CourseProblem(f"no numbered notebooks (such as 00_check_gpu.ipynb) in {looked}. Use --notebooks-dir FOLDER.")


def datasets_folder() -> Path:
    """The course's texts: ``datasets`` beside the notebooks, or of the checkout that this package comes from, for
    notebooks that were copied elsewhere. Raises CourseProblem when neither is there."""
    beside_package = Path(__file__).resolve().parents[2] / "datasets"
    for candidate in (Path.cwd().parent / "datasets", Path.cwd() / "datasets", beside_package):
        if (candidate / "calibration" / "train.jsonl").is_file():
            return candidate.resolve()
    raise CourseProblem(
        f"the course's texts (datasets/calibration/train.jsonl) are neither beside {Path.cwd()} nor in {beside_package}: "
        "copy the folder 'datasets' of the course beside the folder of the notebooks"
    )


def load(path: Path) -> Notebook:
    """Reads a notebook. Raises CourseProblem for a file that is no notebook."""
    data = path.read_bytes()
    match = _NAME.match(path.name)
    try:
        content = json.loads(data)
        for cell in content["cells"]:
            cell["source"] = "".join(cell["source"])  # the format allows a list of lines
    except (ValueError, KeyError, TypeError) as error:
        raise CourseProblem(f"{path} is not a notebook: {type(error).__name__}: {error}") from error
    return Notebook(match.group(1) if match else "", path, content, hashlib.sha256(data).hexdigest())


def select(folder: Path, wanted: Sequence[str] = ()) -> list[Notebook]:
    """Notebooks in order: all, or those meant by ``02``, ``2``, ``02-04`` or a file name. Raises CourseProblem."""
    there = {match.group(1): path for path in sorted(folder.glob("*.ipynb")) if (match := _NAME.match(path.name))}
    chosen: set[str] = set()
    for word in wanted:
        stem = Path(word).stem
        span = re.fullmatch(r"(\d{1,2})-(\d{1,2})", word)
        if span:
            first, last = (int(part) for part in span.groups())
            numbers = [number for number in there if first <= int(number) <= last]
        else:
            numbers = [n for n, path in there.items() if path.stem == stem or (word.isdigit() and int(word) == int(n))]
        if not numbers:
            raise CourseProblem(f"there is no notebook {word!r} in {folder}. There is: {', '.join(there)}.")
        chosen.update(numbers)
    return [load(path) for number, path in there.items() if not wanted or number in chosen]


def prepare(notebook: Notebook, options: Options, workspace: Workspace) -> dict[str, Any]:
    """The values to inject, typed like their defaults. Raises ParameterProblem for an unknown name or a bad value."""
    known = parameters.declared(notebook.content, notebook.path.name)
    settings = {"profile": options.profile, "toolchain": options.toolchain, "model": options.model}
    values: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    parameters.check_known([*values, *(options.given or {})], known, notebook.path.name)
    for name, text in (options.given or {}).items():
        values[name] = parameters.from_text(name, text, known[name])
    if "profile" in values:
        parameters.choice("profile", values["profile"], parameters.PROFILES)
    if "toolchain" in values:
        parameters.choice("toolchain", values["toolchain"], parameters.TOOLCHAINS)
    if "work_dir" in known:
        values.setdefault("work_dir", str(workspace.root))
    return values


def run(
    notebooks: Sequence[Notebook], options: Options, workspace: Workspace, stream: TextIO | None = None
) -> tuple[int, list[Entry]]:
    """Executes the notebooks in order into ``work/executed`` and returns the exit code and one entry for each.

    0 only when every notebook ran to its last cell and its checkpoint held. The state is on disk after every notebook
    (``work/results/run.json``). Raises ParameterProblem before anything starts when a value is unknown or wrong.
    """
    jobs = [(notebook, prepare(notebook, options, workspace)) for notebook in notebooks]
    progress = Progress(stream or sys.stdout)
    earlier, started = read_state(workspace), now()
    entries = [
        Entry(nb.number, nb.name, str(nb.path), sha256=nb.sha256, parameters=values, cells=_count(nb, values))
        for nb, values in jobs
    ]
    stopped = False
    with tempfile.TemporaryDirectory(prefix="trtllm-workshop-kernel-") as temporary:
        kernel = run_process.write_kernel(Path(temporary))
        try:
            for place, (notebook, values) in enumerate(jobs):
                known = earlier.get(notebook.number)
                if options.resume and known and still_good(known, notebook, values, workspace):
                    entries[place] = replace(known, resumed=True)
                    progress.line(f"{run_status.MARKERS[PASSED]} {notebook.name}: passed earlier, nothing changed")
                elif stopped and not options.keep_going:
                    entries[place].error = {"advice": run_status.ADVICE[NOT_RUN]}
                else:
                    _run_one(notebook, entries[place], options, workspace, kernel, progress)
                    stopped |= entries[place].status != PASSED
                write_state(workspace, entries[: place + 1], started)
        except KeyboardInterrupt:
            progress.line("Interrupted. The notebook's processes have been ended.")
            entries[place].error = {"name": "Interrupted", "message": "stopped from the keyboard", "advice": "--resume"}
            stopped = True
        finally:
            write_state(workspace, entries, started)
    failed = [entry for entry in entries if entry.status != PASSED]
    progress.line("\n" + run_status.summary_table(entries))
    return (1 if failed or not entries else 0), entries


def _count(notebook: Notebook, values: Mapping[str, Any]) -> int:
    return len(run_status.code_cells(notebook.content)) + bool(values)


def _run_one(
    notebook: Notebook, entry: Entry, options: Options, workspace: Workspace, kernel: Path, progress: Progress
) -> None:
    output = workspace.executed / notebook.path.name
    log = workspace.logs / f"{notebook.name}.log"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    entry.started, entry.executed, entry.log = now(), str(output), str(log)
    job = {
        "notebook": str(notebook.path),
        "output": str(output),
        "parameters": entry.parameters,
        "cwd": str(notebook.path.parent),
    }
    progress.start(notebook.name, entry.cells)
    outcome = run_process.run_notebook(job, kernel, log, options.timeout, progress.update)
    entry.seconds, entry.peak_memory_mb = round(outcome.seconds, 2), round(outcome.peak_memory_mb, 1)
    entry.left_behind = outcome.left_behind
    entry.status = {"done": PASSED}.get(outcome.status, outcome.status)
    executed = load(output).content if output.is_file() else {"cells": []}
    ran = [cell for _, cell in run_status.code_cells(executed) if cell.get("execution_count") is not None]
    entry.cells_run = len(ran)
    entry.error = _explain(outcome, executed, notebook, entry, workspace)
    if entry.error and entry.status == PASSED:
        entry.status = FAILED
    progress.finish(entry)


def _explain(
    outcome: run_process.Outcome, executed: dict[str, Any], notebook: Notebook, entry: Entry, workspace: Workspace
) -> dict[str, Any] | None:
    """The error of a notebook that did not pass, with cell and advice; None when all evidence says that it passed."""
    if outcome.status in ("done", "failed") and executed["cells"]:
        problem = run_status.find_problem(executed, notebook.content, entry.parameters)
        if problem:
            return problem
    if outcome.status == "done":
        miss = run_status.checkpoint_problem(workspace.results / f"{notebook.number}.json", entry.started)
        return (
            {"name": "Checkpoint", "message": miss, "advice": "End the notebook with its checkpoint."} if miss else None
        )
    error: dict[str, Any] = {**(outcome.error or {}), "advice": run_status.ADVICE.get(outcome.status, "")}
    if outcome.cell:
        index = outcome.cell["index"]
        error["index"] = run_status.source_index(executed, index) if executed["cells"] else index
        error["cell"], error["source"] = outcome.cell["position"], outcome.cell["source"]
    return error


class Progress:
    """One line a notebook: rewritten in place on a terminal, otherwise a line at the start, each 30 s, and the end."""

    def __init__(self, stream: TextIO):
        self.stream, self.live = stream, stream.isatty()
        self.name, self.cells, self.last = "", 0, 0.0

    def line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def start(self, name: str, cells: int) -> None:
        self.name, self.cells, self.last = name, cells, time.monotonic()
        if not self.live:
            self.line(f"▶ {name}: {cells} code cells")

    def update(self, outcome: run_process.Outcome) -> None:
        text = f"{self.name}: cell {outcome.cell.get('position', 0)}/{outcome.cells or self.cells}"
        text += f", {run_status.duration(outcome.seconds)}, {outcome.peak_memory_mb:,.0f} MB peak"
        if self.live:
            print(f"\r\033[K▶ {text}", end="", file=self.stream, flush=True)
        elif time.monotonic() - self.last >= 30:
            self.last = time.monotonic()
            self.line(f"  {text}")

    def finish(self, entry: Entry) -> None:
        if self.live:
            print("\r\033[K", end="", file=self.stream)
        if entry.status == PASSED:
            memory = f"{entry.peak_memory_mb:,.0f} MB peak"
            self.line(
                f"✓ {entry.name}: passed, {entry.cells_run} cells, {run_status.duration(entry.seconds)}, {memory}"
            )
        else:
            self.line(run_status.failure_text(entry))
        for name in entry.left_behind:
            self.line(f"  It left a process running, which was ended: {name}")


def state_file(workspace: Workspace) -> Path:
    return workspace.results / "run.json"


def read_state(workspace: Workspace) -> dict[str, Entry]:
    """The last entry of every notebook by its number; empty when there is none or the file cannot be read."""
    try:
        rows = json.loads(state_file(workspace).read_text(encoding="utf-8"))["notebooks"]
        names = {field.name for field in fields(Entry)}
        return {row["number"]: Entry(**{key: row[key] for key in row if key in names}) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def write_state(workspace: Workspace, entries: Sequence[Entry], started: str) -> None:
    """Puts ``entries`` over the earlier ones, so that running one notebook keeps what is known of the others."""
    merged = {**read_state(workspace), **{entry.number: entry for entry in entries}}
    state = {
        "schema": 1,
        "started": started,
        "finished": now(),
        "this_run": [entry.number for entry in entries],
        "notebooks": [merged[number].as_dict() for number in sorted(merged)],
    }
    write_json(state_file(workspace), state)


def still_good(entry: Entry, notebook: Notebook, values: Mapping[str, Any], workspace: Workspace) -> bool:
    """Whether the earlier ``entry`` still stands: same notebook, same values, executed copy and checkpoint intact."""
    if entry.status != PASSED or entry.sha256 != notebook.sha256 or entry.parameters != dict(values):
        return False
    output = Path(entry.executed)
    if not output.is_file() or run_status.find_problem(load(output).content, notebook.content, values):
        return False
    return not check(notebook.number, workspace)


def check(number: str, workspace: Workspace) -> list[str]:
    """Looks again at what lesson ``number`` left: its record says ok and its files are unchanged: []."""
    path = workspace.results / f"{number}.json"
    problem = run_status.checkpoint_problem(path, "1970-01-01T00:00:00+00:00")
    if problem:
        return [problem]
    record = json.loads(path.read_text(encoding="utf-8"))
    lost = [recheck(artifact, workspace.root) for artifact in record.get("artifacts", [])]
    figures = [workspace.results / figure["file"] for figure in record.get("figures", [])]
    return [text for text in lost if text] + [f"{path} is not there" for path in figures if not path.is_file()]


def catch_up(
    notebooks: Sequence[Notebook], number: str, options: Options, workspace: Workspace
) -> tuple[int, list[Entry]]:
    """Runs what notebook ``number`` builds on and whose checkpoint does not hold, in the smoke profile by default.

    The syllabus beside the notebooks says what that is; without one it is every notebook before. Raises CourseProblem
    for a syllabus that cannot be read.
    """
    (target,) = [nb for nb in notebooks if nb.number == number]
    try:
        needed = prerequisites(target.path.parent, number)
    except ValueError as error:
        raise CourseProblem(str(error)) from error
    wanted = [nb for nb in notebooks if (nb.number < number if needed is None else nb.number in needed)]
    missing = [nb for nb in wanted if not holds(nb, options.model, workspace)]
    if not missing:
        return 0, []
    return run(missing, replace(options, profile=options.profile or "smoke"), workspace)


def holds(notebook: Notebook, model: str | None, workspace: Workspace) -> bool:
    """Whether the lesson's checkpoint holds, made with ``model`` when one is named."""
    if check(notebook.number, workspace):
        return False
    record = json.loads((workspace.results / f"{notebook.number}.json").read_text(encoding="utf-8"))
    return not model or record.get("model", {}).get("name") == model
