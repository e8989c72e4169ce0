"""`--visualize_network`: the captured graph as an ONNX file, for Netron or any ONNX reader.

Only structure is written: one node per operator, with its inputs, outputs and constant arguments, and the shapes of the
weights as inputs. There are no weights in it, and it is meant for looking, not for running.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

_KINDS = {torch.float32: 1, torch.int32: 6, torch.int64: 7, torch.float16: 10, torch.bfloat16: 16}  # onnx.TensorProto
IR_VERSION, OPSET = 10, 21


def _value_info(name: str, value: torch.Tensor) -> Any:
    from onnx import helper

    shape = [d if isinstance(d, int) else str(d) for d in value.shape]
    return helper.make_tensor_value_info(name, _KINDS[value.dtype], shape)


def network_model(program: torch.export.ExportedProgram) -> Any:
    """The graph as an `onnx.ModelProto`; operators keep their PyTorch names, in the domain of their namespace."""
    from onnx import helper

    nodes, inputs, outputs, domains = [], [], [], set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            inputs.append(_value_info(node.name, node.meta["val"]))
        elif node.op == "call_function":
            namespace, _, operator = str(node.target).partition(".")
            domain, operator = (namespace, operator) if operator else ("python", node.target.__name__)
            domains.add(domain)
            names = [n.name for n in node.all_input_nodes]
            constants: dict[str, Any] = {
                f"arg{i}": a
                for i, a in enumerate(node.args)
                if isinstance(a, int | float | str) and not isinstance(a, bool)
            }
            nodes.append(helper.make_node(operator, names, [node.name], name=node.name, domain=domain, **constants))
        elif node.op == "output":
            outputs = [_value_info(n.name, n.meta["val"]) for n in node.all_input_nodes]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs)
    opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in sorted(domains))]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="trtllm-workshop")


def save_network(program: torch.export.ExportedProgram, folder: Path, rank: int = 0) -> Path:
    """Write `rank{rank}.onnx` into a folder, under a temporary name first; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"rank{rank}.onnx"
    temporary = target.with_suffix(".onnx.writing")
    temporary.write_bytes(network_model(program).SerializeToString())
    os.replace(temporary, target)
    return target
