"""What a notebook uses: one ``Lesson`` that knows the toolchain, the folders, and what was predicted and measured.

A notebook's first cell after its parameters makes it::

    from trtllm_workshop import course
    lesson = course.begin("02", toolchain=toolchain, model=model, work_dir=work_dir, profile=profile)
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trtllm_workshop import exercise as exercises
from trtllm_workshop import parameters
from trtllm_workshop.figure_store import store_figure
from trtllm_workshop.record import Quantity, Record, finite, summarise
from trtllm_workshop.shell import ShownError
from trtllm_workshop.showing import Table, number, present

if TYPE_CHECKING:
    from trtllm_workshop.server_process import Server
    from trtllm_workshop.shell import CommandResult
    from trtllm_workshop.toolchain import Toolchain
    from trtllm_workshop.workspace import Workspace

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_GPU_MODEL = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
HEADLESS_VARIABLE = "TRTLLM_WORKSHOP_HEADLESS"  # the runner sets it for the kernels that it starts


class CheckpointFailed(ShownError):
    """Something that the lesson should have made is missing or wrong; the text lists every miss with its advice."""


class MissingPrerequisite(ShownError):
    """An earlier lesson's result is not there; the text names it and the command that makes it."""


def begin(
    number: str,
    *,
    toolchain: object = "auto",
    model: object = "",
    work_dir: object = "../work",
    profile: object = "full",
    values: Mapping[str, tuple[object, Any]] | None = None,
) -> Lesson:
    """Validates the parameter values, chooses the toolchain and returns the lesson; prints where and on what it runs.

    ``number`` is the notebook's two digits. ``values`` holds a notebook's further parameters as
    ``{"name": (value, kind)}`` with kinds such as ``bool``, ``int`` or ``list[int]``; the checked values are in
    ``lesson.values``. Raises ParameterProblem for a value that cannot be used. Safe to call again in the same kernel:
    each call starts a fresh record, and nothing is written before :meth:`Lesson.checkpoint`.
    """
    if not (isinstance(number, str) and len(number) == 2 and number.isdigit()):
        raise parameters.ParameterProblem(f"begin() needs the notebook's two digits as text ('02'), not {number!r}")
    wanted = parameters.choice("toolchain", toolchain, parameters.TOOLCHAINS)
    mode = parameters.choice("profile", profile, parameters.PROFILES)
    name = parameters.typed("model", model, str).strip()
    root = parameters.work_folder(work_dir)
    checked = {key: parameters.typed(key, value, kind) for key, (value, kind) in (values or {}).items()}

    from trtllm_workshop import machine
    from trtllm_workshop import toolchain as toolchains
    from trtllm_workshop.workspace import Workspace

    here = machine.detect(root)
    chosen = toolchains.choose(wanted, here, work_dir=root, quiet=True)
    toolchains.register_magics(chosen)
    name = name or (DEFAULT_GPU_MODEL if chosen.name == "tensorrt_llm" else DEFAULT_MODEL)
    return Lesson(number, chosen, Workspace(root), name, mode, checked, here.to_dict())


def known_source(results: Path, model: str) -> str:
    """Where an earlier lesson said that the weights of ``model`` came from; '' when none did."""
    for path in sorted(results.glob("[0-9][0-9].json"), reverse=True):
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))["model"]
            if earlier["name"] == model and earlier["source"]:
                return str(earlier["source"])
        except (ValueError, KeyError, TypeError):
            continue  # a damaged record is reported by `workshop check`, not here
    return ""


def _against(quantity: Quantity) -> str:
    """What is printed behind a measurement: how it stands to its prediction; '' without one."""
    if quantity.predicted is None or quantity.measured is None:
        return ""
    predicted, measured = (number(value, quantity.unit) for value in (quantity.predicted, quantity.measured))
    if predicted == measured:
        return "  (as predicted)"
    if quantity.ratio is None:
        return f"  (predicted {predicted})"
    ratio = f"{quantity.ratio:.3g}"
    return f"  (as predicted: {predicted})" if ratio == "1" else f"  ({ratio} times the prediction of {predicted})"


class Lesson:
    """One run of one notebook. Attributes: number, toolchain, workspace, model, profile, smoke, headless, values."""

    def __init__(
        self,
        number: str,
        toolchain: Toolchain,
        workspace: Workspace,
        model: str,
        profile: str,
        values: dict[str, Any],
        machine: dict[str, Any],
    ):
        self.number, self.toolchain, self.workspace, self.model = number, toolchain, workspace, model
        self.profile, self.smoke, self.values = profile, profile == "smoke", values
        self.headless = bool(os.environ.get(HEADLESS_VARIABLE))
        source = known_source(workspace.results, model)
        chosen = {key: str(getattr(toolchain, key)) for key in ("name", "version", "reason", "python")}
        context = {"profile": profile, "toolchain": chosen, "model": {"name": model, "source": source}}
        self.record = Record(number, {**context, "machine": machine, "values": values})
        rows = {
            "Toolchain": f"{toolchain.name} {toolchain.version} ({toolchain.reason})",
            "Model": f"{model} ({source})" if source else model,
            "Work folder": f"{workspace.root}  (profile {profile})",
            "Machine": machine["summary"],
        }
        print("\n".join([f"Lesson {number}", *(f"  {key:<12} {value}" for key, value in rows.items())]))

    # Folders and commands

    @property
    def model_dir(self) -> Path:
        """The folder of the Hugging Face model; ``model`` may itself be a folder on this machine."""
        local = Path(self.model).expanduser()
        return local.absolute() if (local / "config.json").is_file() else self.workspace.model_dir(self.model)

    def checkpoint_dir(self, precision: str = "float16", tp: int = 1) -> Path:
        """The TensorRT-LLM checkpoint folder of this model."""
        return self.workspace.checkpoint_dir(self.model, precision=precision, tp=tp)

    def engine_dir(self, precision: str = "float16", tp: int = 1) -> Path:
        """The engine folder of this model."""
        return self.workspace.engine_dir(self.model, precision=precision, tp=tp)

    @property
    def results_file(self) -> Path:
        """Where :meth:`checkpoint` writes the record of this lesson."""
        return self.workspace.results / f"{self.number}.json"

    def sh(self, command: str, **options: Any) -> CommandResult:
        """Runs one command line in the toolchain, with live output; see ``Toolchain.sh``."""
        return self.toolchain.sh(command, **options)

    def serve(self, command: str, **options: Any) -> Server:
        """Starts a server in the toolchain and waits until it is healthy; see ``server_process.start_server``. Use it in a
        ``with`` block, or ``stop()`` it. Its log goes to the work folder's ``logs``."""
        from trtllm_workshop.server_process import start_server

        name = Path(command.split()[0] if command.split() else "server").name
        log = self.workspace.root / "logs" / f"{self.number}-{name}-{time.strftime('%H%M%S')}.log"
        return start_server(self.toolchain, command, **{"log": log, **options})

    def require(self, number: str, path: str | Path) -> Path:
        """``path`` when it exists. Raises MissingPrerequisite with the one command that makes it otherwise."""
        found = Path(path)
        if found.is_file() or (found.is_dir() and any(found.iterdir())):
            return found
        raise MissingPrerequisite(
            f"{found} {'is empty' if found.is_dir() else 'is not there'}. Lesson {number} makes it.\n"
            f"Catch up with this one command, then run this cell again:\n\n    {self._catch_up_command()}"
        )

    def _catch_up_command(self) -> str:
        command = ["workshop"] if shutil.which("workshop") else [sys.executable, "-m", "trtllm_workshop"]
        options = ["--toolchain", self.toolchain.name, "--model", self.model, "--work-dir", str(self.workspace.root)]
        return shlex.join([*command, "catch-up", self.number, *options])

    # Predictions and measurements

    def predict(self, name: str, value: Any, unit: str) -> float:
        """Records what should come out before it is measured. ``value`` in ``unit`` ('' for a pure number)."""
        quantity = self.record.quantity(name, unit)
        quantity.predicted = finite(name, value)
        print(f"predicted  {name}: {number(quantity.predicted, unit)}")
        return quantity.predicted

    def measure(
        self,
        name: str,
        value: Any = None,
        unit: str = "",
        samples: Sequence[Any] | None = None,
        *,
        quiet: bool = False,
    ) -> float:
        """Records what came out beside the prediction of that name. Without ``value``: the median of ``samples``.

        ``quiet`` is for numbers that the lesson shows otherwise, such as in a table: nothing is printed, and
        :meth:`compare` leaves them out unless they were predicted or are named.
        """
        quantity = self.record.quantity(name, unit)
        spread = summarise(name, samples) if samples is not None else {}
        if value is None and not spread:
            raise TypeError(f"measurement {name!r} needs a value or samples")
        quantity.samples = spread
        quantity.measured = finite(name, spread["median"] if value is None else value)
        quantity.quiet = quiet
        if not quiet:
            print(f"measured   {name}: {number(quantity.measured, unit)}{_against(quantity)}")
        return quantity.measured

    def compare(self, *names: str) -> None:
        """Shows predictions beside measurements: those named, or all of this lesson, what was not predicted at the end."""
        unknown = [name for name in names if name not in self.record.quantities]
        if unknown:
            there = ", ".join(self.record.quantities) or "nothing yet"
            raise KeyError(f"no number named {unknown[0]!r} was predicted or measured; there is: {there}")
        known = self.record.quantities.values()
        chosen = [self.record.quantities[name] for name in names] or [
            *(item for item in known if item.predicted is not None),
            *(item for item in known if item.predicted is None and not item.quiet),
        ]
        rows = [
            {
                "quantity": item.name,
                "predicted": "" if item.predicted is None else number(item.predicted, item.unit),
                "measured": "not measured" if item.measured is None else number(item.measured, item.unit),
                "measured / predicted": "" if item.ratio is None else f"{item.ratio:.3g}",
            }
            for item in chosen
        ]
        self.table(rows, "Prediction and measurement")

    # Things to look at

    def table(self, rows: Sequence[Any], caption: str = "", header: Sequence[str] = ()) -> None:
        """Shows rows (mappings, or sequences with ``header``) as a table."""
        Table(rows, caption, header).show()

    def show(self, figure: Any, name: str, alt: str, *, recorded: str = "") -> None:
        """Shows a figure with its alternative text and keeps it for the report.

        ``figure`` is a matplotlib figure, SVG text or PNG bytes; ``name`` a short file name; ``alt`` says in a sentence
        what the picture shows. ``recorded`` is for numbers that were not measured in this run: the machine and the day,
        which the report repeats. Raises ValueError when the alternative text says too little.
        """
        stored = store_figure(figure, self.workspace.results / "figures", f"{self.number}-{name}", alt)
        entry = {"name": name, "file": f"figures/{stored.path.name}", "alt": stored.alt, "recorded": recorded}
        self.record.figures[name] = entry
        present(stored.html(), f"[Figure {name}: {stored.alt}]")

    def note(self, text: str) -> None:
        """Prints a remark and keeps it for the report, such as where the weights came from."""
        self.record.notes.append(text)
        print(text)

    def skip(self, step: str, why: str) -> None:
        """Says visibly that this machine cannot do a step, and keeps that for the report."""
        self.note(f"Skipped on this machine: {step}. Reason: {why}")

    def model_source(self, text: str) -> None:
        """Records where the weights came from (the Hub, the packaged copy); later lessons and the report repeat it."""
        self.record.context["model"] = {"name": self.model, "source": text}
        print(f"Model {self.model}: {text}")

    # Exercises and the checkpoint

    def exercise(
        self,
        id: str | int,
        answer: Any,
        check: Callable[[Any], Any] | Any,
        *,
        minutes: float,
        hint: str = "",
        solution: bool = False,
        tolerance: float = 0.01,
    ) -> bool:
        """Says how an answer fares and returns True when it is right; ``check`` is a value or a callable.

        An exercise cell runs as it stands: None or ``...`` prints "not answered yet". ``solution=True`` is for the
        course's own solution cell, which must pass: ExerciseFailed otherwise. See :func:`exercise.judge` for ``check``.
        """
        verdict = exercises.judge(answer, check, tolerance)
        entry = self.record.exercises.setdefault(str(id), {"id": str(id), "minutes": minutes, "state": exercises.OPEN})
        if solution:
            if verdict.state != exercises.RIGHT:
                reason = verdict.message or "it gives no answer"
                raise exercises.ExerciseFailed(f"the solution of exercise {id} does not pass its check: {reason}")
            entry["solution"] = "passes"
            print(f"Exercise {id}, solution: passes. {verdict.message}".rstrip())
            return True
        entry.update(minutes=minutes, state=verdict.state)
        if verdict.state == exercises.OPEN:
            print(f"Exercise {id}: not answered yet. It takes about {minutes:g} minute{'' if minutes == 1 else 's'}.")
        elif verdict.state == exercises.RIGHT:
            print(f"Exercise {id}: right. {verdict.message}".rstrip())
        else:
            print(f"Exercise {id}: not right yet. {verdict.message}" + (f"\nHint: {hint}" if hint else ""))
        return verdict.state == exercises.RIGHT

    def check(self, name: str, ok: Any, advice: str) -> bool:
        """Records one condition of the checkpoint; ``advice`` says what to do when it does not hold."""
        if not advice.strip():
            raise ValueError(f"the check {name!r} needs an advice: what should the reader do when it does not hold?")
        holds = bool(ok)
        self.record.checks[name] = {"name": name, "ok": holds, "advice": advice}
        print(f"{'✓ holds' if holds else '✗ fails'}  {name}" + ("" if holds else f"\n         {advice}"))
        return holds

    def made(self, path: str | Path, advice: str, kind: str = "") -> bool:
        """Checks that the lesson made a file or folder, and records it, so that ``workshop check`` can look again.

        ``kind`` is ``hf``, ``checkpoint`` or ``engine`` for folders whose content must be of that kind.
        """
        from trtllm_workshop.artifacts import describe

        found = describe(Path(path), self.workspace.root, kind)
        self.record.artifacts[found["path"]] = found
        size = f" ({number(found['bytes'] / 1e6, 'MB')})" if not found["problem"] else f": {found['problem']}"
        return self.check(f"{found['path']}{size}", not found["problem"], advice)

    def checkpoint(self) -> None:
        """Ends the lesson: writes its record and raises CheckpointFailed with every miss when a check does not hold."""
        misses = [check for check in self.record.checks.values() if not check["ok"]]
        proven = bool(self.record.checks)
        self.record.write(self.results_file, "ok" if proven and not misses else "failed")
        if not proven:
            raise CheckpointFailed("nothing was checked. Run the cells above this one first, then this one again.")
        if misses:
            lines = "\n".join(f"  ✗ {miss['name']}\n    {miss['advice']}" for miss in misses)
            count = f"{len(misses)} of {len(self.record.checks)}"
            raise CheckpointFailed(f"{count} checks of lesson {self.number} do not hold.\n{lines}")
        print(f"Checkpoint {self.number} holds: {len(self.record.checks)} checks. Record: {self.results_file}")
