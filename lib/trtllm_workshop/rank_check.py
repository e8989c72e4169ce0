"""Reads a script that several ranks run and points at what only shows as a hang, or as text printed several times.

A script counts as one of several ranks when it asks for its rank: OMPI_COMM_WORLD_RANK, mpi_rank(), Get_rank() and the like.
The cause behind it: every rank has to take part in every step, in the same order (users' thread NVIDIA/TensorRT-LLM 456).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.python_check import blank_magics

_RANK_VARIABLES = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK"}
_RANK_CALLS = {"mpi_rank", "Get_rank", "get_rank"}
_TOGETHER = {"allreduce", "allgather", "all_reduce", "all_gather", "broadcast", "barrier", "generate"}
_SHOWN = {"print", "display"}


def check_rank_code(source: str) -> list[Problem]:
    """Problems of a script that runs once a rank; none for one that never asks for its rank.

    Found are prints outside of ``if rank == 0``, a rank that leaves before the others exchange something, and exchanges
    (allreduce, allgather, broadcast, barrier, generate) that only some ranks come to. Raises SyntaxError for text that is
    not Python.
    """
    tree = ast.parse(blank_magics(source))
    names = _rank_names(tree)
    if not names:
        return []
    found = list(_Reader(frozenset(names)).block(tree.body, everybody=True, first=False))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += _Reader(frozenset(names)).block(node.body, everybody=True, first=False)
    return found


def _rank_names(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _asks_for_rank(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None and _asks_for_rank(node.value):
            names |= {node.target.id} if isinstance(node.target, ast.Name) else set()
    return names


def _asks_for_rank(value: ast.expr) -> bool:
    for node in ast.walk(value):
        if isinstance(node, ast.Constant) and node.value in _RANK_VARIABLES:
            return True
        if isinstance(node, ast.Call) and _called(node) in _RANK_CALLS:
            return True
    return False


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


@dataclass(frozen=True)
class _Reader:
    names: frozenset[str]

    def block(self, body: Sequence[ast.stmt], everybody: bool, first: bool) -> Iterator[Problem]:
        """Statements in order; `everybody`: all ranks come here, `first`: only rank 0 does."""
        for position, statement in enumerate(body):
            if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue  # read for itself, where it stands
            if isinstance(statement, ast.If) and (chosen := self._chosen(statement.test)) is not None:
                yield from self.block(statement.body, False, chosen)
                yield from self.block(statement.orelse, False, not chosen)
                yield from self._leaves(statement, body[position + 1 :])
                continue
            inner = [part for name in ("body", "orelse", "finalbody") for part in getattr(statement, name, [])]
            inner += [part for handler in getattr(statement, "handlers", []) for part in handler.body]
            for call in _calls_of(statement):
                yield from self._call(call, everybody, first)
            yield from self.block(inner, everybody, first)

    def _chosen(self, test: ast.expr) -> bool | None:
        """True for a test that rank 0 alone passes, False for one that all but rank 0 pass, None for any other."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            inner = self._chosen(test.operand)
            return None if inner is None else not inner
        if isinstance(test, ast.Name) and test.id in self.names:
            return False
        if isinstance(test, ast.Compare) and isinstance(test.left, ast.Name) and test.left.id in self.names:
            right = test.comparators[0]
            if isinstance(right, ast.Constant) and right.value in (0, "0"):
                if isinstance(test.ops[0], (ast.NotEq, ast.Gt, ast.IsNot)):
                    return False
                return True if isinstance(test.ops[0], (ast.Eq, ast.Is)) else None
        return None

    def _leaves(self, statement: ast.If, after: Sequence[ast.stmt]) -> Iterator[Problem]:
        later = next((call for part in after for call in _all_calls(part) if _called(call) in _TOGETHER), None)
        if later is None:
            return
        for branch in (statement.body, statement.orelse):
            if branch and (
                isinstance(branch[-1], (ast.Return, ast.Continue, ast.Break, ast.Raise)) or _exits(branch[-1])
            ):
                message = (
                    f"line {branch[-1].lineno}: some ranks leave here, and the others wait for them in "
                    f"{_called(later)}() of line {later.lineno}"
                )
                yield error(message, "let every rank come to the exchange, and choose by rank only what is shown")

    def _call(self, call: ast.Call, everybody: bool, first: bool) -> Iterator[Problem]:
        name = _called(call)
        if name in _TOGETHER and not everybody:
            who = "only rank 0 comes" if first else "rank 0 does not come"
            message = f"line {call.lineno}: {who} to {name}(), and those that wait there would hang"
            yield error(message, "call it on every rank, outside of the test for the rank")
        elif (name in _SHOWN or ast.unparse(call.func) == "sys.stdout.write") and not first:
            message = f"line {call.lineno}: {name}() on other ranks than 0 shows the same text several times"
            yield warning(message, "write: if rank == 0: print(...)")


def _calls_of(statement: ast.stmt) -> Iterator[ast.Call]:
    """Calls of the statement itself, without those of the statements inside it."""
    waiting: list[ast.AST] = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt)]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.Lambda)):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting.extend(ast.iter_child_nodes(node))


def _all_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    return (node for node in ast.walk(statement) if isinstance(node, ast.Call))


def _exits(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and _called(statement.value) == "exit"
    )
