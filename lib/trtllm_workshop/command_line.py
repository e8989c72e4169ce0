"""Split one command line into words the way a POSIX shell does, and refuse what only a shell could carry out.

Quotes, backslashes, line continuations, comments, `$NAME`, `${NAME}`, a leading `~` and leading `NAME=value` words are
understood (IEEE 1003.1, "Shell Command Language", sections 2.2, 2.6 and 2.9.1). Pipes, redirections, command lists,
wildcards and command substitution are refused by name, because the line never reaches a shell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

_ONE_EACH = "write one sh(...) call per command (the next runs only when this one succeeded)"
_SHELL_ONLY = {
    "|": "a pipe (|): run the first command, then work on `.output` of its result in Python",
    ">": "a redirection (>): the output is in `.output` of the result; write it to a file in Python",
    "<": "a redirection (<): give the command a file name instead",
    "&": f"& or &&: {_ONE_EACH}",
    ";": f"a second command after ';': {_ONE_EACH}",
    "*": "a wildcard (*): list the files with pathlib.Path.glob and put their names into the line",
    "`": "a command substitution: run that command first and put its `.output` into the line",
    "(": "parentheses: put quotes around a value that contains them",
    ")": "parentheses: put quotes around a value that contains them",
}
_VARIABLE = r"\$(?:\{(?P<{0}1>[A-Za-z_]\w*)\}|(?P<{0}2>[A-Za-z_]\w*))"
_IN_QUOTES = re.compile(r"\\(?P<escaped>[\"\\$`\n])|" + _VARIABLE.replace("{0}", "v"))
_PIECE = re.compile(
    r"(?P<continuation>\\\n|\\$)|(?P<blank_after>\\[ \t]+\n)|\\(?P<escaped>.)"
    r"|'(?P<single>[^']*)'|\"(?P<double>(?:[^\"\\]|\\.)*)\"|(?P<open>['\"])"
    r"|" + _VARIABLE.replace("{0}", "v") + r"|(?P<substitution>\$[({])"
    r"|(?P<comment>(?<!\S)#[^\n]*)|(?P<home>~(?=[/\s]|$))|(?P<space>[ \t\r]+)|(?P<newline>\n)"
    r"|(?P<shell>[|<>&;*`()])|(?P<plain>[^\s\\'\"$#~|<>&;*`()]+|.)",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


class CommandLineError(ValueError):
    """The line cannot be run as typed; the message says which part and what to write instead."""


def split_line(line: str, variables: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Return (variables set in front of the command, words of the command).

    `variables` are the values for `$NAME`. Raises CommandLineError for an empty line, an open quote, an unknown
    variable, a second command on a new line, or anything that needs a shell.
    """
    text = line.strip()
    if text.startswith(("!", "%")):
        raise CommandLineError(f"sh() takes the command itself: leave out the {text[0]!r} before {text[1:40]!r}")
    assignments: dict[str, str] = {}
    words = _words(text, variables)
    while words and _ASSIGNMENT.match(words[0]):
        name, _, assignments[name] = words.pop(0).partition("=")
    if not words:
        raise CommandLineError(f"there is no command in {line!r}")
    return assignments, words


def _words(text: str, variables: Mapping[str, str]) -> list[str]:
    words: list[str] = []
    word: str | None = None  # None between words: an empty quoted word is a word too
    for piece in _PIECE.finditer(text):
        kind, value = piece.lastgroup, piece.group()
        if kind in ("space", "newline"):
            words += [] if word is None else [word]
            word = None
            if kind == "newline" and words:
                _only_comments_after(text[piece.end() :])
            continue
        if kind in ("continuation", "comment"):
            continue
        if kind in ("v1", "v2"):
            value = _value(piece[kind], variables)
        elif kind in ("escaped", "single"):
            value = piece[kind]
        elif kind == "double":
            value = _IN_QUOTES.sub(lambda part: _in_quotes(part, variables), piece[kind])
        elif kind == "home" and word is None:
            value = os.path.expanduser("~")
        elif kind in ("shell", "substitution", "open", "blank_after"):
            raise CommandLineError(_refusal(kind, text[piece.start() : piece.start() + 30]))
        word = (word or "") + value
    return words if word is None else [*words, word]


def _refusal(kind: str, rest: str) -> str:
    if kind == "open":
        return f"the quote that opens {rest!r} is never closed"
    if kind == "blank_after":
        return "a backslash continues the line only as its very last character: remove the blanks after it"
    if kind == "substitution":
        return f"sh() runs no shell: in {rest!r} only the plain forms $NAME and ${{NAME}} would be replaced"
    return f"sh() runs one command without a shell, so it cannot do {_SHELL_ONLY[rest[0]]}"


def _only_comments_after(rest: str) -> None:
    for line in filter(None, map(str.strip, rest.splitlines())):
        if not line.startswith("#"):
            raise CommandLineError(
                f"the line before {line!r} ends the command: end it with a backslash (\\) when the command goes on; "
                f"otherwise {_ONE_EACH}"
            )


def _in_quotes(part: re.Match[str], variables: Mapping[str, str]) -> str:
    if part["escaped"] is not None:
        return "" if part["escaped"] == "\n" else part["escaped"]
    return _value(part["v1"] or part["v2"], variables)


def _value(name: str, variables: Mapping[str, str]) -> str:
    if name not in variables:
        raise CommandLineError(
            f"${name} is not set in the command's environment; for a Python variable use an f-string and {{{name}}}"
        )
    return variables[name]
