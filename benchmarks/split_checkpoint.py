"""One model with random weights as a TensorRT-LLM checkpoint of any number of ranks: the same weights however it is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import Amax, quantized, random_weight
from trtllm_workshop.checkpoint import RankMapping, expected_layout
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.convert_plan import OutputTensor, Sharding, plan_rank, source_tensors
from trtllm_workshop.safetensors_file import write_header


def write_split_checkpoint(
    folder: Path, config: dict[str, Any], tp: int, seed: int, device: torch.device, amax: Amax
) -> None:
    """A checkpoint folder of `tp` ranks, written tensor by tensor.

    The whole matrices are drawn by their Hugging Face names and cut as the converter plans it; what is quantized is
    quantized after that, with scales that do not depend on the cut.

    Args:
        config: as `random_checkpoint.checkpoint_config` makes it.
        device: where the weights are drawn; another device draws other ones.
        amax: the largest input of each linear layer, for FP8.
    """
    config = {**config, "mapping": {"world_size": tp, "tp_size": tp, "pp_size": 1}}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    spec = ModelSpec.from_checkpoint_config(config)
    whole = source_tensors(spec)
    place = RankMapping.from_config(config)

    def assemble(tensor: OutputTensor) -> torch.Tensor:
        parts = []
        for part in tensor.parts:
            (start, stop), columns = part.rows, slice(*(part.columns or (None,)))
            if part.source:
                source = random_weight(part.source, whole[part.source], seed, device)[start:stop]
                parts.append(source[:, columns] if source.dim() == 2 else source)
            else:  # rows that pad the vocabulary
                parts.append(torch.zeros(stop - start, *tensor.shape[1:], dtype=torch.bfloat16, device=device))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    for rank in range(place.tp_size):
        layout = expected_layout(config, rank)
        planned = {tensor.name: tensor for tensor in plan_rank(spec, Sharding(tp), rank)}
        triples = [(name, kind.dtype, kind.shape) for name, kind in layout.items()]
        with (folder / f"rank{rank}.safetensors").open("wb") as file:
            for name, offset in write_header(file.fileno(), triples, {"format": "pt"}).items():

                def plain(wanted: str, shape: tuple[int, ...], planned: dict[str, OutputTensor] = planned) -> Any:
                    return assemble(planned[wanted])

                kind = layout[name]
                narrow = kind.dtype == "float8_e4m3fn" or name.endswith("_factor")
                made = quantized(name, kind.shape, amax, plain) if narrow else plain(name, kind.shape)
                file.seek(offset)
                file.write(made.contiguous().cpu().view(torch.uint8).numpy().data)
