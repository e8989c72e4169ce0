"""Finds which official command a list of words calls, behind mpirun, python, environment assignments and the like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from trtllm_workshop.command_facts import Command, commands
from trtllm_workshop.command_ranks import LAUNCHERS, Launch, read_launcher
from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.shell_words import is_placeholder

# Console scripts that the 1.2.1 wheel brings; those without recorded flags pass unchecked.
CONSOLE_SCRIPTS = (
    "trtllm-build",
    "trtllm-prune",
    "trtllm-refit",
    "trtllm-bench",
    "trtllm-serve",
    "trtllm-eval",
    "trtllm-llmapi-launch",
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
_PLAIN_PREFIXES = {"sudo", "time", "nohup", "exec", "!", "env", "trtllm-llmapi-launch"}


@dataclass(frozen=True)
class Call:
    """A call of an official command: its facts (None when no flags are recorded) and the words after its name."""

    command: Command | None
    arguments: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    launch: Launch | None = None  # mpirun and the like in front, if any
    groups: tuple[tuple[Command, tuple[str, ...]], ...] = ()  # words between a program and its sub-command


def _same_script(given: str, official: str) -> bool:
    """Whether a path as typed can be the official script: its examples folder may lie anywhere."""
    typed, real = list(PurePosixPath(given).parts), list(PurePosixPath(official).parts)
    if is_placeholder(typed[0]):
        typed = typed[1:]
        return typed in (real, real[1:])
    for root in ("examples", "benchmarks"):
        if root in typed:
            return typed[typed.index(root) :] == real
    return bool(typed) and typed[0] not in ("/", "..", "~") and real[-len(typed) :] == typed


def _find_script(path: str) -> Call | None:
    scripts = {name: entry for name, entry in commands().items() if name.endswith(".py")}
    for name, entry in scripts.items():
        if _same_script(path, name):
            return Call(entry)
    typed = PurePosixPath(path)
    in_examples = "examples" in typed.parts or "TRTLLM_EXAMPLES" in typed.parts[0]
    if in_examples and typed.name in {PurePosixPath(name).name for name in scripts}:
        known = ", ".join(name for name in scripts if PurePosixPath(name).name == typed.name)
        return Call(None, problems=(warning(f"no flags are recorded for {path}", f"recorded: {known}"),))
    return None


def _find_subcommand(entry: Command, words: Sequence[str]) -> Call:
    """Follow sub-commands such as ``trtllm-bench --model X throughput``; group flags stay in front of the words."""
    position = 0
    while position < len(words) and words[position].startswith("-"):
        spelling = words[position].split("=", 1)[0]
        flag = entry.find(spelling)
        takes_value = flag is not None and not flag.is_switch and "=" not in words[position]
        position += 2 if takes_value else 1
    if position >= len(words):
        return Call(entry, tuple(words))
    name = words[position]
    if is_placeholder(name):
        return Call(None)
    if name not in entry.subcommands:
        near = difflib.get_close_matches(name, entry.subcommands, n=1, cutoff=0.0)[0]
        return Call(None, problems=(error(f"{entry.name} has no sub-command {name}", f"did you mean {near}?"),))
    nested = commands().get(f"{entry.name} {name}")
    group = (entry, tuple(words[:position]))
    if nested is None:
        return Call(None, groups=(group,))
    rest = words[position + 1 :]
    inner = _find_subcommand(nested, rest) if nested.subcommands else Call(nested, tuple(rest))
    return replace(inner, groups=(group, *inner.groups))


def _find_program(words: Sequence[str]) -> Call | None:
    program = PurePosixPath(words[0]).name
    if program == "trtllm-serve":
        entry = commands()["trtllm-serve serve"]
        rest = words[1:]
        if rest and rest[0] == "serve":
            return Call(entry, tuple(rest[1:]))
        return None if rest and rest[0] in entry.siblings else Call(entry, tuple(rest))
    if program in commands():
        entry = commands()[program]
        return _find_subcommand(entry, words[1:]) if entry.subcommands else Call(entry, tuple(words[1:]))
    if re.fullmatch(r"trtllm[-_][a-z-]+", program) and program not in CONSOLE_SCRIPTS:
        near = difflib.get_close_matches(program, CONSOLE_SCRIPTS, n=1, cutoff=0.0)[0]
        return Call(None, problems=(error(f"there is no program {program} in 1.2.1", f"did you mean {near}?"),))
    return None


def find_call(words: Sequence[str]) -> Call | None:
    """The official command that these words call, or None for any other program (ls, curl, nvidia-smi…)."""
    call, launch = _behind_prefixes(words)
    return None if call is None else replace(call, launch=launch)


def _behind_prefixes(words: Sequence[str]) -> tuple[Call | None, Launch | None]:
    rest: list[str] = list(words)
    launch: Launch | None = None
    while rest:
        head = PurePosixPath(rest[0]).name
        if _ASSIGNMENT.match(rest[0]) or head in _PLAIN_PREFIXES:
            rest = rest[1:]
        elif head in LAUNCHERS:
            launch = read_launcher(rest)
            rest = rest[launch.words :]
        elif head == "workshop" and rest[1:2] == ["exec"] and "--" in rest:
            rest = rest[rest.index("--") + 1 :]
        elif _PYTHON.fullmatch(head) or rest[0] in ("{sys_executable}", "{python}", "$PYTHON"):
            rest = rest[1:]
            while rest and rest[0] in ("-u", "-B", "-X", "-W", "-I"):
                rest = rest[2:] if rest[0] in ("-X", "-W") else rest[1:]
            if not rest or rest[0].startswith("-"):
                return None, launch
            call = _find_script(rest[0])
            return None if call is None else replace(call, arguments=tuple(rest[1:])), launch
        else:
            call = _find_script(rest[0]) if rest[0].endswith(".py") else _find_program(rest)
            if call is None:
                return None, launch
            arguments = tuple(rest[1:]) if rest[0].endswith(".py") else call.arguments
            return replace(call, arguments=arguments), launch
    return None, launch
