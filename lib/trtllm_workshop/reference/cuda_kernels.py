"""Faster steps on CUDA devices: the work between matrix products in few kernels, written with Triton.

A matrix product in FP8 takes about half the time of one in 16 bits; everything else takes as long as before, and rounding
the inputs to e4m3 comes on top. Run as separate operators that work eats most of the gain: it reads and writes the
activations many times over. `optimize` rewrites an engine's graph so that

* the residual sum, the RMS norm and the rounding to e4m3 are one kernel,
* SiLU, the product with the gate and the rounding are one kernel,
* rotary embedding and the write to the KV cache are one kernel,
* a product with one row of activations has a kernel made for it, with SiLU and gate inside,
* attention reads keys and values from the pool where they lie, and rounds its result too,

with and without quantization: both precisions get the same fusions. Without Triton, and on a processor, the same functions
compute with PyTorch's operators.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from trtllm_workshop.reference import attention
from trtllm_workshop.reference.fp8 import scaled_product, to_e4m3

ATEN, OPS = torch.ops.aten, torch.ops.trtllm_workshop
HALF_TYPES = (torch.float16, torch.bfloat16)


@functools.cache
def _triton() -> Any:
    """The module of Triton kernels, or None where Triton is not installed."""
    try:
        from trtllm_workshop.reference import triton_kernels
    except ImportError:
        return None
    return triton_kernels


@functools.cache
def _paged_attention() -> Any:
    """The module of attention kernels, or None where Triton is not installed."""
    if _triton() is None:
        return None
    from trtllm_workshop.reference import triton_attention

    return triton_attention


def _kernels(x: torch.Tensor) -> Any:
    """The Triton kernels when they serve `x`."""
    return _triton() if x.device.type == "cuda" and x.dtype in HALF_TYPES else None


def _row_kernels(x: torch.Tensor, weight: torch.Tensor) -> Any:
    """The Triton kernels for products of a single row, when x is one."""
    if x.shape[0] != 1 or x.device.type != "cuda" or x.dtype != weight.dtype or _triton() is None:
        return None
    if x.dtype not in (*HALF_TYPES, torch.float8_e4m3fn) or not weight.is_contiguous():
        return None
    from trtllm_workshop.reference import triton_products

    return triton_products


def add_rms_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + delta, its RMS norm); without `delta` (x, its norm); the norm in e4m3 when `scale` is given.

    Args:
        x, delta: [tokens, hidden].
        weight: [hidden].
        scale: [1], float32: the activation scale of the linear layers that read the norm.
    """
    if kernels := _kernels(x):
        return kernels.add_rms_norm(x.contiguous(), delta if delta is None else delta.contiguous(), weight, eps, scale)
    total = x if delta is None else x + delta
    normed = F.rms_norm(total, (total.shape[-1],), weight, eps)
    return total, normed if scale is None else to_e4m3(normed, scale)


def silu_mul(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """silu(fc) · gate for x = [fc, gate] ([tokens, 2 * intermediate]); in e4m3 when `scale` ([1]) is given."""
    if kernels := _kernels(x):
        return kernels.silu_mul(x.contiguous(), scale)
    fc, gate = x.chunk(2, dim=-1)
    value = F.silu(fc) * gate
    return value if scale is None else to_e4m3(value, scale)


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """x W^T + bias in `dtype`; with scales of e4m3 values, see `fp8.scaled_product`. A single row has a kernel of its own."""
    if rows := _row_kernels(x, weight):
        return rows.row_product(x.contiguous(), weight, bias, weight_scale, scale, dtype)
    if weight_scale is None or scale is None:
        return F.linear(x, weight, bias)
    return scaled_product(x, weight, weight_scale, scale, bias, dtype)


def gated_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_scale: torch.Tensor | None,
    scale: torch.Tensor | None,
    dtype: torch.dtype,
    out_scale: torch.Tensor | None,
) -> torch.Tensor:
    """`silu_mul` of `product`."""
    if rows := _row_kernels(x, weight):
        return rows.row_product(x.contiguous(), weight, bias, weight_scale, scale, dtype, True, out_scale)
    return silu_mul(product(x, weight, bias, weight_scale, scale, dtype), out_scale)


def quantize(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """`quant_ops.to_e4m3` in one kernel."""
    if kernels := _kernels(x):
        return kernels.quantize(x.contiguous(), scale)
    return to_e4m3(x, scale)


@dataclass(frozen=True)
class StepPlan:
    """What all layers of a step need to know about its requests, worked out once.

    contexts, context_tokens: how many requests are in the context phase, and their tokens, which come first.
    tiles: the work of `triton_attention.context_attention` on the device; None when PyTorch's attention takes the context phase.
    """

    contexts: int
    context_tokens: int
    tiles: torch.Tensor | None


# PyTorch's attention takes requests of equal length without cached tokens in one call; with more calls than this a layer, or with
# cached tokens, which it would have to gather, one Triton kernel takes all requests.
MOST_CALLS = 4
# PyTorch's fastest attention of a Hopper GPU (cuDNN's) is planned anew for every length it meets, which only long steps repay.
FEW_TOKENS = 2048


def plan_step(
    slot_mapping: torch.Tensor, request_types: torch.Tensor, query_lengths: torch.Tensor, sequence_lengths: torch.Tensor
) -> StepPlan:
    """See `StepPlan`; arguments as for `attention.attend`."""
    contexts = int((request_types == 0).sum())
    lengths, totals = query_lengths[:contexts].tolist(), sequence_lengths[:contexts].tolist()
    tiles = None
    calls = len(attention.context_groups(lengths, totals))
    own = calls > MOST_CALLS or lengths != totals or sum(lengths) < FEW_TOKENS
    if slot_mapping.is_cuda and contexts and _paged_attention() and own:
        rows = torch.tensor(_paged_attention().context_tiles(lengths, totals), dtype=torch.int32)
        tiles = rows.pin_memory().to(slot_mapping.device, non_blocking=True)
    return StepPlan(contexts, sum(lengths), tiles)


def can_capture(engine: Any) -> bool:
    """Whether generation steps of an `engine.Engine` may be recorded as CUDA graphs.

    They may when the Triton kernels serve it: the plain attention's work depends on lengths that only the processor knows. Ranks
    that are connected in a way that cannot be recorded, and pipeline stages, run operator by operator.
    """
    if engine.mapping.pp_size > 1 or (engine.communicator is not None and not engine.communicator.capturable):
        return False
    if engine.device.type != "cuda" or engine.dtype not in HALF_TYPES or _paged_attention() is None:
        return False
    sizes = (engine.heads, engine.kv_heads, engine.pretrained_config["head_size"])
    served = engine.kv_cache_dtype in (engine.dtype, torch.float8_e4m3fn)
    return served and bool(_paged_attention().serves(*sizes))


def fused_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache_pool: torch.Tensor,
    slot_mapping: torch.Tensor,
    blocks: torch.Tensor,
    sequence_length: torch.Tensor,
    request_types: torch.Tensor,
    query_lengths: torch.Tensor,
    sequence_lengths: torch.Tensor,
    layer: int,
    heads: int,
    kv_heads: int,
    scale: torch.Tensor | None,
    read_back: bool,
    plan: StepPlan,
    out_scale: torch.Tensor | None,
) -> torch.Tensor:
    """`attention.attend` with rotation and KV write in one kernel and, on CUDA, attention that reads the pool in place.

    Arguments as there; `qkv` is overwritten. plan: of this step. out_scale: [1], float32: the result is rounded to e4m3 with it.
    """
    pool, kernels = kv_cache_pool[layer], _kernels(qkv)
    served = torch.float8_e4m3fn if scale is not None else qkv.dtype
    if kernels is None or pool.dtype != served:
        out = attention.attend(
            qkv, cos, sin, kv_cache_pool, slot_mapping, blocks, sequence_length, request_types, query_lengths,
            sequence_lengths, layer, heads, kv_heads, scale, read_back,
        )  # fmt: skip
        return out if out_scale is None else quantize(out, out_scale)
    qkv = qkv.contiguous()
    kernels.rotate_and_store(qkv, cos, sin, slot_mapping, pool, scale, heads, kv_heads, read_back)
    q, k, v = qkv.view(qkv.shape[0], heads + 2 * kv_heads, -1).split((heads, kv_heads, kv_heads), dim=1)
    requests = (blocks, sequence_length, request_types, query_lengths, sequence_lengths)
    paged = _paged_attention()
    if not paged.serves(heads, kv_heads, q.shape[-1]):
        out = attention.attend_packed(q, k, v, pool, scale, *requests)
        return out if out_scale is None else quantize(out, out_scale)
    contexts, start = plan.contexts, plan.context_tokens
    if not contexts:
        out = q.new_empty(q.shape[0], heads * q.shape[-1], dtype=q.dtype if out_scale is None else torch.float8_e4m3fn)
        paged.generation_attention(q, pool, scale, blocks, sequence_length, out, out_scale)
        return out
    out = q.new_empty(q.shape[0], heads * q.shape[-1])
    if plan.tiles is not None and (scale is None or read_back):
        paged.context_attention(q, pool, scale, blocks, plan.tiles, out)
    else:
        of_contexts = [part[:contexts] for part in requests]
        if start == q.shape[0]:  # nothing else is in the step: no copy
            out = attention.attend_packed(q, k, v, pool, scale, *of_contexts)
            return out if out_scale is None else quantize(out, out_scale)
        out[:start] = attention.attend_packed(q[:start], k[:start], v[:start], pool, scale, *of_contexts)
    if start < q.shape[0]:
        rows = (blocks[contexts:], sequence_length[contexts:], out[start:])
        paged.generation_attention(q[start:], pool, scale, *rows)
    return out if out_scale is None else quantize(out, out_scale)


def _calls(module: GraphModule, target: Callable[..., Any]) -> list[Any]:
    return list(module.graph.find_nodes(op="call_function", target=target))


def _is_call(node: Any, *targets: Callable[..., Any]) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _swap(node: Any, new: Node) -> None:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _fuse_gates(module: GraphModule) -> None:
    """mul(silu(first half), second half) -> silu_mul."""
    for mul in _calls(module, ATEN.mul.Tensor):
        silu, gate = mul.args
        if not (_is_call(silu, ATEN.silu.default) and _is_call(gate, operator.getitem)):
            continue
        fc = silu.args[0]
        if not _is_call(fc, operator.getitem) or fc.args[0] is not gate.args[0] or (fc.args[1], gate.args[1]) != (0, 1):
            continue
        chunk = fc.args[0]
        if not _is_call(chunk, ATEN.chunk.default) or chunk.args[1:] != (2, -1):
            continue
        with module.graph.inserting_before(mul):
            _swap(mul, module.graph.call_function(silu_mul, (chunk.args[0], None)))


def _fuse_norms(module: GraphModule) -> None:
    """rms_norm, together with the sum it reads if there is one -> add_rms_norm."""
    graph = module.graph
    for norm in _calls(module, ATEN.rms_norm.default):
        x, shape, weight, eps = norm.args
        if len(shape) != 1 or eps is None:
            continue
        add = x if _is_call(x, ATEN.add.Tensor) and all(isinstance(a, Node) for a in x.args) and not x.kwargs else None
        with graph.inserting_before(norm if add is None else add):
            parts = (x, None) if add is None else add.args
            pair = graph.call_function(add_rms_norm, (*parts, weight, eps, None))
            total, normed = (graph.call_function(operator.getitem, (pair, i)) for i in (0, 1))
        _swap(norm, normed)
        if add is not None:
            _swap(add, total)


def _quantize_in_producers(module: GraphModule, dtype: torch.dtype) -> None:
    """fp8_linear -> the product alone, its input rounded by the kernel that makes it or, failing that, by one of its own."""
    graph, fp8 = module.graph, OPS.fp8_linear.default
    made: dict[tuple[Node, Node], Node] = {}
    for linear in _calls(module, fp8):
        x, weight, weight_scale, scale, bias = linear.args
        if (x, scale) not in made:
            alone = all(_is_call(user, fp8) and user.args[3] is scale and user.args[0] is x for user in x.users)
            maker = x.args[0] if _is_call(x, operator.getitem) else x
            if alone and _is_call(maker, add_rms_norm, silu_mul, fused_attention) and maker.args[-1] is None:
                maker.args = (*maker.args[:-1], scale)
                made[x, scale] = x
            else:
                with graph.inserting_before(linear):
                    made[x, scale] = graph.call_function(quantize, (x, scale))
        with graph.inserting_before(linear):
            arguments = (made[x, scale], weight, bias, weight_scale, scale, dtype)
            _swap(linear, graph.call_function(product, arguments))


def _fuse_products(module: GraphModule, dtype: torch.dtype) -> None:
    """linear -> product, and with the gate that alone reads it -> gated_product."""
    graph = module.graph
    for linear in _calls(module, ATEN.linear.default):
        x, weight, bias = (*linear.args, None)[:3]
        with graph.inserting_before(linear):
            _swap(linear, graph.call_function(product, (x, weight, bias, None, None, dtype)))
    for gate in _calls(module, silu_mul):
        made, out_scale = gate.args
        if _is_call(made, product) and len(made.users) == 1:
            with graph.inserting_before(gate):
                _swap(gate, graph.call_function(gated_product, (*made.args, out_scale)))
            graph.erase_node(made)


def _fuse_attention(module: GraphModule) -> None:
    """gpt_attention -> fused_attention where nothing else reads its qkv, which the kernel overwrites; one plan for all layers."""
    plan: Node | None = None
    for node in _calls(module, OPS.gpt_attention.default):
        if len(node.args[0].users) == 1:
            if plan is None:
                with module.graph.inserting_before(node):
                    plan = module.graph.call_function(plan_step, (node.args[4], *node.args[7:10]))
            node.target, node.args = fused_attention, (*node.args, plan, None)


def _fetch_late(module: GraphModule) -> None:
    """Each weight is looked up right before its first use; all of them before the first kernel keep the device waiting."""
    placed: set[Node] = set()
    for node in list(module.graph.nodes):
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in placed:
                node.prepend(source)
                placed.add(source)


def optimize(module: GraphModule) -> GraphModule:
    """Rewrite an engine's graph, whose weights are bound, for CUDA devices; the module is changed and returned.

    Graphs with float32 weights stay as they are. A graph that is rewritten already stays so.
    """
    norms = _calls(module, ATEN.rms_norm.default)
    if not norms:
        return module
    dtype = operator.attrgetter(str(norms[0].args[2].target))(module).dtype
    if dtype not in HALF_TYPES:
        return module
    _fuse_gates(module)
    _fuse_norms(module)
    _fuse_attention(module)
    _quantize_in_producers(module, dtype)
    module.graph.eliminate_dead_code()  # so that users are those that count
    _fuse_products(module, dtype)
    _fetch_late(module)
    module.graph.lint()
    module.recompile()
    return module
