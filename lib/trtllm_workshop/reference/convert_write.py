"""Writes one rank's safetensors file piece by piece.

Memory stays at a few small buffers whatever the model's size: bytes that need no change are copied by the kernel from
file to file, the rest passes through a buffer. Several tensors are written at a time, each at its own place.
"""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trtllm_workshop.reference.convert_cast import Caster
from trtllm_workshop.reference.convert_plan import OutputTensor, Part
from trtllm_workshop.reference.convert_source import WeightSource
from trtllm_workshop.safetensors_file import ITEM_SIZE, write_header

BUFFER_BYTES = 1 << 20  # small enough to stay in the processor's cache between reading, casting and writing
THREADS = min(4, os.cpu_count() or 1)
_KERNEL_BYTES = 64 << 20
_PROGRESS_SECONDS = 5.0
_NO_KERNEL_COPY = (errno.ENOSYS, errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


def write_all(fd: int, data: Any, offset: int) -> int:
    """Writes all bytes at the offset (a single pwrite may stop early) and returns how many they were."""
    view, done = memoryview(data).cast("B"), 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)
    return done


class _Buffers(threading.local):
    """Each thread's own memory, made when the thread first needs it."""

    def __init__(self) -> None:
        self.raw = np.empty(BUFFER_BYTES, np.uint8)
        self.cut = np.empty(BUFFER_BYTES, np.uint8)
        self.caster = Caster(BUFFER_BYTES // 2)

    def grow(self, row: int) -> None:
        if row > len(self.raw):
            self.raw, self.cut = np.empty(row, np.uint8), np.empty(row, np.uint8)
            self.caster.grow(row // 2)


class RankWriter:
    """Streams the tensors of one rank into a file; `overflows` then has {source name: values beyond float16}."""

    def __init__(self, source: WeightSource, dtype: str, report: Callable[[str], None]) -> None:
        self._source, self._dtype, self._report = source, dtype, report
        self._kernel_copy = hasattr(os, "copy_file_range")
        self._buffers, self._lock = _Buffers(), threading.Lock()
        self.overflows: dict[str, int] = {}

    def write(self, path: Path, tensors: Sequence[OutputTensor]) -> int:
        """Writes the file, waits until it is on disk, and returns its size in bytes."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            offsets = write_header(fd, [(tensor.name, self._dtype, tensor.shape) for tensor in tensors])
            total = sum(math.prod(tensor.shape) for tensor in tensors) * ITEM_SIZE[self._dtype]
            done, told = 0, time.monotonic()
            with ThreadPoolExecutor(THREADS) as pool:
                try:
                    for count in pool.map(lambda tensor: self._write_tensor(fd, tensor, offsets[tensor.name]), tensors):
                        done += count
                        if time.monotonic() - told > _PROGRESS_SECONDS:
                            told = time.monotonic()
                            self._report(f"{path.name}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")
                except BaseException:
                    pool.shutdown(cancel_futures=True)
                    raise
            os.fsync(fd)
            return os.fstat(fd).st_size
        finally:
            os.close(fd)

    def _write_tensor(self, fd: int, tensor: OutputTensor, offset: int) -> int:
        begin = offset
        for part in tensor.parts:
            if not part.source:
                row = math.prod(tensor.shape[1:]) * ITEM_SIZE[self._dtype]
                offset += write_all(fd, bytes((part.rows[1] - part.rows[0]) * row), offset)
            elif self._source.index[part.source].dtype == self._dtype and part.columns is None:
                offset += self._copy(fd, part, offset)
            else:
                offset += self._transform(fd, part, offset)
        return offset - begin

    def _row_bytes(self, part: Part) -> int:
        info = self._source.index[part.source]
        return math.prod(info.shape[1:]) * ITEM_SIZE[info.dtype]

    def _copy(self, fd: int, part: Part, offset: int) -> int:
        row = self._row_bytes(part)
        start, count = part.rows[0] * row, (part.rows[1] - part.rows[0]) * row
        place, done = self._source.location(part.source), 0
        while place and self._kernel_copy and done < count:
            try:
                step = os.copy_file_range(
                    place[0], fd, min(_KERNEL_BYTES, count - done), place[1] + start + done, offset + done
                )
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                step = 0
            if not step:  # another file system, an old kernel: copy through the buffer from here on
                self._kernel_copy = False
            done += step
        while done < count:
            chunk = self._buffers.raw[: min(BUFFER_BYTES, count - done)]
            self._source.read_into(part.source, start + done, chunk.data)
            done += write_all(fd, chunk.data, offset + done)
        return done

    def _transform(self, fd: int, part: Part, offset: int) -> int:
        """Cuts out columns, changes the type, or both, some rows at a time."""
        info, row, buffers = self._source.index[part.source], self._row_bytes(part), self._buffers
        buffers.grow(row)
        step, begin = max(1, len(buffers.raw) // row), offset
        for first in range(part.rows[0], part.rows[1], step):
            rows = min(step, part.rows[1] - first)
            chunk = buffers.raw[: rows * row]
            self._source.read_into(part.source, first * row, chunk.data)
            if part.columns is not None:
                left, right = (column * ITEM_SIZE[info.dtype] for column in part.columns)
                cut = buffers.cut[: rows * (right - left)]
                np.copyto(cut.reshape(rows, -1), chunk.reshape(rows, row)[:, left:right])
                chunk = cut
            if info.dtype != self._dtype:
                chunk, beyond = buffers.caster.cast(chunk, info.dtype, self._dtype)
                if beyond:
                    with self._lock:
                        self.overflows[part.source] = self.overflows.get(part.source, 0) + beyond
            offset += write_all(fd, chunk.data, offset)
        return offset - begin
