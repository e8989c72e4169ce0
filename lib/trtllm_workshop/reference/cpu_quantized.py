"""Quantized engines on processors: the graph's quantized products replaced, once at load, by faster equal ones.

FP8: every e4m3 value fits into float32, so the weights are expanded once and the scales are multiplied in afterwards; the
input is still rounded to e4m3 at every product. Expanding at every step instead costs more than the products themselves.
INT8 weight-only: PyTorch has a kernel that reads int8 weights, fast in bfloat16 only and for a few rows; more rows run on
float32 copies. INT4: expanded once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trtllm_workshop.reference.quant_ops import expand_groups

OPS, ATEN = torch.ops.trtllm_workshop, torch.ops.aten
# Up to so many tokens a step the int8 kernel is faster than packed float32 weights (benchmarks/quantized.py measures it).
INT8_TOKENS = 3
# The int8 kernel reads 16 input channels at a time and does not look where a row ends: of other widths it reads what lies behind
# (PyTorch 2.13 returns nonsense or crashes). A rank's part of a matrix easily has such a width.
INT8_CHANNELS = 16


def in_float32(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All floating tensors as float32, e4m3 included; integers stay."""
    return {name: t.float() if t.is_floating_point() else t for name, t in weights.items()}


def in_bfloat16(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All floating tensors but the rotary table as bfloat16; integers stay."""
    return {
        name: t.to(torch.bfloat16) if t.is_floating_point() and not name.endswith("rotary_table") else t
        for name, t in weights.items()
    }


def _tensor(module: GraphModule, node: Any) -> torch.Tensor:
    return operator.attrgetter(str(node.target))(module)


def _replace(module: GraphModule, target: Callable[..., Any], build: Callable[[int, Node], Node]) -> GraphModule:
    """Replace every call of `target` by what `build(index, node)` inserts before it; weights without users go."""
    for index, node in enumerate(list(module.graph.find_nodes(op="call_function", target=target))):
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(build(index, node))
        sources = node.all_input_nodes
        module.graph.erase_node(node)
        for source in sources:
            if source.op == "get_attr" and not source.users:
                owner, _, name = str(source.target).rpartition(".")
                module.graph.erase_node(source)
                delattr(module.get_submodule(owner), name)
    module.recompile()
    return module


def _attribute(module: GraphModule, name: str, value: torch.Tensor) -> Node:
    module.register_buffer(name, value, persistent=False)
    return module.graph.get_attr(name)


def expand_fp8(module: GraphModule) -> GraphModule:
    """Every fp8_linear as: round the input to e4m3, a float32 product with the expanded weight, the scales, the bias.

    The module's weights are those of `in_float32`.
    """
    call = module.graph.call_function

    def build(index: int, node: Node) -> Node:
        x, weight, weight_scale, scale, bias = node.args
        both = _attribute(module, f"fp8_scale_{index}", _tensor(module, weight_scale) * _tensor(module, scale))
        out = call(ATEN.linear.default, (call(OPS.e4m3_round.default, (x, scale)), weight))
        out = call(ATEN.mul.Tensor, (out, both))
        return out if bias is None else call(ATEN.add.Tensor, (out, bias))

    return _replace(module, OPS.fp8_linear.default, build)


def expand_weight_only(module: GraphModule) -> GraphModule:
    """Every weight_only_linear as a float32 product with the expanded weight."""

    def build(index: int, node: Node) -> Node:
        x, weight, scale, bias = node.args
        plain = _tensor(module, weight).float() * _tensor(module, scale)[:, None]
        source = _attribute(module, f"expanded_{index}", plain)
        return module.graph.call_function(ATEN.linear.default, (x, source, bias))

    return _replace(module, OPS.weight_only_linear.default, build)


def use_int8_kernels(module: GraphModule) -> GraphModule:
    """Every weight_only_linear as PyTorch's product with int8 weights; the module's other weights are bfloat16.

    Where the kernel cannot read the width (INT8_CHANNELS), the weight is expanded to bfloat16.
    """
    call = module.graph.call_function

    def build(index: int, node: Node) -> Node:
        x, weight, scale, bias = node.args
        if _tensor(module, weight).shape[1] % INT8_CHANNELS:
            plain = _tensor(module, weight).to(torch.bfloat16) * _tensor(module, scale)[:, None]
            return call(ATEN.linear.default, (x, _attribute(module, f"expanded_{index}", plain), bias))
        out = call(ATEN._weight_int8pack_mm.default, (x, weight, scale))
        return out if bias is None else call(ATEN.add.Tensor, (out, bias))

    return _replace(module, OPS.weight_only_linear.default, build)


def expand_groupwise(module: GraphModule) -> GraphModule:
    """Every groupwise_linear as a float32 product with the expanded weight."""
    call = module.graph.call_function

    def build(index: int, node: Node) -> Node:
        x, weight, scales, factors, bias = node.args
        plain = expand_groups(_tensor(module, weight), _tensor(module, scales), torch.float32)
        if factors is not None:
            x = call(ATEN.mul.Tensor, (x, factors))
        return call(ATEN.linear.default, (x, _attribute(module, f"expanded_{index}", plain), bias))

    return _replace(module, OPS.groupwise_linear.default, build)
