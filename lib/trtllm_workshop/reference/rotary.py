"""Rotary position embedding tables.

Formulas: RoFormer (arXiv 2104.09864) for the base table, and the frequency scaling that Llama 3.1 introduced, with the
parameter names of its config.json (`factor`, `low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch


def inverse_frequencies(head_size: int, base: float, scaling: Mapping | None) -> torch.Tensor:
    """Angular step per position of each pair of elements: [head_size / 2], float32.

    Raises:
        ValueError: for a scaling type other than `default`, `linear` and `llama3`.
    """
    inv = 1.0 / (base ** (torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size))
    if not scaling:
        return inv
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "default":
        return inv
    if kind == "linear":
        return inv / scaling["factor"]
    if kind == "llama3":
        return _llama3(inv, scaling)
    raise ValueError(f"rope scaling type {kind!r} is not supported; supported: default, linear, llama3")


def _llama3(inv: torch.Tensor, scaling: Mapping) -> torch.Tensor:
    """Stretch slow waves by `factor`, keep fast ones, blend between the two."""
    factor, low, high = (scaling[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv
    blend = (original / wavelength - low) / (high - low)
    blended = (1 - blend) * inv / factor + blend * inv
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, inv / factor, torch.where(fast, inv, blended))


def rotary_table(positions: int, head_size: int, base: float, scaling: Mapping | None) -> torch.Tensor:
    """Cosines and signed sines of every position: [positions, 2, head_size] float32.

    Both halves of a head rotate by the same angles; the first half takes minus the sine (see `attention.apply_rotary`).
    """
    angles = torch.outer(torch.arange(positions).float(), inverse_frequencies(head_size, base, scaling))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)), dim=1)
