"""Reads shell text tolerantly, to check it and never to run it.

Notebooks and Markdown show commands with placeholders (``$VAR``, ``{name}``, ``<MODEL>``, ``…``), pipes, comments and
line continuations. Here they become lists of words; what cannot be known stays a placeholder.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from trtllm_workshop.problem import Problem, error

_BRACES = re.compile(r"\$?\{[^{}\n]*\}")
_ANGLES = re.compile(r"<([A-Za-z][\w ./-]*)>")
_SUBSTITUTION = re.compile(r"\$\([^()]*\)|`[^`]*`")
_SEPARATORS = frozenset({"|", "||", "&", "&&", ";", "|&", ";;"})
_REDIRECTION = re.compile(r"[<>]+&?|&>+")


def is_placeholder(word: str) -> bool:
    """True when the word's value is not known before the run: it holds ``{name}``, ``$NAME``, or is an ellipsis."""
    return "{" in word or "$" in word or word in ("...", "…")


@dataclass(frozen=True)
class LogicalLine:
    """One command line after its continuations were joined; `number` is its first line, from 1."""

    text: str
    number: int


def join_continuations(text: str) -> tuple[list[LogicalLine], list[Problem]]:
    """Logical lines of the text, and what is wrong with its continuations.

    A backslash continues a line only as its very last character. Two mistakes make a shell run half of the command and
    then look for a program named ``--flag``: a blank after the backslash, and a missing backslash. Both are reported,
    and the lines are joined as they were meant.
    """
    lines: list[LogicalLine] = []
    problems: list[Problem] = []
    pending = ""
    start = 0
    for number, raw in enumerate(text.split("\n"), 1):
        stripped = raw.strip()
        if not pending and stripped.startswith("-") and lines and number > 1:
            previous = lines.pop()
            fix = f"end line {number - 1} with a backslash, nothing after it"
            problems.append(error(f"line {number} starts with {stripped.split()[0]}, but nothing continues it", fix))
            pending, start = previous.text + " ", previous.number
        if not pending:
            start = number
        body = raw.rstrip()
        if body.endswith("\\"):
            if body != raw:
                fix = "delete the blanks: the backslash has to be the last character of the line"
                problems.append(error(f"line {number} has blanks after its backslash, which ends the command", fix))
            pending += body[:-1] + " "
            continue
        whole = (pending + body).strip()
        pending = ""
        if whole and not whole.startswith("#"):
            lines.append(LogicalLine(whole, start))
    if pending.strip():
        problems.append(error("the last line ends with a backslash, so the command is not complete", "delete it"))
        lines.append(LogicalLine(pending.strip(), start))
    return lines, problems


def _name(match: re.Match[str]) -> str:
    return "{" + re.sub(r"\W+", "_", match.group(0)).strip("_") + "}"


def split_commands(line: str) -> list[list[str]]:
    """The simple commands of one logical line, as words; redirections and comments are dropped.

    Raises ValueError when a quote is not closed.
    """
    for pattern in (_SUBSTITUTION, _BRACES, _ANGLES):
        line = pattern.sub(_name, line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    skip_target = False
    for word in lexer:
        if word.startswith("#"):
            break
        if skip_target:
            skip_target = False
        elif word in _SEPARATORS:
            commands.append([])
        elif _REDIRECTION.fullmatch(word):
            if commands[-1] and commands[-1][-1] in ("1", "2"):
                commands[-1].pop()
            skip_target = True
        else:
            commands[-1].append(word)
    return [words for words in commands if words]
