"""The safetensors container, read and written without loading tensors.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}} padded with blanks, then
the tensors' bytes without gaps (https://github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
_CODES = {name: code for code, (name, _) in DTYPES.items()}
ITEM_SIZE = {name: size for name, size in DTYPES.values()}
_MAX_HEADER = 100_000_000  # the limit of the safetensors library itself


class BrokenWeights(ValueError):
    """A weight file is missing, truncated, a Git LFS pointer, or not what its header says."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: dtype by torch's name, shape, nbytes, and its file and absolute byte offset there."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path
    offset: int = 0


def lfs_pointer_size(head: bytes) -> str | None:
    """The size of the real file as text, when `head` (a file's first bytes) is a Git LFS pointer; else None."""
    if not head.startswith(b"version https://git-lfs"):
        return None
    for line in head.decode("ascii", "replace").splitlines():
        if line.startswith("size "):
            return line.removeprefix("size ").strip()
    return "an unknown number of"


def read_header(path: str | Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Returns ({tensor name: TensorInfo}, metadata) from the header alone. Raises BrokenWeights naming the file."""
    path = Path(path)
    if not path.is_file():
        raise BrokenWeights(f"{path} does not exist: download it again (workshop run 01 resumes a download)")
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if (expected := lfs_pointer_size(head + file.read(512))) is not None:
            raise BrokenWeights(
                f"{path} is a Git LFS pointer of {size} bytes, the weights have {expected} bytes: "
                "run `git lfs pull` in that folder or download the model through the hub"
            )
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise BrokenWeights(
                f"{path} ({size} bytes) is no complete safetensors file: its header claims {length} bytes; "
                "delete it and download it again"
            )
        file.seek(8)
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_without_repetition)
        metadata = header.pop("__metadata__", None) or {}
        index = {name: _info(path, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenWeights(f"{path}: the safetensors header cannot be read ({error}); download it again") from error
    end = max((info.offset + info.nbytes for info in index.values()), default=8 + length)
    if end > size:
        raise BrokenWeights(
            f"{path} is truncated: {size} bytes on disk, its header needs {end} ({end - size} are missing); "
            "delete it and download it again"
        )
    if end < size:
        raise BrokenWeights(f"{path} has {size - end} bytes after its last tensor; delete it and download it again")
    _check_layout(path, 8 + length, index)
    return index, metadata


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different; otherwise one reader takes the first value, another the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _check_layout(path: Path, start: int, index: dict[str, TensorInfo]) -> None:
    """Tensors lie one behind the other; where they overlap, one has the values of another."""
    end, before = start, "the header"
    for name, info in sorted(index.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset != end:
            what = "overlap" if info.offset < end else "have a gap between them"
            raise BrokenWeights(f"{path}: {before} and {name} {what}; delete the file and download it again")
        end, before = end + info.nbytes, name


def _info(path: Path, base: int, entry: dict) -> TensorInfo:
    dtype, item = DTYPES.get(entry["dtype"], (entry["dtype"], 0))
    shape = tuple(int(size) for size in entry["shape"])
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if begin < 0 or end < begin or (item and end - begin != math.prod(shape) * item):
        raise ValueError(f"{end - begin} bytes do not fit dtype {entry['dtype']} and shape {list(shape)}")
    return TensorInfo(dtype, shape, end - begin, path, base + begin)


def write_header(
    fd: int, tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str] | None = None
) -> dict[str, int]:
    """Writes the header for (name, dtype, shape) triples at offset 0 and returns {name: absolute byte offset}.

    `metadata` is the container's own text-to-text dictionary. The caller then writes each tensor's bytes at its
    offset, in any order.
    """
    header: dict[str, dict] = {"__metadata__": metadata} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        end = begin + math.prod(shape) * ITEM_SIZE[dtype]
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)  # keeps the data aligned to eight bytes, as the safetensors library does
    os.pwrite(fd, struct.pack("<Q", len(raw)) + raw, 0)
    return {name: 8 + len(raw) + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
