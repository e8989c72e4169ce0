"""Reads the network that ``trtllm-build --visualize_network`` wrote: an ONNX file with the operators, without weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LAYER = re.compile(r"layers[._/](\d+)[._/](\w[\w./]*)")
# Operator names of PyTorch graphs, in plain words; others keep their own name.
_WORDS = {
    "linear": "matrix product",
    "rms_norm": "RMSNorm",
    "gpt_attention": "attention",
    "chunk": "split",
    "silu": "SiLU",
    "mul": "multiply",
    "add": "add",
    "embedding": "embedding",
    "index_select": "pick rows",
}
_PASSED_THROUGH = ("getitem",)  # takes one result of an operator that has several: no work of its own


@dataclass(frozen=True)
class Step:
    """One operator of a layer: its name, the weight that it reads ('' for none), and the steps that feed it.

    ``sources`` are positions in the list of steps; -1 stands for the layer's input.
    """

    operator: str
    weight: str
    sources: tuple[int, ...]


def find_network(folder: str | Path) -> Path:
    """The ONNX file in a folder (that of rank 0 when there are several). Raises FileNotFoundError with the remedy."""
    files = sorted(Path(folder).glob("*.onnx"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .onnx file: build again with --visualize_network {folder}")
    return files[0]


def load_network(path: str | Path) -> Any:
    """The graph of an ONNX file (``onnx.GraphProto``), without external weights."""
    import onnx

    return onnx.load(str(path), load_external_data=False).graph


def operator_name(node: Any) -> str:
    """An operator's kind in plain words."""
    name = node.op_type.split(".")[0]
    return _WORDS.get(name, name)


def operators(graph: Any) -> Counter[str]:
    """How many operators of each kind the graph has."""
    return Counter(operator_name(node) for node in graph.node if node.op_type not in _PASSED_THROUGH)


def layer_steps(graph: Any, layer: int = 0) -> list[Step]:
    """The operators of one decoder layer in order; an empty list when the names do not tell layers apart.

    A layer begins with the first operator that reads one of its weights. It ends before the first operator, after the
    last one of those, that reads a weight or an input of the graph.
    """
    given = {value.name for value in graph.input} | {value.name for value in graph.initializer}

    def own_weight(node: Any) -> str:
        for name in node.input:
            match = _LAYER.search(name)
            if name in given and match and int(match.group(1)) == layer:
                short = re.sub(r"[._/](weight|bias)$", "", match.group(2))
                return re.sub(r"^(attention|mlp)[._/]", r"\1.", short)
        return ""

    nodes = list(graph.node)
    own = [place for place, node in enumerate(nodes) if own_weight(node)]
    if not own:
        return []
    end = own[-1] + 1
    while end < len(nodes) and not given & set(nodes[end].input):
        end += 1
    numbers: dict[str, int] = {}
    steps: list[Step] = []
    for node in nodes[own[0] : end]:
        inside = dict.fromkeys(numbers[name] for name in node.input if name in numbers)
        if node.op_type in _PASSED_THROUGH and inside:
            numbers.update(dict.fromkeys(node.output, next(iter(inside))))
            continue
        outside = [name for name in node.input if name not in given and name not in numbers]
        # Only the hidden states enter a layer from outside; tables such as rotary positions are shared by all layers.
        hidden = own[0] == nodes.index(node) or (bool(outside) and set(outside) & set(nodes[own[0]].input))
        sources = ((-1,) if hidden else ()) + tuple(inside)
        numbers.update(dict.fromkeys(node.output, len(steps)))
        steps.append(Step(operator_name(node), own_weight(node), sources))
    return steps
