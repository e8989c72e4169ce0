"""Checks whole command lines against the recorded flags before anything runs."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from trtllm_workshop.command_facts import Command, Flag, commands
from trtllm_workshop.command_find import find_call
from trtllm_workshop.command_parser import converter
from trtllm_workshop.command_ranks import WorldSizes, check_world_size
from trtllm_workshop.command_rules import check_rules
from trtllm_workshop.flag_hints import unknown_flag_hint
from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.shell_words import is_placeholder, join_continuations, split_commands

_NUMBER = re.compile(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+")


def check_command(text: str, partial: bool = False, sizes: WorldSizes | None = None) -> list[Problem]:
    """Problems of the TensorRT-LLM command lines in `text`, as typed in a notebook, a shell block or Markdown.

    Checked are unknown, removed and misplaced flags, choices, types, missing values and required flags, contradictions
    between flags, and broken line continuations. Environment assignments, ``python``, ``mpirun -n N``, pipes and
    comments are understood; words that hold ``{name}`` or ``$NAME`` have unknown values, so their choices and types
    are not checked. Other programs give no problems. With `partial` nothing is said about what is missing. The ranks that
    are started are compared with the engine's; `sizes` remembers the folders of earlier texts, such as a notebook's cells.
    """
    sizes = WorldSizes() if sizes is None else sizes
    lines, problems = join_continuations(text)
    for line in lines:
        try:
            split = split_commands(line.text)
        except ValueError as reason:
            if any(name.split("/")[-1].split(" ")[0] in line.text for name in commands()):
                problems.append(error(f"line {line.number} cannot be split into words: {reason}", "close the quotes"))
            continue
        for words in split:
            call = find_call(words)
            if call is None:
                continue
            problems.extend(call.problems)
            if call.launch is not None and not partial:
                problems.extend(call.launch.problems)
            for group, arguments in call.groups:
                problems.extend(check_arguments(group, arguments, partial))
            if call.command is not None:
                problems.extend(check_arguments(call.command, call.arguments, partial))
                if not partial:
                    values = _walk(call.command, call.arguments).values
                    problems.extend(check_world_size(call.command, values, call.launch, sizes))
                    sizes.note(call.command, values)
    return problems


@dataclass
class _Walk:
    values: dict[str, list[str]] = field(default_factory=dict)  # main spelling -> words given
    problems: list[Problem] = field(default_factory=list)
    positionals: list[str] = field(default_factory=list)
    open_end: bool = False  # a placeholder may hold further flags


def check_arguments(entry: Command, words: Sequence[str], partial: bool = False) -> list[Problem]:
    """Problems of the words after the command's name; see `check_command`."""
    walk = _walk(entry, words)
    found = walk.problems
    found.extend(_check_missing(entry, walk) if not (partial or walk.open_end) else [])
    if not any(problem.severity == "error" for problem in found):
        found.extend(check_rules(entry, walk.values, walk.positionals, partial or walk.open_end))
    return found


def _takes(flag: Flag) -> tuple[int, int | None]:
    if flag.nargs is None:
        return 1, 1
    if isinstance(flag.nargs, int):
        return flag.nargs, flag.nargs
    return {"?": (0, 1), "+": (1, None), "*": (0, None)}[flag.nargs]


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _walk(entry: Command, words: Sequence[str]) -> _Walk:
    walk = _Walk()
    room = sum(flag.positional for flag in entry.flags.values())
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not _is_flag(word):
            if is_placeholder(word) and len(walk.positionals) >= room:
                walk.open_end = True
            else:
                walk.positionals.append(word)
            continue
        spelling, equals, attached = word.partition("=")
        if spelling in ("-h", "--help"):
            walk.open_end = True
            continue
        flag = entry.find(spelling)
        if flag is None:
            if is_placeholder(spelling):
                walk.open_end = True
                continue
            hint = unknown_flag_hint(entry, spelling, words)
            walk.problems.append(error(f"{entry.program} has no flag {spelling}", hint))
            while len(walk.positionals) >= room and position < len(words) and not _is_flag(words[position]):
                position += 1  # its values, which would only cause a second message
            continue
        if flag.is_switch:
            if equals:
                walk.problems.append(error(f"{spelling} takes no value, {attached!r} is given", f"write {spelling}"))
            _record(walk, flag, [spelling])
            continue
        given = [attached] if equals else []
        least, most = _takes(flag)
        while not equals and (most is None or len(given) < most) and position < len(words):
            if _is_flag(words[position]):
                break
            given.append(words[position])
            position += 1
        if len(given) < least and not equals:
            missing = "a value" if least == 1 else f"{least} values"
            walk.problems.append(error(f"{spelling} needs {missing}, {len(given)} given", f"write {spelling} VALUE"))
            continue
        walk.problems.extend(problem for text in given if (problem := check_value(flag, spelling, text)))
        _record(walk, flag, given)
    extra = walk.positionals[room:]
    if extra:
        message = f"{entry.program} takes no argument {extra[0]!r} without a flag"
        walk.problems.append(error(message, "put quotes around a value that contains blanks, or name its flag"))
    return walk


def _record(walk: _Walk, flag: Flag, given: list[str]) -> None:
    before = walk.values.get(flag.name)
    if before is not None and flag.action != "append" and before != given:
        message = f"{flag.name} is given twice, {' '.join(before)} and {' '.join(given)}"
        walk.problems.append(warning(message, "the last one counts: delete the other"))
    walk.values[flag.name] = given
    if flag.deprecated:
        note = f": {flag.note}" if flag.note else ""
        walk.problems.append(warning(f"{flag.name} is deprecated{note}", "leave it out"))


def check_value(flag: Flag, spelling: str, text: str) -> Problem | None:
    """A problem when the text is not one of the flag's choices or not of its type; placeholders are not judged."""
    if is_placeholder(text):
        return None
    try:
        value = converter(flag)(text)
    except (ValueError, argparse.ArgumentTypeError) as reason:
        if flag.type in ("int", "float") and isinstance(reason, ValueError):
            kind = {"int": "a whole number", "float": "a number"}[flag.type]
            return error(f"{spelling} {text}: not {kind}", f"give {kind}, for example {flag.default or 1}")
        return error(f"{spelling} {text}: {reason}", f"its default is {flag.default}")
    accepted = flag.accepted_choices
    if accepted is not None and value not in accepted:
        listed = ", ".join(str(choice) for choice in flag.choices or () if choice is not None)
        return error(f"{spelling} {text}: not one of its choices", f"choose from {listed}")
    return None


def _check_missing(entry: Command, walk: _Walk) -> list[Problem]:
    found = []
    for flag in entry.flags.values():
        absent = not walk.positionals if flag.positional else flag.name not in walk.values
        if flag.required and absent:
            found.append(error(f"{entry.program} needs {flag.name}", f"add {_example(flag)}"))
    for group in entry.one_of:
        if not any(name in walk.values for name in group):
            found.append(error(f"{entry.program} needs one of {' or '.join(group)}", f"add {group[0]} VALUE"))
    return found


def _example(flag: Flag) -> str:
    return flag.name if flag.positional else f"{flag.name} VALUE"
