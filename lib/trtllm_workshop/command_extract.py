"""Finds the command lines in notebook cells and Markdown, so that a test can check every one of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from trtllm_workshop.python_check import blank_magics

SHELL_LANGUAGES = {"", "bash", "sh", "shell", "console", "shell-session", "zsh"}
PYTHON_LANGUAGES = {"python", "py", "python3", "ipython"}
_FENCE = re.compile(r"^[ \t>]*(`{3,}|~{3,})[ \t]*([\w-]*)[^`\n]*$")
_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_KNOWN_START = re.compile(r"(?:\S+=\S*\s+|mpirun\s[^`]*?|python3?\s+|!\s*)*(?:trtllm-[a-z-]+|\S*\.py)(?=\s|$)")


@dataclass(frozen=True)
class FoundCommand:
    """A command line as it stands in a cell or a Markdown text; `line` counts from 1.

    `partial` means a fragment in running text, such as `` `trtllm-build --gemm_plugin auto` ``: what it shows must be
    right, but it need not be complete.
    """

    text: str
    line: int
    partial: bool = False


def commands_in_code(source: str) -> list[FoundCommand]:
    """Commands of a code cell: ``sh("…")`` calls (f-strings keep their fields as ``{name}``), ``!cmd`` and ``%%bash``.

    Text that is neither Python nor a shell cell raises SyntaxError.
    """
    first, _, body = source.lstrip("\n").partition("\n")
    skipped = len(source) - len(source.lstrip("\n"))
    if re.match(r"%%(bash|sh|script\s+(bash|sh))\b", first):
        return [FoundCommand(body, skipped + 2)]
    found = list(_bang_lines(source))
    found.extend(_sh_calls(ast.parse(blank_magics(source))))
    return sorted(found, key=lambda command: command.line)


def _bang_lines(source: str) -> Iterator[FoundCommand]:
    pending: list[str] = []
    for number, line in enumerate(source.split("\n"), 1):
        bare = line.strip() if not pending else line
        if pending or bare.startswith("!"):
            pending.append(bare.lstrip("!") if not pending else bare)
            if not line.rstrip().endswith("\\"):
                yield FoundCommand("\n".join(pending), number - len(pending) + 1)
                pending = []
    if pending:
        yield FoundCommand("\n".join(pending), len(source.split("\n")) - len(pending) + 1)


def _sh_calls(tree: ast.Module) -> Iterator[FoundCommand]:
    texts: dict[str, str] = {}  # variables that hold a text known from the cell itself
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            text = _text(node.value, texts)
            if text is not None:
                texts[node.targets[0].id] = text
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            text = _text(node.args[0], texts) if name == "sh" else None
            if text is not None:
                yield FoundCommand(text, node.lineno)


def _text(node: ast.expr, known: dict[str, str]) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else _placeholder(part.value)
            for part in node.values
            if isinstance(part, (ast.Constant, ast.FormattedValue))
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, known), _text(node.right, known)
        if left is None and right is None:
            return None
        return (left if left is not None else "{value}") + (right if right is not None else "{value}")
    return None


def _placeholder(node: ast.expr) -> str:
    return "{" + re.sub(r"\W+", "_", ast.unparse(node)).strip("_") + "}"


def commands_in_markdown(text: str) -> list[FoundCommand]:
    """Commands of a Markdown text: shell and Python blocks between fences, and code spans that call a known program."""
    found: list[FoundCommand] = []
    prose: list[str] = []
    block: list[str] = []
    fence = language = ""
    start = 0
    for number, line in enumerate(text.split("\n"), 1):
        match = _FENCE.match(line)
        if fence:
            if match and match.group(1).startswith(fence) and not match.group(2):
                found.extend(_block(language, block, start))
                fence, block = "", []
            else:
                block.append(line)
            prose.append("")
        elif match:
            fence, language, start = match.group(1), match.group(2).lower(), number + 1
            prose.append("")
        else:
            prose.append(line)
    found.extend(_spans("\n".join(prose)))
    return sorted(found, key=lambda command: command.line)


def _block(language: str, lines: list[str], start: int) -> Iterator[FoundCommand]:
    if language in SHELL_LANGUAGES:
        # In a console session only the lines behind a prompt are commands, the others are output.
        session = any(re.match(r"\s*\$ ", line) for line in lines)
        kept, going_on = [], False
        for line in lines:
            prompt = re.match(r"\s*\$ ", line)
            kept.append(line[prompt.end() :] if prompt else (line if going_on or not session else ""))
            going_on = line.rstrip().endswith("\\")
        yield FoundCommand("\n".join(kept), start)
    elif language in PYTHON_LANGUAGES:
        try:
            inner = commands_in_code("\n".join(lines))
        except SyntaxError:
            return  # a sketch in prose need not be complete Python
        for command in inner:
            yield FoundCommand(command.text, start + command.line - 1, command.partial)


def _spans(prose: str) -> Iterator[FoundCommand]:
    for match in _SPAN.finditer(prose):
        text = " ".join(match.group(2).split())
        if _KNOWN_START.match(text) and "\n\n" not in match.group(2):
            yield FoundCommand(text.removeprefix("!"), prose.count("\n", 0, match.start()) + 1, partial=True)


def extract_commands(text: str, markdown: bool | None = None) -> list[FoundCommand]:
    """Command lines in a code cell or a Markdown text; without `markdown`, text that parses as code counts as code."""
    if markdown is None:
        try:
            return commands_in_code(text)
        except SyntaxError:
            markdown = True
    return commands_in_markdown(text) if markdown else commands_in_code(text)
