"""From a failed command's output to its first real error and one fix.

`advise` knows the failures that people report with TensorRT-LLM; each is one rule in `advice_rules` (build and load),
`advice_mpi` (mpirun), `advice_serve` (servers) or `advice_install` (installation, downloads), named after its row in the
course's list of pain points.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from trtllm_workshop.advice_install import INSTALL_RULES
from trtllm_workshop.advice_model import Advice, Context
from trtllm_workshop.advice_mpi import MPI_RULES
from trtllm_workshop.advice_rules import BUILD_RULES
from trtllm_workshop.advice_serve import SERVE_RULES

__all__ = ["Advice", "advise", "check_artifacts", "first_error"]

# Both loggers of TensorRT-LLM, TensorRT's own, and what argparse and MPI print.
_ERROR_LINE = re.compile(
    r"\[TRT(?:-LLM)?\]\s*\[(?:E|F)\]|\[TensorRT-LLM\]\s*\[(?:ERROR|FATAL)\]|^(?:[\w.-]+: )?error: "
)
_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"[A-Za-z_][\w.]*(?::\s|$)")
_LAST_WORDS = re.compile(
    r"^(?:\S*:\s*(?:line \d+:\s*)?(?:\d+\s+)?)?(Killed|Segmentation fault|Aborted|Terminated)\b", re.M
)


def _traceback_end(lines: list[str]) -> str | None:
    """The line that names the exception of the last traceback: the first one after it that is not indented."""
    starts = [number for number, line in enumerate(lines) if _TRACEBACK in line]
    if not starts:
        return None
    prefix = lines[starts[-1]].partition(_TRACEBACK)[0]  # launchers put the rank in front of every line
    for line in lines[starts[-1] + 1 :]:
        body = line.removeprefix(prefix)
        if body and not body[0].isspace() and _RAISED.match(body):
            return line.strip()
    return None


def first_error(text: str) -> str | None:
    """The first error-level line of a log, and on a second line what the last traceback raised; None for neither.

    The first one counts because later ones follow from it: a Python TypeError at the end often only says that the
    builder had returned nothing.
    """
    lines = text.splitlines()
    found = next((line.strip() for line in lines if _ERROR_LINE.search(line)), None)
    raised = _traceback_end(lines)
    parts = [part for part in (found, raised) if part]
    if not parts:
        last = _LAST_WORDS.findall(text)
        return last[-1] if last else None
    return parts[0] if len(parts) == 1 or parts[0] == parts[1] else "\n".join(parts)


def advise(
    text: str,
    returncode: int | None = None,
    command: str | None = None,
    count_gpus: Callable[[], int | None] = lambda: None,
) -> list[Advice]:
    """What is known about this failure: cause, one fix and the row of the pain-point list, the likeliest first.

    `text` is the output, `returncode` the process's code (negative: the signal), `command` the line that was run,
    `count_gpus` tells the number of usable GPUs (None: not known) to a rule that depends on it.
    An empty list means that nothing is known. Advice repeated by several rules is given once.
    """
    context = Context(text, returncode, command, count_gpus)
    found: list[Advice] = []
    for rule in (*SERVE_RULES, *BUILD_RULES, *MPI_RULES, *INSTALL_RULES):
        advice = rule(context)
        if advice is not None and advice.fix not in {other.fix for other in found}:
            found.append(advice)
    return found


def check_artifacts(folder: str | Path, since: float, world_size: int = 1, suffix: str = ".engine") -> list[Advice]:
    """What is missing after a command that ended with code 0: its log may be happy although files are not there.

    `since` is the time the command started (seconds, as `time.time()`), `suffix` is ``.engine`` or ``.safetensors``.
    Every ``rankN`` file and config.json has to exist, hold bytes and be as new as the command.
    """
    root = Path(folder)
    names = ["config.json", *(f"rank{rank}{suffix}" for rank in range(world_size))]
    bad = [f"{name} {state}" for name in names if (state := _state(root / name, since))]
    if not bad:
        return []
    cause = f"the command ended, but in {root} {_listed(bad)}"
    if suffix == ".engine" and not list(root.glob("rank*.engine")):
        cause += (
            "; an engine file is only made by trtllm-build or by the engine class "
            "tensorrt_llm._tensorrt_engine.LLM: the default LLM runs on PyTorch and makes none"
        )
    fix = "run the command again and watch the memory: a process that is killed late leaves a happy log and no file"
    return [Advice(cause, fix, "P54")]


def _state(path: Path, since: float) -> str:
    try:
        status = path.stat()
    except FileNotFoundError:
        return "is missing"
    if status.st_size == 0:
        return "is empty"
    # File systems keep times in steps of up to two seconds.
    return "is older than this run" if status.st_mtime < since - 2 else ""


def _listed(items: Iterable[str]) -> str:
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last
