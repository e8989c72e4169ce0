"""The number format of FP8 weights and caches, for drawing and explaining: e4m3 in NumPy.

One sign bit, four exponent bits with bias 7, three mantissa bits, no infinities; the largest value is 448 (OCP 8-bit
Floating Point Specification; arXiv 2209.05433, table 1). The engine itself computes with torch's type of the same name.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from trtllm_workshop.quant_mode import E4M3_MAX

SMALLEST_NORMAL = 2.0**-6
SMALLEST = 2.0**-9


def as_array(values: Any) -> np.ndarray:
    """values (NumPy, a list, or a torch tensor of any device) as an array; bfloat16, which NumPy lacks, as float32."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        if values.dtype.is_floating_point and values.dtype.itemsize < 4:
            values = values.float()
    return np.asarray(values)


def e4m3_values() -> np.ndarray:
    """All finite values of the 256 codes, in the order of the codes, float64; zero is there twice."""
    values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return values[np.isfinite(values)]


def quantize_e4m3(x: Any, scale: float) -> np.ndarray:
    """What FP8 with this scale gives back for x (any shape): x / scale, clamped to ±448, rounded to nearest even, · scale.

    Raises:
        ValueError: when the scale is not a positive number.
    """
    _check_scale(scale)
    inside = np.clip(as_array(x).astype(np.float64) / scale, -E4M3_MAX, E4M3_MAX)
    return inside.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def half_step(x: Any, scale: float = 1.0) -> np.ndarray:
    """The largest rounding error of a value inside the range: half the distance of two neighbours at |x|.

    Eight neighbours share an exponent; below 2^-6 the distance stays at 2^-9 (both times the scale).
    """
    size = np.maximum(np.abs(as_array(x).astype(np.float64)) / scale, SMALLEST_NORMAL)
    return 2.0 ** (np.floor(np.log2(size)) - 4) * scale


def relative_error(x: Any, scale: float) -> np.ndarray:
    """|quantized - x| / |x|, 0 where x is 0."""
    values = as_array(x).astype(np.float64)
    error = np.abs(quantize_e4m3(values, scale) - values)
    return np.divide(error, np.abs(values), out=np.zeros_like(error), where=values != 0)


def saturated_share(x: Any, scale: float) -> float:
    """The share of values whose magnitude lies beyond 448 · scale and is cut off.

    Raises:
        ValueError: when the scale is not a positive number, or a value is NaN.
    """
    _check_scale(scale)
    values = np.abs(as_array(x).astype(np.float64))
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} of {values.size} values are NaN: look at what produced them")
    return float((values > E4M3_MAX * scale).mean()) if values.size else 0.0


def _check_scale(scale: float) -> None:
    if not (np.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale!r}, expected a positive number: amax / 448, with amax the largest magnitude")
