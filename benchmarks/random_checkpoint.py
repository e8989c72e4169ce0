"""TensorRT-LLM checkpoints with random weights in the shape of a real model, in bfloat16 and FP8, for benchmarks."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trtllm_workshop.checkpoint import expected_layout
from trtllm_workshop.quant_mode import E4M3_MAX
from trtllm_workshop.safetensors_file import write_header

# layers, hidden, intermediate, heads, KV heads, head size, vocabulary
SHAPES = {
    "llama-3-8b": (32, 4096, 14336, 32, 8, 128, 128256),
    "tinyllama": (22, 2048, 5632, 32, 4, 64, 32000),
    "smoke": (2, 64, 128, 4, 2, 16, 96),  # for trying the script without a GPU
}
Amax = dict[str, float]  # of the inputs of linear layers, by the names of the engine's graph


def checkpoint_config(shape: str, layers: int | None, precision: str) -> dict[str, Any]:
    """config.json of a TensorRT-LLM checkpoint of one rank; precision: bf16, fp8, or fp8-kv8 with an FP8 KV cache too."""
    depth, hidden, inner, heads, kv_heads, size, vocabulary = SHAPES[shape]
    return {
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "num_hidden_layers": layers or depth,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_size": size,
        "vocab_size": vocabulary,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "norm_epsilon": 1e-5,
        "rotary_base": 500000.0,
        "position_embedding_type": "rope_gpt_neox",
        "mapping": {"world_size": 1, "tp_size": 1, "pp_size": 1},
        "quantization": {
            "quant_algo": "FP8" if precision.startswith("fp8") else None,
            "kv_cache_quant_algo": "FP8" if precision == "fp8-kv8" else None,
            "exclude_modules": ["lm_head"],
        },
    }


def random_weight(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> torch.Tensor:
    """bfloat16; norms are 1, matrices normal with deviation 0.02, the same for a name and seed."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device).mul_(0.02).to(torch.bfloat16)


def quantized(name: str, shape: tuple[int, ...], amax: Amax, plain: Callable[..., torch.Tensor]) -> torch.Tensor:
    """A tensor of an FP8 linear layer, from the plain weight; fc and gate share a scale, as ModelOpt writes them."""
    module, _, leaf = name.rpartition(".")
    joined = module.replace(".mlp.fc", ".mlp.fused_fc").replace(".mlp.gate", ".mlp.fused_fc")
    if leaf == "kv_cache_scaling_factor":
        return torch.ones(1)  # ModelOpt exports no smaller one
    if leaf == "activation_scaling_factor":
        return torch.tensor([amax[joined] / E4M3_MAX])
    # The largest of that many normal values: close enough for weights that are drawn from a known distribution.
    scale = 0.02 * 6.0 / E4M3_MAX
    if leaf == "weights_scaling_factor":
        return torch.tensor([scale])
    return (plain(name, shape).float() / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def write_checkpoint(folder: Path, config: dict[str, Any], seed: int, device: torch.device, amax: Amax) -> None:
    """A checkpoint folder, written tensor by tensor."""
    layout = expected_layout(config, 0)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    plain = functools.partial(random_weight, seed=seed, device=device)
    with (folder / "rank0.safetensors").open("wb") as file:
        triples = [(name, kind.dtype, kind.shape) for name, kind in layout.items()]
        for name, offset in write_header(file.fileno(), triples, {"format": "pt"}).items():
            shape, narrow = layout[name].shape, layout[name].dtype == "float8_e4m3fn" or name.endswith("_factor")
            tensor = quantized(name, shape, amax, plain) if narrow else plain(name, shape)
            file.seek(offset)
            file.write(tensor.cpu().view(torch.uint8).numpy().data)
