"""Quantized TensorRT-LLM checkpoints made by hand from plain ones, so that the engine's tests need no calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

# Of every quantized layer's input and of keys and values, in the place of what a calibration would find.
ACTIVATION_AMAX, KV_AMAX = 6.0, 4.0
JOINED = {"mlp.fc": "mlp.gate", "mlp.gate": "mlp.fc"}


def quantized_checkpoint(
    plain: Path,
    folder: Path,
    quant_algo: str | None,
    kv_cache: str | None = None,
    group_size: int = 16,
    kv_amax: float = KV_AMAX,
) -> Path:
    """`plain` (one rank) quantized as ModelOpt exports it: FP8, W4A16_AWQ, W8A16, W4A16 or None, and the KV cache."""
    config = json.loads((plain / "config.json").read_text())
    section = config["quantization"]
    section |= {"quant_algo": quant_algo, "kv_cache_quant_algo": kv_cache, "exclude_modules": ["lm_head"]}
    if quant_algo == "W4A16_AWQ":
        section |= {"group_size": group_size, "pre_quant_scale": True}
    tensors = load_file(plain / "rank0.safetensors")
    made: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        linear = ".layers." in name and name.endswith(".weight") and tensor.dim() == 2
        if linear and quant_algo == "FP8":
            made |= _fp8(module, tensor, _amax(module, tensors))
        elif linear and quant_algo == "W4A16_AWQ":
            made |= _awq(module, tensor, group_size)
        else:
            made[name] = tensor
        if kv_cache and name.endswith("attention.qkv.weight"):
            most = {"FP8": 448.0, "INT8": 127.0}[kv_cache]
            made[module.replace(".qkv", ".kv_cache_scaling_factor")] = torch.tensor([kv_amax / most])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made, folder / "rank0.safetensors")
    return folder


def _amax(module: str, tensors: dict[str, torch.Tensor]) -> float:
    """The largest magnitude of the matrix, and of the one that is joined with it."""
    values = [tensors[f"{module}.weight"].abs().max()]
    for end, other in JOINED.items():
        if module.endswith(end):
            values.append(tensors[f"{module.removesuffix(end)}{other}.weight"].abs().max())
    return float(max(values))


def _fp8(module: str, weight: torch.Tensor, amax: float) -> dict[str, torch.Tensor]:
    scale = torch.tensor([amax / 448])
    return {
        f"{module}.weight": (weight.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn),
        f"{module}.weights_scaling_factor": scale,
        f"{module}.activation_scaling_factor": torch.tensor([ACTIVATION_AMAX / 448]),
    }


def _awq(module: str, weight: torch.Tensor, group_size: int) -> dict[str, torch.Tensor]:
    """Factors that differ by input channel, group scales amax / 7, output channels packed in pairs, even one low."""
    factors = 0.5 + torch.arange(weight.shape[1]).remainder(7 if module.endswith("gate") else 5) / 4
    scaled = (weight.float() / factors).unflatten(1, (-1, group_size))
    scales = scaled.abs().amax(-1) / 7
    values = (scaled / scales[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int8)
    packed = (values[0::2] & 15) | (values[1::2] << 4)
    return {
        f"{module}.weight": packed,
        f"{module}.weights_scaling_factor": scales,
        f"{module}.prequant_scaling_factor": factors.to(weight.dtype),
    }


def dequantized(checkpoint: Path) -> dict[str, torch.Tensor]:
    """{module: float32 matrix} of every quantized layer, worked out byte by byte without the engine's code."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = load_file(checkpoint / "rank0.safetensors")
    undo: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
        "FP8": lambda module, weight: weight.float() * tensors[f"{module}.weights_scaling_factor"],
        "W4A16_AWQ": lambda module, weight: _undo_awq(weight, tensors, module),
        "W8A16": lambda _, weight: round_rows(weight.float(), 8),
        "W4A16": lambda _, weight: round_rows(weight.float(), 4),
    }
    algorithm = config["quantization"]["quant_algo"]
    made: dict[str, Any] = {}
    for name, tensor in tensors.items():
        if ".layers." in name and name.endswith(".weight") and tensor.dim() == 2:
            made[name.removesuffix(".weight")] = undo[algorithm](name.removesuffix(".weight"), tensor)
    return made


def round_rows(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """Each row on its own grid of 2^bits values, the step amax / 2^(bits - 1) rounded to bfloat16."""
    rows = []
    for row in weight:
        step = float((row.abs().max() / 2 ** (bits - 1)).to(torch.bfloat16)) or 1.0
        rows.append((row / step).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) * step)
    return torch.stack(rows)


def _undo_awq(packed: torch.Tensor, tensors: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    scales = tensors[f"{module}.weights_scaling_factor"].float()
    raw = packed.view(torch.uint8).int()
    rows = torch.empty(2 * packed.shape[0], packed.shape[1])
    for half, shift in enumerate((0, 4)):
        value = (raw >> shift) & 15
        rows[half::2] = torch.where(value > 7, value - 16, value).float()
    grouped = rows.unflatten(1, (scales.shape[1], -1)) * scales[..., None]
    return grouped.flatten(1) * tensors[f"{module}.prequant_scaling_factor"].float()
