"""Look for the real TensorRT-LLM on this machine: an interpreter with it, a working GPU, the matching examples."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trtllm_workshop.toolchain import REFERENCE, Toolchain

TARGET = "1.2"  # the release line whose flags and Python signatures the course records
CONTAINER_EXAMPLES = Path("/app/tensorrt_llm/examples")  # where NVIDIA's release image keeps the source tree
ENVIRONMENT_FOLDERS = (".venv-trtllm", "venv-trtllm", "work/venv-trtllm")  # made by a notebook's first cell
REPOSITORY = "https://github.com/NVIDIA/TensorRT-LLM.git"
# Finding the package without importing it takes milliseconds; the import itself takes many seconds and needs the GPU.
_PROBE = """
import importlib.metadata, importlib.util, json, sys
spec = importlib.util.find_spec("tensorrt_llm")
found = {"origin": spec.origin if spec else None, "version": None, "python": "%d.%d.%d" % sys.version_info[:3]}
try:
    found["version"] = importlib.metadata.version("tensorrt_llm")
except importlib.metadata.PackageNotFoundError:
    pass
if spec and len(sys.argv) > 1:
    import tensorrt_llm
    found["version"] = tensorrt_llm.__version__
print("\\n" + json.dumps(found))
"""


@dataclass
class Found:
    """What the search brought: the parts that are there, and (what, next step) for each that is missing."""

    python: Path | None = None
    version: str = ""
    examples: Path | None = None
    gpu: str = ""
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Everything is there."""
        return not self.missing

    def summary(self) -> str:
        """Half a line: why `auto` picks what it picks."""
        if self.complete:
            return f"TensorRT-LLM {self.version}, {self.gpu} and the examples are all here"
        return "; ".join(what for what, _ in self.missing)

    def explanation(self) -> str:
        """Everything that is missing, each with its next step."""
        lines = ["the tensorrt_llm toolchain cannot be used on this machine:"]
        lines += [f"  - {what}: {step}" for what, step in self.missing]
        lines.append("  The reference toolchain runs everywhere: toolchain = 'reference' (or 'auto').")
        return "\n".join(lines)

    def toolchain(self, reason: str) -> Toolchain:
        """The toolchain made of the parts; prints a warning when the release is not the recorded one."""
        assert self.python is not None and self.examples is not None
        if not self.version.startswith(TARGET):
            print(
                f"warning: TensorRT-LLM {self.version} is installed; the course's commands are those of {TARGET}.x, "
                "so flags and parameters may differ (compare with `trtllm-build --help`)"
            )
        return Toolchain(
            name="tensorrt_llm",
            version=self.version,
            python=self.python,
            bin_dirs=(self.python.parent,),
            examples=self.examples,
            reason=reason,
        )


def find(machine: Any = None, work_dir: Path | str | None = None, verify_import: bool = False) -> Found:
    """Search all three parts; `verify_import` also imports the package in a child once everything else is there."""
    found = Found()
    near = _near(work_dir)
    tried: list[str] = []
    for python in _interpreters(near):
        facts = _probe(python, verify=False)
        tried.append(str(python))
        if facts.get("origin") and facts.get("version"):
            found.python, found.version = python, facts["version"]
            break
    if found.python is None:
        found.missing.append(
            (
                "no Python with the package tensorrt_llm",
                f"run the first cell of a notebook on a GPU machine, or set TRTLLM_PYTHON (tried: {', '.join(tried)})",
            )
        )
    found.gpu = _gpu(machine)
    if not found.gpu:
        found.missing.append(("no usable NVIDIA GPU", "see what `workshop doctor` says"))
    if found.python is not None:
        found.examples, what, step = _examples(found.version, near)
        if found.examples is None:
            found.missing.append((what, step))
        elif verify_import and not found.missing:
            facts = _probe(found.python, verify=True)
            if facts.get("error"):
                failure = f"`import tensorrt_llm` fails in {found.python} ({facts['error']})"
                found.missing.append((failure, "mend that installation first"))
    return found


def _near(work_dir: Path | str | None) -> list[Path]:
    """Folders that may hold a checkout or an environment: the work folder, its parent, the current one, its parent."""
    here = Path.cwd()
    work = [Path(work_dir).absolute(), Path(work_dir).absolute().parent] if work_dir else []
    return list(dict.fromkeys([*work, here, here.parent]))


def _interpreters(near: list[Path]) -> Iterator[Path]:
    candidates: list[Path] = []
    if os.environ.get("TRTLLM_PYTHON"):
        candidates.append(Path(os.environ["TRTLLM_PYTHON"]).expanduser())
    candidates.append(Path(sys.executable))
    build = shutil.which("trtllm-build")
    if build and not Path(build).resolve().is_relative_to(REFERENCE):
        candidates += [Path(build).with_name("python"), Path(build).with_name("python3")]
    candidates += [folder / name / "bin" / "python" for folder in near for name in ENVIRONMENT_FOLDERS]
    # Not resolved: the python of a virtual environment is a link, and following it would leave the environment.
    for path in dict.fromkeys(candidate.absolute() for candidate in candidates):
        if path.is_file():
            yield path


def _probe(python: Path, verify: bool, timeout_s: float = 300) -> dict[str, Any]:
    """Ask one interpreter; {"error": text} when it cannot answer. The reference package never counts as an answer."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    kept = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [path for path in kept if not Path(path).is_relative_to(REFERENCE)]
    if kept:
        environment["PYTHONPATH"] = os.pathsep.join(kept)
    command = [str(python), "-c", _PROBE, *(["verify"] if verify else [])]
    try:
        # From the root folder: `-c` searches the current one first, and a source checkout there shadows the package.
        result = subprocess.run(
            command,
            env=environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return {"error": str(problem)}
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        return {"error": lines[-1].strip() if lines else f"exit code {result.returncode}"}
    try:
        # The package prints a banner of its own to standard output, so the answer is the last line only.
        facts: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": "the interpreter gave no readable answer"}
    return facts


def _gpu(machine: Any) -> str:
    """The name of the first usable GPU, or an empty text."""
    if machine is None:
        try:
            from trtllm_workshop.machine import detect
        except ImportError:
            return _ask_nvidia_smi()
        machine = detect()
    gpus = list(getattr(machine, "gpus", ()) or ())
    return str(getattr(gpus[0], "name", "an NVIDIA GPU")) if gpus else ""


def _ask_nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    names = result.stdout.strip().splitlines()
    return names[0] if result.returncode == 0 and names else ""


def _examples(version: str, near: list[Path]) -> tuple[Path | None, str, str]:
    """(examples folder of the same release as the package, what is missing, the command that fetches it)."""
    named = os.environ.get("TRTLLM_EXAMPLES", "")
    if named and not Path(named).is_relative_to(REFERENCE):
        folder = Path(named).expanduser().absolute()
        what = f"TRTLLM_EXAMPLES is {named!r}, which is not a folder"
        return (folder if folder.is_dir() else None), what, f"point it to the examples folder of tag v{version}"
    if CONTAINER_EXAMPLES.is_dir():
        return CONTAINER_EXAMPLES, "", ""
    others = ""
    for folder in near:
        checkout = folder / "TensorRT-LLM"
        of = _checkout_version(checkout)
        if of == version and (checkout / "examples").is_dir():
            return checkout / "examples", "", ""
        if of:
            others = f" ({checkout} is of {of}, whose scripts need not fit)"
    fetch = f"git clone --depth 1 --branch v{version} {REPOSITORY} {near[0] / 'TensorRT-LLM'}"
    return None, f"the examples of TensorRT-LLM {version} are not here{others}; the wheel has none", fetch


def _checkout_version(checkout: Path) -> str:
    try:
        text = (checkout / "tensorrt_llm" / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(r"""__version__\s*=\s*["']([^"']+)["']""", text)
    return match.group(1) if match else ""
