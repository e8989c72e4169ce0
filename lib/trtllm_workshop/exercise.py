"""The verdict on an exercise's answer: not answered yet, right, or wrong with a text that teaches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

OPEN, RIGHT, WRONG = "open", "right", "wrong"


class ExerciseFailed(AssertionError):
    """A solution cell of the course does not pass its own check."""


@dataclass(frozen=True)
class Verdict:
    state: str
    message: str


def unanswered(answer: object) -> bool:
    """True for None, ``...`` and containers or texts that still hold the placeholder of the exercise cell."""
    if answer is None or answer is Ellipsis:
        return True
    if isinstance(answer, str):
        return answer.strip() in ("", "...", "…")
    if isinstance(answer, Mapping):
        return not answer or any(unanswered(value) for value in answer.values())
    if isinstance(answer, list | tuple | set):
        return any(item is None or item is Ellipsis for item in answer)
    return False


def judge(answer: Any, check: Callable[[Any], Any] | Any, tolerance: float = 0.01) -> Verdict:
    """Compares ``answer`` with a value, or asks a callable.

    A callable returns True, False, a text (wrong, and why) or ``(ok, text)``, or raises AssertionError with the text.
    A number is right within ``tolerance`` (relative). Any other error of the callable is reported as a wrong answer,
    since answers of a surprising type cause it; a callable that returns None is a mistake of the course: TypeError.
    """
    if unanswered(answer):
        return Verdict(OPEN, "")
    if not callable(check):
        return _compare(answer, check, tolerance)
    try:
        result = check(answer)
    except AssertionError as problem:
        return Verdict(WRONG, str(problem) or "That is not it yet.")
    except Exception as problem:
        kind = type(answer).__name__
        return Verdict(WRONG, f"Your answer ({kind}) could not be checked: {type(problem).__name__}: {problem}")
    if result is None:
        raise TypeError("the check of this exercise returned None; it must return True, False or a text that explains")
    if isinstance(result, tuple):
        ok, message = result
        return Verdict(RIGHT if ok else WRONG, str(message))
    if isinstance(result, str):
        return Verdict(WRONG, result)
    return Verdict(RIGHT, "") if bool(result) else Verdict(WRONG, "That is not it yet.")


def _compare(answer: Any, expected: Any, tolerance: float) -> Verdict:
    number = isinstance(expected, int | float) and not isinstance(expected, bool)
    if number:
        value = answer.item() if hasattr(answer, "item") else answer
        if isinstance(value, bool) or not isinstance(value, int | float):
            return Verdict(WRONG, f"The answer should be a number; yours is {type(answer).__name__}.")
        if math.isclose(value, expected, rel_tol=tolerance):
            return Verdict(RIGHT, "")
        if expected and value and value / expected > 0:
            return Verdict(WRONG, f"Your {value:,.6g} is {value / expected:.3g} times the right value.")
        return Verdict(WRONG, f"{value:,.6g} is not the right value.")
    if type(answer) is not type(expected):
        wanted, got = type(expected).__name__, type(answer).__name__
        return Verdict(WRONG, f"The answer should be of type {wanted}; yours is {got}.")
    return Verdict(RIGHT, "") if answer == expected else Verdict(WRONG, f"{answer!r} is not it yet.")
