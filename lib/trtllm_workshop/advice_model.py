"""What an advice rule gets and gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Advice:
    """Why it failed, the one thing to do, and the row of the pain-point list it comes from."""

    cause: str
    fix: str
    row: str = ""

    def __str__(self) -> str:
        return f"{self.cause}. To do: {self.fix}"


@dataclass(frozen=True)
class Context:
    """The output, exit code and command line of a process that failed; `count_gpus` is asked only where it matters."""

    text: str
    returncode: int | None = None
    command: str | None = None
    count_gpus: Callable[[], int | None] = lambda: None

    def search(self, pattern: str) -> re.Match[str] | None:
        """The first match of the pattern in the output, over line ends."""
        return re.search(pattern, self.text, re.DOTALL)

    @property
    def launched_ranks(self) -> int | None:
        """The number of ranks asked of mpirun, from the command line or from its echo in the output."""
        for source in (self.command or "", self.text):
            match = re.search(r"\b(?:mpirun|mpiexec|srun)\b[^\n]*?\s(?:-n|-np|--np|--ntasks)[ =](\d+)", source)
            if match:
                return int(match.group(1))
        return None

    @property
    def server(self) -> str:
        """What started a server, with its flags: from the command line or, without one, from the output; empty for others."""
        pattern = r"\b(?:trtllm-serve|tritonserver)\b" + (r"[^\n]*" if self.command is None else r".*")
        match = re.search(pattern, self.text if self.command is None else self.command, re.DOTALL)
        return match.group(0) if match else ""


Rule = Callable[[Context], Advice | None]
