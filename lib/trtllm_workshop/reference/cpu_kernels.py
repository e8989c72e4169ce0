"""Faster matrix products on processors: oneDNN's packed float32 weights, and when narrow weights are worth reading.

oneDNN can lay a weight matrix out once in the order its kernels read it. With a handful of rows, which is what a step of
the generation phase has, that saves a good part of the time of a plain product (benchmarks/generate.py measures it).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule

from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.cpu_quantized import (
    INT8_TOKENS,
    expand_fp8,
    expand_groupwise,
    expand_weight_only,
    in_bfloat16,
    in_float32,
    use_int8_kernels,
)

Run = Callable[..., torch.Tensor]
Weights = dict[str, torch.Tensor]

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


def widens(dtype: torch.dtype) -> bool:
    """Whether 16-bit weights are also kept as float32: on processors without 16-bit matrix instructions."""
    if dtype == torch.float32:
        return False
    native = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    return not getattr(torch.ops.mkldnn, native)()


def choose_by_tokens(narrow: Run, wide: Run, most: int = 1) -> Run:
    """Run a step of at most `most` tokens with the narrow weights, any other with their float32 copy.

    One token reads every weight for two operations, so the smaller weights win on any processor; with more tokens a
    processor is faster in float32. The weights have the same values, sums are wider.
    """

    def run(first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        # Token ids, or the hidden states of a later pipeline stage: the first dimension counts the tokens of both.
        return (narrow if first.shape[0] <= most else wide)(first, *rest)

    return run


def prepare_for_processor(
    plain: GraphModule, bind: Callable[[Weights], GraphModule], weights: Weights, dtype: torch.dtype, mode: QuantMode
) -> Run:
    """The fastest way to run an engine's graph on this processor.

    Args:
        plain: the graph bound to `weights`.
        bind: makes the graph with other weights under the same names.
        weights: the engine's tensors; emptied where they are not needed any more, so that memory is free in time.
        dtype: the type of the unquantized tensors.
        mode: the quantization.
    """
    if mode.quant_algo == "W8A16":
        narrow = use_int8_kernels(bind(in_bfloat16(weights)))
        wide = pack_linear_weights(expand_weight_only(bind(in_float32(weights))))
        return choose_by_tokens(narrow, wide, INT8_TOKENS)
    if mode.quant_algo:
        wide = bind(in_float32(weights))
        weights.clear()
        return pack_linear_weights(expand_fp8(wide) if mode.quant_algo == "FP8" else expand_groupwise(wide))
    if widens(dtype):
        wide = bind(in_float32(weights))
        return choose_by_tokens(plain, pack_linear_weights(wide))
    if dtype == torch.float32:
        weights.clear()  # so that each plain weight is free as soon as it is packed
        return pack_linear_weights(plain)
    return plain
