"""Values that reach a notebook from outside: what they may be, and what to say when they are something else.

papermill's ``-p name value`` guesses a type from text: only ``True``, ``False``, ``None`` and numbers become values, so
``false`` and ``[1,2]`` arrive as text (and any non-empty text counts as true), while ``007`` becomes the number 7.
Two places guard against that: :func:`typed` is called by a notebook's first cell after its parameters, and
:func:`from_text` gives ``workshop run -p name=value`` the type of the default in the parameters cell.
"""

from __future__ import annotations

import ast
import difflib
import json
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

TOOLCHAINS = ("auto", "tensorrt_llm", "reference")
PROFILES = ("smoke", "full")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


class ParameterProblem(ValueError):
    """A notebook parameter has a name or a value that cannot be used; the text says which and what to do."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the closest choice, or an empty text."""
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """One of ``choices``, as text. Raises ParameterProblem with the list otherwise."""
    if isinstance(value, str) and value in choices:
        return value
    hint = nearest(value, choices) if isinstance(value, str) else ""
    raise ParameterProblem(f"Parameter {name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.{hint}")


def typed(name: str, value: object, kind: Any) -> Any:
    """``value`` as ``kind``: bool, int, float, str, list, list[int] ...; text true/false is accepted for bool.

    Raises ParameterProblem, with the papermill option that keeps the type, when the value is something else.
    """
    if isinstance(kind, types.UnionType):
        if value is None and type(None) in get_args(kind):
            return None
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    base = get_origin(kind) or kind
    if base is bool:
        return _typed_bool(name, value)
    if base is str:
        if isinstance(value, str):
            return value
        raise ParameterProblem(
            f"Parameter {name} is {value!r} ({type(value).__name__}), but it must be text. papermill's -p turns words "
            f"that look like numbers or truth values into those; -r {name} TEXT keeps the text as it is."
        )
    if base in (int, float):
        return _typed_number(name, value, base)
    if base in (list, tuple, dict):
        return _typed_container(name, value, base, get_args(kind))
    raise TypeError(f"parameters of type {kind!r} are not supported; use bool, int, float, str, list or dict")


def _typed_bool(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE + _FALSE:
        return value.strip().lower() in _TRUE
    raise ParameterProblem(
        f"Parameter {name} is {value!r}, but it must be true or false. Use -p {name} True, or -p {name} False."
    )


def _typed_number(name: str, value: object, base: type) -> int | float:
    if isinstance(value, str):
        raise ParameterProblem(f"Parameter {name} is the text {value!r}, but it must be a number, as in -p {name} 4.")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterProblem(f"Parameter {name} is {value!r}, but it must be a number of type {base.__name__}.")
    if value != value or value in (float("inf"), float("-inf")):
        raise ParameterProblem(f"Parameter {name} is {value!r}, but it must be a finite number.")
    if base is int and value != int(value):
        raise ParameterProblem(f"Parameter {name} is {value!r}, but it must be a whole number.")
    return base(value)


def _typed_container(name: str, value: object, base: type, args: tuple[Any, ...]) -> Any:
    if isinstance(value, str):
        raise ParameterProblem(
            f"Parameter {name} is the text {value!r}, but it must be a {base.__name__}. papermill's -p passes such "
            f"values as text; pass it as YAML: -y '{name}: {value}'."
        )
    if base is dict:
        if isinstance(value, Mapping):
            return dict(value)
    elif isinstance(value, list | tuple):
        return base(typed(f"{name}[{index}]", item, args[0]) if args else item for index, item in enumerate(value))
    raise ParameterProblem(f"Parameter {name} is {value!r}, but it must be a {base.__name__}. Use -y '{name}: ...'.")


def from_text(name: str, text: str, default: object) -> Any:
    """The value of ``-p name=text`` on our own command line, with the type of the notebook's ``default``."""
    if default is None:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
    if isinstance(default, bool | str):
        return typed(name, text, type(default))
    try:
        value = json.loads(text)
    except ValueError:
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
    if isinstance(value, str):
        kind = "number" if isinstance(default, int | float) else type(default).__name__
        raise ParameterProblem(f"Parameter {name}: {text!r} is not a {kind} (the notebook's default is {default!r}).")
    return typed(name, value, type(default))


def tags(cell: Mapping[str, Any]) -> list[str]:
    """The tags of a notebook cell; an empty list when it has none."""
    return list(cell.get("metadata", {}).get("tags", []))


def declared(notebook: Mapping[str, Any], label: str = "the notebook") -> dict[str, Any]:
    """Names and defaults in the cell tagged ``parameters``.

    Raises ParameterProblem when there is not exactly one such cell, when it holds anything but plain literals, when a
    stale ``injected-parameters`` cell was saved, or when a later cell assigns a parameter (it would undo the value).
    """
    code = [(index, cell) for index, cell in enumerate(notebook["cells"]) if cell["cell_type"] == "code"]
    found = [(index, cell) for index, cell in code if "parameters" in tags(cell)]
    if len(found) != 1:
        raise ParameterProblem(
            f"{label} has {len(found)} cells tagged 'parameters'; it needs exactly one, "
            "or values passed from outside go to the top and are overwritten by later cells."
        )
    if any("injected-parameters" in tags(cell) for _, cell in code):
        raise ParameterProblem(
            f"{label} contains a saved 'injected-parameters' cell of an earlier run; delete it, it hides the defaults."
        )
    position, cell = found[0]
    values = _literals(cell["source"], f"{label}, cell {position}")
    for index, later in code:
        overwritten = sorted(set(values) & _assigned(later["source"])) if index > position else []
        if overwritten:
            raise ParameterProblem(
                f"{label}, cell {index} assigns the parameter {overwritten[0]!r} again, so a value passed from outside "
                "would be lost; use another name there."
            )
    return values


def _literals(source: str, where: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name, right = node.targets[0].id, node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            name, right = node.target.id, node.value
        else:
            raise ParameterProblem(
                f"{where}: line {node.lineno} is not 'name = literal', and a parameters cell holds nothing else."
            )
        try:
            values[name] = ast.literal_eval(right)
        except ValueError:
            raise ParameterProblem(
                f"{where}: {name} is computed; the parameters cell may hold only plain literals. "
                "Compute it in a later cell, after the values from outside have arrived."
            ) from None
    return values


def _assigned(source: str) -> set[str]:
    """Names that a cell binds at its top level; cells with magics that do not parse are read line by line."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    if source.lstrip().startswith("%%"):
        return set()
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        return set()
    names: set[str] = set()
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        todo.extend(ast.iter_child_nodes(node))
    return names


def check_known(given: Iterable[str], known: Mapping[str, Any], label: str) -> None:
    """Raises ParameterProblem for the first given name that the notebook does not declare."""
    for name in given:
        if name not in known:
            listed = ", ".join(known) or "no parameters"
            raise ParameterProblem(f"{label} has no parameter {name!r}.{nearest(name, known)} It has: {listed}.")


def work_folder(value: object) -> Path:
    """The absolute work folder of a ``work_dir`` parameter; it need not exist yet, but it must not be a file."""
    text = typed("work_dir", str(value) if isinstance(value, Path) else value, str)
    if not text.strip():
        raise ParameterProblem("Parameter work_dir is empty; give a folder, for example '../work'.")
    path = Path(text).expanduser().resolve()
    try:
        there = existing_part(path)
    except (OSError, ValueError) as error:  # a name that is too long or has a null character
        raise ParameterProblem(f"Parameter work_dir is {text[:80]!r}, which can be no folder: {error}.") from error
    if not there.is_dir():
        what = "is a file" if there == path else f"lies below the file {there}"
        raise ParameterProblem(f"Parameter work_dir is {text!r}, which {what}; give a folder.")
    return path


def existing_part(path: Path) -> Path:
    """The path itself when it exists, else its nearest parent that does."""
    return next(part for part in (path, *path.parents) if part.exists())
