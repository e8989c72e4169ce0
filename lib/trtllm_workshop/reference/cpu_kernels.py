"""Faster matrix products on processors: oneDNN's packed float32 weights, and when 16-bit weights are worth reading.

oneDNN can lay a weight matrix out once in the order its kernels read it. With a handful of rows, which is what a step of
the generation phase has, that saves a good part of the time of a plain product (benchmarks/generate.py measures it).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule

Run = Callable[..., torch.Tensor]

# Rows that the packed layout is tuned for; it stays correct, and as fast as the plain one, for any other number.
PACK_ROWS = 8


def pack_linear_weights(module: GraphModule) -> GraphModule:
    """Replace every float32 linear of a graph by oneDNN's packed one; the plain weights are dropped as it goes.

    Returns the module unchanged where PyTorch was built without oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return module
    packed: dict[str, str] = {}
    for node in list(module.graph.nodes):
        if node.target is not torch.ops.aten.linear.default or node.args[1].op != "get_attr":
            continue
        x, weight = node.args[:2]
        bias = node.args[2] if len(node.args) > 2 else None
        name = str(weight.target)
        if name not in packed:
            packed[name] = f"packed_{len(packed)}"
            owner, _, last = name.rpartition(".")
            parent = module.get_submodule(owner)
            tensor = getattr(parent, last)
            module.register_buffer(
                packed[name], torch.ops.mkldnn._reorder_linear_weight(tensor, PACK_ROWS), persistent=False
            )
        with module.graph.inserting_before(node):
            source = module.graph.get_attr(packed[name])
            arguments = (x, source, bias, "none", [], "")
            node.replace_all_uses_with(
                module.graph.call_function(torch.ops.mkldnn._linear_pointwise.default, arguments)
            )
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    for name in packed:
        owner, _, last = name.rpartition(".")
        parent = module.get_submodule(owner) if has_submodule(module, owner) else None
        if parent is not None and hasattr(parent, last):
            delattr(parent, last)
    module.recompile()
    return module


def has_submodule(module: GraphModule, name: str) -> bool:
    """Whether a dotted name still leads to a submodule."""
    return not name or name in dict(module.named_modules())


def widens(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether 16-bit weights are also kept as float32: on processors without 16-bit matrix instructions."""
    if device.type != "cpu" or dtype == torch.float32:
        return False
    native = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return not getattr(torch.ops.mkldnn, native)()


def choose_by_tokens(narrow: Run, wide: Run) -> Run:
    """Run a step of one token with the 16-bit weights, any other with their float32 copy.

    One token reads every weight for two operations, so the smaller weights win on any processor; from two tokens on, a
    processor without 16-bit matrix instructions is faster in float32. The weights have the same values, sums are wider.
    """

    def run(input_ids: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return (narrow if input_ids.numel() == 1 else wide)(input_ids, *rest)

    return run
