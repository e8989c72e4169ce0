"""This machine as an entry of the GPU table: how fast it copies and reads memory and multiplies matrices, measured now.

torch is used when it can be imported (on a CUDA GPU if there is one), numpy otherwise; both are imported only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trtllm_workshop.planner_gpus import Gpu, PlanProblem
from trtllm_workshop.planner_speed import MEASURED_RATES, Constants

COPY_BYTES = 128 * 2**20
WIDTH = {"cuda": 8192, "cpu": 1536}
REPEATS = 5
# Operations that a layer of the reference engine's graph runs on a processor: 623 nodes for 30 layers.
OPERATIONS = 20


@dataclass(frozen=True)
class Measured:
    """This machine: `gpu` with measured rates, bytes that other processes hold of it, constants to predict with, and all of
    it in words. `gpu.bandwidth` is the rate at which a matrix is read for one token, which is what generating waits for."""

    gpu: Gpu
    used_by_others: float
    constants: Constants
    words: str


def measure(dtype: str = "float32", threads: int | None = None, backend: str | None = None) -> Measured:
    """Measures with weights of `dtype`; types that only some engines have are measured as 16-bit ones.

    `threads` limits a processor's work (a rank of several gets one). `backend` is "torch" or "numpy", None takes what is
    there. Rates are the best of a few repeats: what the machine can do, not what it did while busy.
    """
    try:
        if backend in (None, "torch"):
            import torch

            return _with_torch(torch, dtype, threads)
    except ImportError:
        if backend:
            raise PlanProblem("torch cannot be imported here: leave it out, numpy measures as well") from None
    return _with_numpy()


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few runs, after one that warms up."""
    run()
    found = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin)
    return max(min(found), 1e-9)


def _with_torch(torch: Any, dtype: str, threads: int | None) -> Measured:
    cuda = torch.cuda.is_available()
    device, before = ("cuda" if cuda else "cpu"), torch.get_num_threads()
    if threads and not cuda:
        torch.set_num_threads(threads)
    try:
        used_threads = torch.get_num_threads()
        wait = torch.cuda.synchronize if cuda else _nothing
        amount, width = COPY_BYTES * (8 if cuda else 1), WIDTH[device]
        copy = 2 * amount / _best_copy(torch, amount, device, wait)
        kinds = {"fp32": torch.float32, "fp16": torch.float16 if cuda else torch.bfloat16}
        rates = {}
        for name, kind in kinds.items():
            square = torch.ones((width, width), dtype=kind, device=device)
            rates[name] = 2 * width**3 / _best(lambda left=square: (left @ left, wait()))  # type: ignore[misc]
        kind = kinds["fp32" if dtype == "float32" else "fp16"]
        # As a model's matrices lie in memory: many that do not fit into a cache together, each read once per token.
        count = max(1, amount // (width * width * torch.empty(0, dtype=kind).element_size()))
        matrices = [torch.ones((width, width), dtype=kind, device=device) for _ in range(count)]
        token = torch.ones((1, width), dtype=kind, device=device)
        each = width * width * matrices[0].element_size()
        read = (
            count * each / _best(lambda: ([torch.nn.functional.linear(token, matrix) for matrix in matrices], wait()))
        )
        small = torch.ones(64, device=device)
        operation = _best(lambda: [small + small for _ in range(500)]) / 500
    finally:
        torch.set_num_threads(before)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        others = float(max(0, total - free - torch.cuda.memory_reserved()))
        words = _words("CUDA", copy, read, rates)
        return Measured(_gpu(torch.cuda.get_device_name(), total, read, rates), others, MEASURED_RATES, words)
    said = f"{used_threads} thread{'s' if used_threads > 1 else ''}"
    constants = replace(MEASURED_RATES, layer_seconds=OPERATIONS * operation)
    return Measured(
        _gpu("this machine's processor", _ram(), read, rates), 0.0, constants, _words(said, copy, read, rates)
    )


def _best_copy(torch: Any, amount: int, device: str, wait: Callable[[], Any]) -> float:
    """Seconds of copying so many bytes; the two buffers are gone afterwards."""
    source = torch.ones(amount, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _best(lambda: (target.copy_(source), wait()))


def _nothing() -> None:
    """Nothing to wait for: a processor's work is done when the call is back."""


def _with_numpy() -> Measured:
    import numpy as np

    width = WIDTH["cpu"]
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    copy = 2 * COPY_BYTES / _best(lambda: np.copyto(target, source))
    square, token = np.ones((width, width), np.float32), np.ones(width, np.float32)
    rate = 2 * width**3 / _best(lambda: square @ square)
    count = max(1, COPY_BYTES // square.nbytes)
    matrices = [square.copy() for _ in range(count)]
    read = count * square.nbytes / _best(lambda: [matrix @ token for matrix in matrices])
    rates = {"fp32": rate, "fp16": rate}  # numpy has no fast 16-bit products: 32-bit ones stand in
    return Measured(
        _gpu("this machine's processor", _ram(), read, rates), 0.0, MEASURED_RATES, _words("numpy", copy, read, rates)
    )


def _gpu(name: str, memory: float, read: float, rates: dict[str, float]) -> Gpu:
    """The link is that of reading memory until `with_link` puts a measured one in its place."""
    return Gpu(name, memory, read, rates, read, "pcie", None, "measured here")


def _ram() -> float:
    """Bytes of main memory that are free for use now."""
    import psutil

    return float(psutil.virtual_memory().available)


def _words(how: str, copy: float, read: float, rates: dict[str, float]) -> str:
    products = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items())
    return (
        f"Measured here ({how}): copying {copy / 1e9:.1f} GB/s, reading weights for one token {read / 1e9:.1f} GB/s, matrix "
        f"products {products}. The best of a few tries: a busy machine and the work between the products come on top."
    )


def with_link(measured: Measured, ranks: int) -> Measured:
    """The same machine with the link of so many processes, which are started for that and end."""
    from trtllm_workshop.planner_link import measure_link

    found = measure_link(ranks)
    said = (
        f"{ranks} processes add up a token's values in {1e6 * found.message_seconds:.0f} µs, and send "
        f"{found.bytes_per_second / 1e9:.2f} GB/s of 16-bit values. Rates of one rank are those of one thread while the others "
        "rest: on fewer cores than ranks, and where the memory is shared, it will be slower."
    )
    return replace(
        measured,
        gpu=replace(measured.gpu, link=found.bytes_per_second),
        constants=replace(measured.constants, message_seconds=found.message_seconds),
        words=f"{measured.words} {said}",
    )
