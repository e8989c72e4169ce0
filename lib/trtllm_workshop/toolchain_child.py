"""The child interpreter of `%%toolchain`, given to Python with `-c`: no main file exists that workers could run again.

It needs the standard library only and runs on any Python from 3.8. Messages are JSON with a length in front, on file
descriptors of their own; standard output and error belong to the user's code alone.
"""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import ctypes
import difflib
import importlib.util
import json
import linecache
import os
import pathlib
import runpy
import signal
import struct
import sys
import time
import traceback
import types
from typing import IO, Any

CELL = "toolchain "  # file names of cells begin so, inside angle brackets
_TAGS = ("!tuple", "!bytes", "!dict")
_ABSENT = object()


class NotPlainData(TypeError):
    """A value that does not cross between notebook and child; the message names it and its type."""


def encode(value: Any, where: str) -> Any:
    """JSON-ready form of plain data; `where` names the value in the error. Raises NotPlainData for anything else."""
    kind = type(value)
    if kind.__module__ == "numpy" and getattr(value, "shape", None) == () and hasattr(value, "item"):
        return encode(value.item(), where)  # a numpy scalar; float64 and str_ are subclasses of Python's own types
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, pathlib.PurePath):
        return str(value)
    if kind is bytes:
        return {"!bytes": base64.b64encode(value).decode()}
    try:
        if kind in (list, tuple):
            items = [encode(item, f"{where}[{index}]") for index, item in enumerate(value)]
            return items if kind is list else {"!tuple": items}
        if kind is dict:
            pairs = [
                (encode(key, f"a key of {where}"), encode(item, f"{where}[{key!r}]")) for key, item in value.items()
            ]
            if all(type(key) is str and key not in _TAGS for key, _ in pairs):
                return dict(pairs)
            return {"!dict": [list(pair) for pair in pairs]}
    except RecursionError:
        raise NotPlainData(f"{where.split('[')[0]} contains itself or is nested too deeply to be copied") from None
    hint = "; use its .tolist()" if hasattr(value, "tolist") else ""
    raise NotPlainData(
        f"{where} is of type {kind.__module__}.{kind.__qualname__}; only plain data is copied between notebook and "
        f"child: None, bool, int, float, str, bytes, list, tuple, dict, paths and numpy scalars{hint}"
    )


def decode(value: Any) -> Any:
    """The inverse of `encode` (paths stay text)."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            ((tag, content),) = value.items()
            if tag == "!tuple":
                return tuple(map(decode, content))
            if tag == "!bytes":
                return base64.b64decode(content)
            if tag == "!dict":
                return {decode(key): decode(item) for key, item in content}
        return {key: decode(item) for key, item in value.items()}
    return value


def send(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Write one message: four bytes of length (big-endian), then UTF-8 JSON."""
    data = json.dumps(message).encode()
    stream.write(struct.pack(">I", len(data)) + data)
    stream.flush()


def receive(stream: Any) -> Any:
    """The next message, or None when the other side is gone."""
    size = stream.read(4)
    if len(size) < 4:
        return None
    data = stream.read(struct.unpack(">I", size)[0])
    return json.loads(data)


def identity() -> dict[str, Any]:
    """Which tensorrt_llm an import gives (or gave): version and file, read without importing the package."""
    module = sys.modules.get("tensorrt_llm")
    if module is not None:
        return {"version": getattr(module, "__version__", None), "file": getattr(module, "__file__", None)}
    spec = importlib.util.find_spec("tensorrt_llm")
    found: dict[str, Any] = {"version": None, "file": spec.origin if spec else None}
    if spec and spec.origin:
        version = pathlib.Path(spec.origin).with_name("version.py")
        with contextlib.suppress(Exception):  # whatever is wrong with it shows when the package is imported
            found["version"] = runpy.run_path(str(version))["__version__"]
    return found


class CellModule(types.ModuleType):
    """The `__main__` in which cells run.

    Its names can be used, but not fetched from outside by attribute: pickle then refuses functions and classes of a
    cell at once, where a spawned worker would look for them in vain and its pool would wait for ever.
    """

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            return super().__getattribute__(name)
        raise AttributeError(f"{name!r} lives in a %%toolchain cell, which other processes cannot import")


class Cells:
    """Runs cells one after the other in one namespace."""

    def __init__(self) -> None:
        module = CellModule("__main__")
        sys.modules["__main__"] = module
        self.namespace = module.__dict__
        self.namespace["__builtins__"] = builtins
        self.copied: dict[str, Any] = {}  # name -> the very object that was copied in last

    def handle(self, message: dict[str, Any]) -> dict[str, Any]:
        """Run one cell; the reply holds `error` or `outputs`, and `notes` to be shown."""
        if message["cwd"]:
            os.chdir(message["cwd"])
        notes = self._copy_in({name: decode(value) for name, value in message["inputs"].items()})
        for note in notes:
            print(f"note: {note}")
        filename = f"<{CELL}{message['name']}>"
        code = message["code"]
        linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._execute(code, filename)
            signal.signal(signal.SIGINT, _ignore)
            outputs = self._copy_out(message["outputs"])
        except BaseException as error:
            signal.signal(signal.SIGINT, _ignore)
            return {"error": describe(error), "outputs": {}}
        return {"error": None, "outputs": outputs}

    def _execute(self, code: str, filename: str) -> None:
        tree = ast.parse(code, filename)
        last: list[ast.stmt] = []
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not code.rstrip().endswith(";"):
            last = [tree.body.pop()]
        exec(compile(tree, filename, "exec", dont_inherit=True), self.namespace)
        if last:  # mode "single" shows the value as an interactive interpreter does
            exec(compile(ast.Interactive(last), filename, "single", dont_inherit=True), self.namespace)

    def _copy_in(self, values: dict[str, Any]) -> list[str]:
        notes = []
        for name, value in values.items():
            present = self.namespace.get(name, _ABSENT)
            ours = present is _ABSENT or present is self.copied.get(name, _ABSENT)
            if not ours and not (type(present) is type(value) and present == value):
                notes.append(
                    f"{name} was {type(present).__name__} here, set by an earlier %%toolchain cell; "
                    "the notebook's value replaces it"
                )
            self.namespace[name] = self.copied[name] = value
        return notes

    def _copy_out(self, names: list[str]) -> dict[str, Any]:
        for name in names:
            if name not in self.namespace:
                near = difflib.get_close_matches(name, [key for key in self.namespace if not key.startswith("_")], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise NameError(f"--out {name}: no cell has set this name{hint}")
        return {name: encode(self.namespace[name], name) for name in names}


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as plain data: type, text, the frames of the user's own code, and the whole traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    cells = [index for index, frame in enumerate(frames) if frame.filename.startswith("<" + CELL)]
    shown = []
    for index, frame in enumerate(frames[cells[0] :] if cells else []):
        if frame.filename.startswith("<" + CELL):
            name = frame.filename[len(CELL) + 1 : -1]
        elif _of_user(frame.filename):
            name = os.path.basename(frame.filename)
        elif index == len(frames) - cells[0] - 1:
            parts = pathlib.Path(frame.filename).parts
            shown.append(f"raised in {'/'.join(parts[-3:])}, line {frame.lineno} ({frame.name})")
            continue
        else:
            continue
        inside = "" if frame.name == "<module>" else f" in {frame.name}"
        shown.append(f"{name}, line {frame.lineno}{inside}: {frame.line}")
    text = "".join(traceback.format_exception_only(type(error), error)).strip()
    cause, seen = error.__cause__ or (None if error.__suppress_context__ else error.__context__), 0
    while cause is not None and seen < 3:
        shown.append("after " + traceback.format_exception_only(type(cause), cause)[-1].strip())
        cause, seen = cause.__cause__ or cause.__context__, seen + 1
    whole = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return {"type": type(error).__name__, "text": text, "frames": shown, "traceback": whole}


def _of_user(filename: str) -> bool:
    here = os.path.abspath(filename)
    libraries = [sys.prefix, sys.base_prefix, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.path.isfile(here) and not any(here.startswith(folder + os.sep) for folder in libraries)


def _ignore(signum: int, frame: Any) -> None:
    """Between cells an interrupt means nothing. A function, since an ignored signal would be inherited by programs."""


def _guard(life: int, others: tuple[int, ...]) -> None:
    """A second process that ends the whole group when `life` closes, that is when the notebook's kernel is gone.

    A process and not a thread: native code that holds the interpreter's lock would stop a thread.
    """
    child = os.getpid()
    if os.fork():
        os.close(life)
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    for descriptor in others:
        os.close(descriptor)
    while os.read(life, 1):
        pass
    for _ in range(20):  # two seconds for an orderly end
        if os.getppid() != child:
            break
        time.sleep(0.1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def main() -> None:
    """Serve cells until the command pipe closes."""
    command, reply, life = map(int, sys.argv[1:4])
    sys.argv[:] = [""]
    _guard(life, (command, reply))
    signal.signal(signal.SIGINT, _ignore)
    for descriptor in (command, reply):
        os.set_inheritable(descriptor, False)
    if sys.path and sys.path[0] == "":
        sys.path.append(sys.path.pop(0))  # files of the current folder must not hide the toolchain's packages
    cells = Cells()
    with os.fdopen(command, "rb") as commands, os.fdopen(reply, "wb") as replies:
        send(replies, {"python": ".".join(map(str, sys.version_info[:3])), "tensorrt_llm": identity()})
        while True:
            message = receive(commands)
            if message is None:
                return
            answer = cells.handle(message)
            answer["tensorrt_llm"] = identity() if "tensorrt_llm" in sys.modules else None
            sys.stdout.flush()
            sys.stderr.flush()
            ctypes.CDLL(None).fflush(None)  # what native code has printed
            send(replies, answer)


if __name__ == "__main__":
    main()
