"""Changing float types of raw bytes with numpy, which has no bfloat16: rounding to nearest even, as torch does it.

torch could do this too, but importing it takes longer and needs more memory than converting a small model. All results
go into buffers that are used again: fresh memory for every piece costs more than the arithmetic.
"""

from __future__ import annotations

import numpy as np

FLOAT16_MAX = 65504.0
_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}
_QUIET_NAN = 0x7FC0


class Caster:
    """Reusable buffers for one thread; every result is valid until the next call."""

    def __init__(self, elements: int) -> None:
        self._wide = np.empty(elements, np.float32)
        self._bits = np.empty(elements, np.uint32)
        self._narrow = np.empty(elements, np.uint16)

    def grow(self, elements: int) -> None:
        """Makes room for pieces of that many elements."""
        if elements > len(self._wide):
            self.__init__(elements)  # type: ignore[misc]

    def cast(self, raw: np.ndarray, source: str, target: str) -> tuple[np.ndarray, int]:
        """(bytes of the `target` type, number of values beyond float16's range) for `raw` bytes of the `source` type.

        The count is 0 unless the target is float16; it includes infinities of the source, not NaN.
        """
        values = self._widen(raw, source)
        if target == "float32":
            return values.view(np.uint8), 0
        if target == "bfloat16":
            return self._to_bfloat16(values).view(np.uint8), 0
        beyond = 0
        if not (values.min() >= -FLOAT16_MAX and values.max() <= FLOAT16_MAX):  # also true when there is a NaN
            beyond = int(np.count_nonzero(np.abs(values) > FLOAT16_MAX))
        result = self._narrow[: len(values)].view(np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(result, values, casting="unsafe")
        return result.view(np.uint8), beyond

    def _widen(self, raw: np.ndarray, source: str) -> np.ndarray:
        if source == "float32":
            return raw.view(np.float32)
        if source == "bfloat16":
            bits = raw.view(np.uint16)
            wide = self._wide[: len(bits)]
            np.left_shift(bits, 16, out=wide.view(np.uint32), dtype=np.uint32)
            return wide
        values = raw.view(_NUMPY[source])
        wide = self._wide[: len(values)]
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(wide, values, casting="unsafe")
        return wide

    def _to_bfloat16(self, values: np.ndarray) -> np.ndarray:
        """Adds half of the dropped part (one less when the kept part is even) and keeps the upper 16 bits."""
        source, bits = values.view(np.uint32), self._bits[: len(values)]
        np.right_shift(source, 16, out=bits)
        np.bitwise_and(bits, 1, out=bits)
        np.add(bits, 0x7FFF, out=bits)
        np.add(bits, source, out=bits)
        np.right_shift(bits, 16, out=bits)
        result = self._narrow[: len(values)]
        np.copyto(result, bits, casting="unsafe")
        nan = np.isnan(values)
        if nan.any():  # rounding can carry a NaN's bits into another number
            result[nan] = _QUIET_NAN
        return result
