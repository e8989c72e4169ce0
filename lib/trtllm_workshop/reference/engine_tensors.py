"""From the tensors of a checkpoint to those of an engine, one at a time.

What changes on the way: mlp.fc and mlp.gate lie in one matrix where they can; 16-bit matrices of weight-only checkpoints are quantized;
AWQ's four-bit values, which ModelOpt packs by pairs of output channels, are packed by pairs of input channels; a head
that is the embedding is written out; the rotary table is added, and where a rank's rows of a split embedding begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trtllm_workshop.checkpoint import RankMapping, expected_layout, padded_vocabulary
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.quant_mode import QuantMode
from trtllm_workshop.reference.build_output import BuildError
from trtllm_workshop.reference.quant_ops import pack_int4
from trtllm_workshop.reference.rotary import rotary_table
from trtllm_workshop.reference.weight_only import per_channel_scale, quantize_per_channel
from trtllm_workshop.safetensors_file import ITEM_SIZE

Read = Callable[[str], torch.Tensor]
EMBEDDING = "transformer.vocab_embedding"


@dataclass(frozen=True)
class EngineTensor:
    """A tensor of the engine file; `parts()` gives its pieces, which lie behind each other on the first dimension."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], list[torch.Tensor]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


def awq_to_rows(packed: torch.Tensor) -> torch.Tensor:
    """ModelOpt's AWQ bytes [out / 2, in], the even output channel in the low half -> `quant_ops.pack_int4`'s layout.

    The half-bytes are signed (two's complement), those of the engine have 8 added.
    """
    packed = packed.view(torch.int8)
    low, high = (packed << 4) >> 4, packed >> 4
    return pack_int4(torch.stack((low, high), dim=1).flatten(0, 1))


def embedding_dim(config: dict[str, Any]) -> int | None:
    """How the ranks of a checkpoint split the embedding: 0 by rows, 1 by columns, None when each holds all of it."""
    if not config.get("use_parallel_embedding") or RankMapping.from_config(config).tp_size == 1:
        return None
    return 1 if config.get("embedding_sharding_dim", 0) == 1 else 0


def engine_tensors(
    config: dict[str, Any], rank: int, file_of: Path, max_seq_len: int
) -> Callable[[], Iterator[EngineTensor]]:
    """A function that gives the engine's tensors in turn, as often as it is called; `file_of` is the rank's file.

    Tensors are mapped from the file, not copied.

    Raises:
        BuildError: when a rank's rows of a shared head cannot be taken from its part of the embedding.
    """
    spec, mode = ModelSpec.from_checkpoint_config(config), QuantMode.from_config(config)
    layout, place, table = expected_layout(config, rank), RankMapping.from_config(config, rank), f"{EMBEDDING}.weight"
    rows = padded_vocabulary(spec.vocab_size, place.tp_size) // place.tp_size
    first_row = place.tp_rank * rows
    shared = place.is_last_stage and "lm_head.weight" not in layout
    by_rows = embedding_dim(config) == 0 and table in layout
    if shared and layout[table].shape[1] != spec.hidden_size:
        raise BuildError(
            f"share_embedding_table of config.json says that lm_head is the embedding, which is split by columns "
            f"({layout[table].shape[1]} of {spec.hidden_size} on a rank), lm_head by rows: convert the model again"
        )

    def head(whole: torch.Tensor) -> torch.Tensor:
        part = whole if by_rows else whole[first_row : first_row + rows]
        return torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[0]))

    def generate() -> Iterator[EngineTensor]:
        from safetensors import safe_open

        with safe_open(file_of, framework="pt") as file:
            for name in layout:
                if not (mode.joins_fc_and_gate and ".mlp.gate." in name):
                    yield from _of(name, mode, layout, file.get_tensor)
            if shared:
                sizes = (layout[table].dtype, (rows, spec.hidden_size))
                yield EngineTensor("lm_head.weight", *sizes, lambda: [head(file.get_tensor(table))])
        if by_rows:
            yield EngineTensor(f"{EMBEDDING}.first_row", "int64", (1,), lambda: [torch.tensor([first_row])])
        shape = (max_seq_len, 2, spec.head_size)
        scaling = (spec.head_size, spec.rotary_base, spec.rotary_scaling)
        yield EngineTensor("transformer.rotary_table", "float32", shape, lambda: [rotary_table(max_seq_len, *scaling)])

    return generate


def _kind(layout: Any) -> tuple[str, tuple[int, ...]]:
    return layout.dtype, layout.shape


def _of(name: str, mode: QuantMode, layout: dict[str, Any], read: Read) -> Iterator[EngineTensor]:
    """The engine's tensors that come from one tensor of the checkpoint, and for mlp.fc from its gate too."""
    module, _, leaf = name.rpartition(".")
    sources, target = [name], module
    if mode.joins_fc_and_gate and ".mlp.fc." in name:
        sources.append(name.replace(".mlp.fc.", ".mlp.gate."))
        target = module.replace(".mlp.fc", ".mlp.fused_fc")
    dtype, shape = _kind(layout[name])
    algorithm = mode.algorithm_of(module) if leaf not in ("bias", "kv_cache_scaling_factor") else None
    joined = (len(sources) * shape[0], *shape[1:])

    def each(work: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        return lambda: [work(read(source)) for source in sources]

    if shape == (1,) or leaf == "prequant_scaling_factor":
        yield EngineTensor(f"{target}.{leaf}", dtype, shape, lambda: [_same(sources, read)])
    elif leaf == "weight" and algorithm == "W8A16" and len(shape) == 2:
        yield EngineTensor(f"{target}.weight", "int8", joined, each(lambda w: quantize_per_channel(w, 8)))
        yield EngineTensor(f"{target}.per_channel_scale", dtype, joined[:1], each(lambda w: per_channel_scale(w, 8)))
    elif leaf == "weight" and algorithm == "W4A16" and len(shape) == 2:
        packed = (joined[0], shape[1] // 2)
        yield EngineTensor(f"{target}.weight", "uint8", packed, each(lambda w: pack_int4(quantize_per_channel(w, 4))))
        column = each(lambda w: per_channel_scale(w, 4)[:, None].float())
        yield EngineTensor(f"{target}.weights_scaling_factor", "float32", (joined[0], 1), column)
    elif leaf == "weight" and algorithm == "W4A16_AWQ" and len(shape) == 2:
        packed = (2 * joined[0], shape[1] // 2)
        yield EngineTensor(f"{target}.weight", "uint8", packed, each(awq_to_rows))
    else:
        yield EngineTensor(f"{target}.{leaf}", dtype, joined, each(lambda w: w))


def _same(sources: list[str], read: Read) -> torch.Tensor:
    """The one value that all sources hold.

    Raises:
        BuildError: when they differ, which a calibration that merges joined layers does not write.
    """
    first, *rest = (read(source) for source in sources)
    for other, tensor in zip(sources[1:], rest, strict=True):
        if not torch.equal(first, tensor):
            raise BuildError(
                f"{sources[0]} and {other} differ ({first.flatten()[0]:.6g} and {tensor.flatten()[0]:.6g} …), but their "
                "layers share one matrix product: quantize the model again with quantize.py, which merges their scales"
            )
    return first
