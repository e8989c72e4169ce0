"""The `%%toolchain` line of a notebook cell: which names go into the child, which come back."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

from trtllm_workshop.session import ToolchainError

if TYPE_CHECKING:
    from trtllm_workshop.toolchain import Toolchain

USAGE = """%%toolchain [names ...] [--out names ...] [--fresh]
  names    notebook variables that the cell needs (plain data only)
  --out    names set by the cell that the notebook gets back
  --fresh  start a new child interpreter first; variables of earlier cells are gone"""


def register(toolchain: Toolchain) -> None:
    """Register `%%toolchain` for `toolchain` in the running IPython; nothing happens in plain Python.

    A second call with the same toolchain (its set-up cell was run again) keeps the running child and its variables.
    """
    try:
        from IPython import get_ipython
    except ImportError:
        return
    shell = get_ipython()
    if shell is None:
        return
    earlier = getattr(shell.magics_manager.magics["cell"].get("toolchain"), "__self__", None)
    if isinstance(earlier, ToolchainMagic) and earlier.toolchain is not toolchain:
        toolchain.take_session(earlier.toolchain)
    shell.register_magic_function(ToolchainMagic(shell, toolchain).run, magic_kind="cell", magic_name="toolchain")


class ToolchainMagic:
    """The magic of one notebook, bound to its IPython shell and its toolchain."""

    def __init__(self, shell: Any, toolchain: Toolchain):
        self.toolchain = toolchain
        self._shell = shell
        self._given: dict[str, Any] = {}  # what --out has put into the notebook

    def run(self, line: str, cell: str) -> None:
        """%%toolchain [names ...] [--out names ...] [--fresh]: run the cell in the toolchain's Python."""
        names, outputs, fresh = parse_line(line)
        space = self._shell.user_ns
        for name in names:
            if name not in space:
                near = difflib.get_close_matches(name, [key for key in space if not key.startswith("_")], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ToolchainError(f"%%toolchain {name}: the notebook has no variable of this name{hint}")
        if fresh:
            self.toolchain.close()
        # The empty line stands for the %%toolchain line, so that line numbers agree with the cell as it is seen.
        label = f"In [{self._shell.execution_count}]"
        values = {name: space[name] for name in names}
        results = self.toolchain.session.run("\n" + cell, values, outputs, name=label)
        for name, value in results.items():
            if name in space and name not in names and space[name] is not self._given.get(name, self):
                print(f"note: --out {name} replaces the notebook's own {name} ({type(space[name]).__name__})")
            space[name] = self._given[name] = value


def parse_line(line: str) -> tuple[list[str], list[str], bool]:
    """(names to copy in, names to copy out, fresh) of a `%%toolchain` line; raises ToolchainError with the usage."""
    names: list[str] = []
    outputs: list[str] = []
    target, fresh = names, False
    for word in line.partition("#")[0].replace(",", " ").split():
        if word == "--out":
            target = outputs
        elif word == "--fresh":
            fresh = True
        elif word.isidentifier():
            target.append(word)
        else:
            raise ToolchainError(f"%%toolchain does not know {word!r}. Usage:\n{USAGE}")
    if target is outputs and not outputs:
        raise ToolchainError(f"--out needs at least one name. Usage:\n{USAGE}")
    return names, outputs, fresh
