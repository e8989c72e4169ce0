"""One finding about a command line, a Python cell or a set of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Problem:
    """What is wrong (`message`) and the one thing to do about it (`fix`).

    An "error" would stop the command or give a wrong result; a "warning" runs, but does not do what it seems to.
    """

    severity: Literal["error", "warning"]
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}" + (f" -> {self.fix}" if self.fix else "")


def error(message: str, fix: str = "") -> Problem:
    return Problem("error", message, fix)


def warning(message: str, fix: str = "") -> Problem:
    return Problem("warning", message, fix)
