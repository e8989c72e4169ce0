"""Runs the ranks of one program as threads and says when they would hang: a rehearsal without processes or networks.

Real ranks that disagree about the next exchange wait for ever, which says nothing about the reason. Here every exchange is
compared before anybody waits: a rank that has ended, or that came to another exchange or brings another shape, is named.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Result = TypeVar("Result")


class WouldHang(RuntimeError):
    """Ranks that would wait for each other for ever; the message names the ranks and the exchanges."""


@dataclass
class _Meeting:
    """What all ranks share: who waits where, who has ended, and how many exchanges each rank has begun."""

    size: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    waiting: dict[int, tuple[str, Any]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    answers: dict[int, Any] = field(default_factory=dict)
    verdict: str = ""

    def exchange(self, rank: int, kind: str, value: Any) -> Any:
        with self.changed:
            self.counts[rank] = self.counts.get(rank, 0) + 1
            self.waiting[rank] = (kind, value)
            self._settle()
            while rank not in self.answers and not self.verdict:
                self.changed.wait()
            if self.verdict:
                raise WouldHang(self.verdict)
            return self.answers.pop(rank)

    def end(self, rank: int, how: str) -> None:
        with self.changed:
            self.ended[rank] = how
            self._settle()

    def _settle(self) -> None:
        """Once no rank can go on by itself: give everybody the answer, or say why there is none."""
        if self.verdict or not self.waiting or len(self.waiting) + len(self.ended) < self.size:
            return
        kinds = {_named(kind, value) for kind, value in self.waiting.values()}
        if self.ended or len(kinds) > 1:
            self.verdict = self._reason()
        else:
            (kind,) = {kind for kind, _ in self.waiting.values()}
            values = [self.waiting[rank][1] for rank in range(self.size)]
            self.answers = {rank: _answer(kind, values) for rank in range(self.size)}
            self.waiting.clear()
        self.changed.notify_all()

    def _reason(self) -> str:
        waits = [
            f"rank {rank} waits in its exchange {self.counts[rank]}, {_named(kind, value)}"
            for rank, (kind, value) in sorted(self.waiting.items())
        ]
        ends = [
            f"rank {rank} {how} after {self.counts.get(rank, 0)} exchanges" for rank, how in sorted(self.ended.items())
        ]
        return (
            f"the ranks would wait for ever: {'; '.join(waits + ends)}. Every rank has to make the same exchanges in the "
            "same order"
        )


def _named(kind: str, value: Any) -> str:
    shape = getattr(value, "shape", None)
    return kind if shape is None else f"{kind} of shape {list(shape)}"


def _answer(kind: str, values: list[Any]) -> Any:
    if kind == "barrier":
        return None
    if kind == "broadcast":
        return values[0]
    if kind == "allgather":
        import torch

        return torch.cat(values, dim=-1)
    total = values[0]
    for value in values[1:]:
        total = total + value  # never in place: every rank still holds its own tensor
    return total


@dataclass(frozen=True)
class RehearsedRank:
    """One rank's connection to the others; an engine's `communicator` too.

    Raises WouldHang from any exchange that the other ranks will not take part in.
    """

    rank: int
    size: int
    _meeting: _Meeting = field(repr=False)
    capturable: bool = False

    def allreduce(self, x: Any) -> Any:
        """The sum of all ranks' `x` (tensors of one shape, or numbers)."""
        return self._meeting.exchange(self.rank, "allreduce", x)

    def allgather(self, x: Any) -> Any:
        """[..., n] of each rank -> [..., ranks * n], side by side in the order of the ranks."""
        return self._meeting.exchange(self.rank, "allgather", x)

    def broadcast(self, value: Any = None) -> Any:
        """What rank 0 gives; the others' value is not looked at, but they have to call it."""
        return self._meeting.exchange(self.rank, "broadcast", _Sent(value))[0]

    def barrier(self) -> None:
        """Nobody goes on before all ranks are here."""
        self._meeting.exchange(self.rank, "barrier", None)


class _Sent(tuple[Any]):
    """A broadcast's value, whose shape does not matter: only rank 0's counts."""

    def __new__(cls, value: Any) -> _Sent:
        return super().__new__(cls, (value,))


def rehearse(program: Callable[[RehearsedRank], Result], size: int) -> list[Result]:
    """What `program(rank)` returns on each of `size` ranks, which run side by side.

    Raises:
        WouldHang: when a rank waits for one that has ended, that raised an error, or that is at another exchange.
        Exception: what a rank raised, when no other rank waited for it.
    """
    if size < 1:
        raise ValueError(f"{size} ranks cannot be rehearsed: give 1 or more")
    meeting = _Meeting(size)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = program(RehearsedRank(rank, size, meeting))
            meeting.end(rank, "ended")
        except BaseException as error:  # a thread's error would be lost
            errors[rank] = error
            meeting.end(rank, f"raised {type(error).__name__} ({error})")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    hangs = [error for error in errors.values() if isinstance(error, WouldHang)]
    own = [error for error in errors.values() if not isinstance(error, WouldHang)]
    if hangs:
        raise hangs[0] from (own[0] if own else None)
    if own:
        raise own[0]
    return [results[rank] for rank in range(size)]
