"""Checks calls of the tensorrt_llm package in Python source against the recorded signatures, without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from trtllm_workshop.api_facts import ENGINE_LLM, PYTORCH_LLM, Signature, apis, find_api
from trtllm_workshop.problem import Problem, error, warning
from trtllm_workshop.sampling_check import check_sampling

ENGINE_IMPORT = "from tensorrt_llm._tensorrt_engine import LLM"
SISTERS = {
    PYTORCH_LLM: ENGINE_LLM,
    ENGINE_LLM: PYTORCH_LLM,
    "ModelRunner.from_dir": "ModelRunnerCpp.from_dir",
    "ModelRunner.generate": "ModelRunnerCpp.generate",
    "ModelRunnerCpp.from_dir": "ModelRunner.from_dir",
    "ModelRunnerCpp.generate": "ModelRunner.generate",
}
METHODS_OF = {PYTORCH_LLM: "LLM", ENGINE_LLM: "LLM"}


def blank_magics(source: str) -> str:
    """The source with IPython's ``%magic`` and ``!command`` lines turned into ``pass``, line numbers kept."""
    try:
        ast.parse(source)
        return source  # nothing to blank; a line may start with % because it continues a formula
    except SyntaxError:
        pass
    lines = source.split("\n")
    continued = False
    for number, line in enumerate(lines):
        bare = line.lstrip()
        if continued or bare.startswith(("%", "!")):
            lines[number] = "" if continued or bare.startswith("%%") else line[: len(line) - len(bare)] + "pass"
            continued = line.rstrip().endswith("\\")
    return "\n".join(lines)


def check_python(source: str) -> list[Problem]:
    """Problems in the calls of names that come from ``tensorrt_llm``: unknown keywords (with the nearest real one),
    arguments of the other backend, missing required ones, positional ones where only keywords are taken.

    Cells that share a process may be given together, joined by newlines. Text that is not Python raises SyntaxError.
    """
    return _Checker().check(ast.parse(blank_magics(source)))


class _Checker:
    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # local name -> dotted name inside tensorrt_llm
        self.objects: dict[str, str] = {}  # variable -> class it is an instance of

    def check(self, tree: ast.Module) -> list[Problem]:
        found: list[Problem] = []
        for node in _in_order(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == "tensorrt_llm":
                        self.names[alias.asname or "tensorrt_llm"] = alias.name if alias.asname else "tensorrt_llm"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tensorrt_llm":
                for alias in node.names:
                    self.names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    self._remember(target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
                self._remember(node.target, node.value)
            elif isinstance(node, (ast.With, ast.AsyncWith)):
                for item in node.items:
                    if item.optional_vars is not None:
                        self._remember(item.optional_vars, item.context_expr)
            elif isinstance(node, ast.Call) and (signature := self._signature(node.func)) is not None:
                found.extend(_check_call(node, signature))
        return found

    def _dotted(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.names.get(node.id)
        if isinstance(node, ast.Attribute):
            base = self._dotted(node.value)
            return None if base is None else f"{base}.{node.attr}"
        return None

    def _class_of(self, node: ast.expr) -> str | None:
        """The class that an expression makes, for ``LLM(…)`` and ``ModelRunner.from_dir(…)``."""
        if isinstance(node, ast.Await):
            return self._class_of(node.value)
        if not isinstance(node, ast.Call) or (dotted := self._dotted(node.func)) is None:
            return None
        if dotted.endswith(".from_dir"):
            return dotted.removesuffix(".from_dir").split(".")[-1]
        signature = find_api(dotted)
        return signature.name if signature is not None and signature.kind == "class" else None

    def _remember(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name):
            made = self._class_of(value)
            if made is None:
                self.objects.pop(target.id, None)
            else:
                self.objects[target.id] = made

    def _signature(self, func: ast.expr) -> Signature | None:
        dotted = self._dotted(func)
        if dotted is not None:
            return find_api(dotted)
        if isinstance(func, ast.Attribute):
            owner = self.objects.get(func.value.id) if isinstance(func.value, ast.Name) else self._class_of(func.value)
            if owner is not None:
                signature = apis().get(f"{METHODS_OF.get(owner, owner)}.{func.attr}")
                if signature is not None and signature.only_on not in (None, owner):
                    return Signature(f"{owner} has no {func.attr}", "missing")
                return signature
        return None


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes in the order they run: an assignment's value is seen before its target is remembered."""
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
        for child in children:
            yield from _in_order(child)
        yield node
    else:
        yield node
        for child in children:
            yield from _in_order(child)


def _check_call(node: ast.Call, signature: Signature) -> Iterator[Problem]:
    where = f"line {node.lineno}: "
    if signature.kind == "missing":
        yield error(f"{where}{signature.name}(): it is the PyTorch class", f"for engines write {ENGINE_IMPORT}")
        return
    short = signature.name.split(".")[-1] if signature.kind == "class" else signature.name
    starred = any(isinstance(arg, ast.Starred) for arg in node.args)
    if len(node.args) > len(signature.positional) and not starred:
        limit = len(signature.positional)
        message = f"{where}{short}() takes {limit} positional arguments at most, {len(node.args)} are given"
        yield error(message, "give the arguments by name" if limit else "it takes keywords only")
    given = set(signature.positional[: len(node.args)])
    for keyword in node.keywords:
        if keyword.arg is None:
            starred = True
            continue
        given.add(keyword.arg)
        yield from _check_keyword(where, short, keyword.arg, signature)
    missing = [p.name for p in signature.parameters.values() if p.required and p.name not in given]
    if missing and not starred:
        yield error(f"{where}{short}() needs {', '.join(missing)}", f"pass {missing[0]}=…")
    if signature.name == "SamplingParams":
        for problem in [] if starred else _check_sampling_literals(node, signature):
            yield Problem(problem.severity, where + problem.message, problem.fix)


def _check_sampling_literals(node: ast.Call, signature: Signature) -> list[Problem]:
    """Checks of the values; a value that is only known in the run leaves all of them to the run."""
    values: dict[str, object] = {}
    for keyword in node.keywords:
        try:
            if keyword.arg is not None and keyword.arg in signature.parameters:
                values[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError:
            return []
    return check_sampling(**values)


def _check_keyword(where: str, short: str, keyword: str, signature: Signature) -> Iterator[Problem]:
    parameter = signature.parameters.get(keyword)
    if parameter is not None:
        if parameter.status == "deprecated":
            yield warning(f"{where}{keyword} of {short}() is deprecated in 1.2.1", "leave it out")
        return
    if keyword in signature.extra_keywords or signature.open_keywords:
        return
    sister = apis().get(SISTERS.get(signature.name, ""))
    if keyword in signature.later:
        fix = "leave it out: it was seen only in later releases"
    elif sister is not None and keyword in sister.keywords:
        fix = f"only {sister.name} takes it" if sister.kind == "method" else _other_backend(sister)
    else:
        fix = f"did you mean {signature.nearest(keyword)}?" if signature.keywords else "it takes no arguments"
    yield error(f"{where}{short}() has no argument {keyword}", fix)


def _other_backend(sister: Signature) -> str:
    if sister.name == ENGINE_LLM:
        return f"only the engine class takes it: {ENGINE_IMPORT}"
    return "only the PyTorch class takes it: from tensorrt_llm import LLM"
