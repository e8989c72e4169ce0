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
    """Replace every float32 linear of a graph by oneDNN's packed one; each plain weight is dropped once it is packed.

    Returns the module unchanged where PyTorch was built without oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return module
    linear, packed_linear = torch.ops.aten.linear.default, torch.ops.mkldnn._linear_pointwise.default
    for index, node in enumerate(list(module.graph.find_nodes(op="call_function", target=linear))):
        x, weight, *rest = node.args
        owner, _, name = str(weight.target).rpartition(".")
        plain = getattr(module.get_submodule(owner), name)
        packed = torch.ops.mkldnn._reorder_linear_weight(plain, PACK_ROWS)
        module.register_buffer(f"packed_{index}", packed, persistent=False)
        with module.graph.inserting_before(node):
            source = module.graph.get_attr(f"packed_{index}")
            call = module.graph.call_function(packed_linear, (x, source, rest[0] if rest else None, "none", [], ""))
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
        if not weight.users:
            module.graph.erase_node(weight)
            delattr(module.get_submodule(owner), name)
    module.recompile()
    return module


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
