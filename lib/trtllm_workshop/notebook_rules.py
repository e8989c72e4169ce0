"""The rules about a lesson's content: order of cells, parameters, safety of code cells, links, alternative texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trtllm_workshop.parameters import ParameterProblem, declared, tags

STANDARD_PARAMETERS = ("toolchain", "model", "work_dir", "profile")
MULTI_GPU = ("mpi4py", "torch.distributed", "torch.multiprocessing", "deepspeed", "accelerate")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_IMAGE_TAG = re.compile(r"<img\b[^>]*>", re.IGNORECASE)
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """One deviation: ``where`` is the file and cell; ``fixable`` when ``--fix`` repairs it."""

    where: str
    message: str
    fixable: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.message}" + (" [--fix repairs this]" if self.fixable else "")


def check_rules(notebook: Mapping[str, Any], path: Path) -> list[Finding]:
    """Every finding about content. ``path`` is where the notebook lies, for its links."""
    found = [Finding(str(path), message) for message in _order(notebook["cells"])]
    try:
        names = declared(notebook, path.name)
        missing = [name for name in STANDARD_PARAMETERS if name not in names]
        if missing:
            found.append(
                Finding(str(path), f"the parameters cell lacks {', '.join(missing)}, which every notebook has")
            )
    except (ParameterProblem, SyntaxError) as error:
        found.append(Finding(str(path), str(error)))
    for index, cell in enumerate(notebook["cells"]):
        check = _code if cell["cell_type"] == "code" else _markdown
        found += [Finding(f"{path}, cell {index}", message) for message in check(cell["source"], path)]
    return found


def _order(cells: list[dict[str, Any]]) -> Iterator[str]:
    """The order of notebook cells that every lesson follows."""
    if not cells or cells[0]["cell_type"] != "markdown" or not cells[0]["source"].startswith("# "):
        yield "the first cell must be Markdown and start with the title ('# ...')"
    titles = [
        i for i, c in enumerate(cells) if c["cell_type"] == "markdown" and re.search(r"(?m)^# ", _plain(c["source"]))
    ]
    if len(titles) > 1:
        yield f"cells {titles} have a top-level heading ('# '); only the title has one, sections use '## '"
    code = [(index, cell) for index, cell in enumerate(cells) if cell["cell_type"] == "code"]
    for place, name in enumerate(("bootstrap", "parameters", "validate")):
        tagged = [index for index, cell in code if name in tags(cell)]
        if len(tagged) != 1:
            yield f"{len(tagged)} code cells are tagged {name!r}; there must be exactly one"
        elif code[place][0] != tagged[0]:
            ordinal = ("first", "second", "third")[place]
            yield f"cell {tagged[0]} is tagged {name!r}, but the {ordinal} code cell (cell {code[place][0]}) must be that one"
    begins = [index for index, cell in code if "validate" in tags(cell) and "course.begin(" not in cell["source"]]
    if begins:
        yield f"cell {begins[0]} is tagged 'validate' but does not call course.begin(...)"
    yield from _exercises(cells)
    yield from _ending(cells)
    for index, cell in code:
        if "skip-execution" in tags(cell):
            yield f"cell {index} is tagged 'skip-execution'; every cell of a lesson runs"


def _exercises(cells: list[dict[str, Any]]) -> Iterator[str]:
    for index, cell in enumerate(cells):
        following = [cells[index + step] if index + step < len(cells) else {} for step in (1, 2)]
        if "exercise" in tags(cell):
            hint, solution = following
            if hint.get("cell_type") != "markdown" or "<details" not in hint["source"]:
                yield f"cell {index} is an exercise; the cell after it must be a collapsed hint (Markdown with <details>)"
            elif solution.get("cell_type") != "code" or "solution" not in tags(solution):
                yield f"cell {index} is an exercise; after its hint (cell {index + 1}) comes a code cell tagged 'solution'"
        before = cells[index - 2] if index > 1 else {}
        if "solution" in tags(cell) and "exercise" not in tags(before):
            yield f"cell {index} is a solution without an exercise and a hint right before it"


def _ending(cells: list[dict[str, Any]]) -> Iterator[str]:
    places = [index for index, cell in enumerate(cells) if "checkpoint" in tags(cell)]
    if len(places) != 1 or cells[places[0]]["cell_type"] != "code":
        yield f"{len(places)} code cells are tagged 'checkpoint'; there must be exactly one"
        return
    if "lesson.checkpoint()" not in cells[places[0]]["source"]:
        yield f"cell {places[0]} is tagged 'checkpoint' but does not call lesson.checkpoint()"
    late = [i for i, cell in enumerate(cells) if i > places[0] and {"exercise", "solution"} & set(tags(cell))]
    if late:
        yield f"cell {late[0]} is an exercise or solution behind the checkpoint (cell {places[0]})"
    after = [_plain(cell["source"]) for cell in cells[places[0] :] if cell["cell_type"] == "markdown"]
    headings = [line.lower() for text in after for line in text.splitlines() if line.startswith("#")]
    for wanted in ("when it goes wrong", "clean up"):
        if not any(wanted in heading for heading in headings):
            yield f"behind the checkpoint there is no section '{wanted.capitalize()} ...'"


def _plain(source: str) -> str:
    return _CODE.sub("", source)


def _code(source: str, path: Path) -> Iterator[str]:
    """Problems of one code cell, by where its body runs: the kernel, the toolchain's child, or a file."""
    first, _, body = source.partition("\n")
    magic = first.split()[0] if first.startswith("%%") else ""
    if magic == "%%writefile":
        yield from _script(body) if first.split()[-1].endswith(".py") else ()
        return
    if magic and magic not in ("%%toolchain", "%%time", "%%capture"):
        return
    tree = _parse(body if magic else source)
    if tree is None:
        yield "the cell is not valid Python"
        return
    in_kernel = magic != "%%toolchain"
    for module in sorted(_imports(tree)):
        if module.split(".")[0] == "mpi4py" or (in_kernel and module.startswith(MULTI_GPU)):
            yield f"imports {module}: code for several processes or GPUs belongs in a script run by sh(...), not in a kernel"
        elif in_kernel and module.split(".")[0] == "tensorrt_llm":
            yield f"imports {module} in the kernel; TensorRT-LLM's Python runs in %%toolchain cells"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from _call(node, in_kernel)
        elif isinstance(node, ast.Name) and node.id == "SystemExit":
            yield "uses SystemExit, which ends a run as if it had succeeded"


def _call(node: ast.Call, in_kernel: bool) -> Iterator[str]:
    name = ast.unparse(node.func)
    if name in ("sys.exit", "exit", "quit", "os._exit"):
        yield f"calls {name}(), which ends a run as if it had succeeded"
    if not in_kernel:
        return
    if name.split(".")[-1] in ("DataParallel", "DistributedDataParallel", "spawn") or name == "os.fork":
        yield f"calls {name}(): code for several processes or GPUs belongs in a script run by sh(...), not in a kernel"
    if name == "plt.show":
        yield "calls plt.show(); use lesson.show(figure, name, alt), which keeps the figure and its alternative text"
    if name == "lesson.show":
        alt = next(
            (word.value for word in node.keywords if word.arg == "alt"), node.args[2] if len(node.args) > 2 else None
        )
        if alt is None or (isinstance(alt, ast.Constant) and not str(alt.value).strip()):
            yield "lesson.show(...) without an alternative text: lesson.show(figure, name, alt=...)"


def _script(body: str) -> Iterator[str]:
    """A script that makes an LLM starts worker processes, which import the script again: it needs a main guard."""
    tree = _parse(body)
    if tree is None:
        yield "the script is not valid Python"
        return
    if not any(isinstance(node, ast.Call) and _is_llm(node) for node in ast.walk(tree)):
        return
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)]
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    open_code = [node for node in tree.body if node not in guards and not isinstance(node, functions)]
    outside = any(isinstance(inner, ast.Call) and _is_llm(inner) for node in open_code for inner in ast.walk(node))
    if not guards or outside:
        yield 'the script creates LLM(...) without a guard; put it under `if __name__ == "__main__":`, or workers hang'


def _is_llm(node: ast.Call) -> bool:
    return ast.unparse(node.func).split(".")[-1] == "LLM"


def _parse(source: str) -> ast.Module | None:
    lines = [line if not line.lstrip().startswith(("%", "!")) else "pass" for line in source.splitlines()]
    try:
        return compile("\n".join(lines), "cell", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)  # type: ignore[return-value]
    except SyntaxError:
        return None


def _imports(tree: ast.Module) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(item.name for item in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{item.name}" for item in node.names)
    return found


def _markdown(source: str, path: Path) -> Iterator[str]:
    text = _plain(source)
    for image, words, target in _LINK.findall(text):
        if image and not words.strip():
            yield f"the image {target[:60]} has no alternative text: ![what it shows](...)"
        yield from _target(target, source, path)
    for image_tag in _IMAGE_TAG.findall(text):
        alt = re.search(r"alt\s*=\s*(\"[^\"]*\"|'[^']*')", image_tag)
        if alt is None or not alt.group(1).strip("\"' "):
            yield f'{image_tag[:60]} has no alternative text (alt="...")'


def _target(target: str, source: str, path: Path) -> Iterator[str]:
    if re.match(r"(https?|mailto|data|attachment):", target):
        return
    name, _, _ = target.partition("#")
    if name and not (path.parent / unquote(name)).exists():
        yield f"the link to {target} leads nowhere"
