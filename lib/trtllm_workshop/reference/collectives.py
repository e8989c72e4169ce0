"""What the ranks of one engine tell each other inside a step, as operators that sit in the exported graph.

TensorRT-LLM puts NCCL plugins (AllReduce, AllGather) into the network of each rank. Here the graph holds two custom
operators that name no transport: `connect` replaces them by a communicator's functions when an engine is loaded, so that
several engines of one process can each have their own. Where they stand (tensorrt_llm/layers/linear.py, embedding.py):

* allreduce, the sum over the ranks, after each product whose inputs are split (attention.dense and mlp.proj), and after
  the lookup in an embedding that is split by rows;
* allgather, the ranks' columns side by side, after lm_head, and after the lookup in an embedding split by columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch.fx import GraphModule

from trtllm_workshop.checkpoint import RankMapping
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.attention import LIBRARY

LIBRARY.define("allreduce(Tensor x) -> Tensor")
LIBRARY.define("allgather(Tensor x, int ranks) -> Tensor")

OPS, ATEN = torch.ops.trtllm_workshop, torch.ops.aten
HIDDEN_INPUT = "hidden_states_input"  # TensorRT-LLM's name for what a pipeline stage gets from the one before


class Communicator(Protocol):
    """What an engine of several ranks needs from whoever connects them; all ranks call in the same order.

    Attributes:
        capturable: whether the calls may be recorded in a CUDA graph.
    """

    @property
    def capturable(self) -> bool: ...

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensor-parallel ranks' `x`, all of one shape and type; may be written into `x`."""

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        """[n, columns] of each tensor-parallel rank -> [n, ranks * columns], side by side in the order of the ranks."""


def rank_spec(spec: ModelSpec, place: RankMapping) -> ModelSpec:
    """The sizes that one rank's graph has: its heads, its part of the MLP, its layers; hidden size and vocabulary whole.

    With fewer KV heads than ranks each rank holds a copy of one.
    """
    tp = place.tp_size
    return replace(
        spec,
        num_attention_heads=spec.num_attention_heads // tp,
        num_key_value_heads=max(1, spec.num_key_value_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
        num_hidden_layers=len(place.layers(spec.num_hidden_layers)),
    )


@torch.library.impl(LIBRARY, "allreduce", "CompositeExplicitAutograd")
def _no_allreduce(x: torch.Tensor) -> torch.Tensor:
    raise _not_connected()


@torch.library.impl(LIBRARY, "allgather", "CompositeExplicitAutograd")
def _no_allgather(x: torch.Tensor, ranks: int) -> torch.Tensor:
    raise _not_connected()


def _not_connected() -> RuntimeError:
    return RuntimeError(
        "this graph is one rank of several and no ranks are connected: load it with load_engine(…, communicator=…), or "
        "let LLM or mpirun start all ranks"
    )


torch.library.impl(LIBRARY, "allreduce", "Meta")(torch.empty_like)
torch.library.impl(LIBRARY, "allgather", "Meta")(lambda x, ranks: x.new_empty(*x.shape[:-1], ranks * x.shape[-1]))


def allreduce(x: torch.Tensor) -> torch.Tensor:
    """The operator as it sits in the graph: the sum over the tensor-parallel ranks."""
    return OPS.allreduce(x)


def allgather(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """The operator as it sits in the graph: the last dimensions of `ranks` ranks side by side."""
    return OPS.allgather(x, ranks)


def connect(module: GraphModule, communicator: Communicator) -> GraphModule:
    """Let every allreduce and allgather of a graph call this communicator; the module is changed and returned."""

    def reduce_over_ranks(x: torch.Tensor) -> torch.Tensor:
        return communicator.allreduce(x)

    def gather_from_ranks(x: torch.Tensor) -> torch.Tensor:
        return communicator.allgather(x)

    for operator, function in ((OPS.allreduce, reduce_over_ranks), (OPS.allgather, gather_from_ranks)):
        for node in module.graph.find_nodes(op="call_function", target=operator.default):
            node.target, node.args = function, node.args[:1]
    module.recompile()
    return module


def pin_stage_types(module: GraphModule, compute: torch.dtype, between: torch.dtype) -> GraphModule:
    """Give the hidden states between pipeline stages one type, whatever type each stage computes in.

    A stage's graph names no type, and on a processor it may compute in another one from step to step. So the hidden
    states that come in become `compute`, those that go out become `between`. A whole model stays as it is.
    """
    graph = module.graph
    placeholders, (out,) = graph.find_nodes(op="placeholder"), graph.find_nodes(op="output")
    given = {node.name: node for node in placeholders}
    if hidden := given.get(HIDDEN_INPUT):
        users = list(hidden.users)
        with graph.inserting_after(placeholders[-1]):
            cast = graph.call_function(ATEN.to.dtype, (hidden, compute))
        for user in users:
            user.replace_input_with(hidden, cast)
    if "last_token_ids" not in given:
        for made in out.all_input_nodes:
            with graph.inserting_before(out):
                out.replace_input_with(made, graph.call_function(ATEN.to.dtype, (made, between)))
    module.recompile()
    return module
