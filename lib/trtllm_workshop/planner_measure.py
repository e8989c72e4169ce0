"""This machine as an entry of the GPU table: how fast it copies memory and multiplies matrices, measured now.

torch is used when it can be imported (on a CUDA GPU if there is one), numpy otherwise; both are imported only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trtllm_workshop.planner_gpus import Gpu, PlanProblem

COPY_BYTES = 128 * 2**20
WIDTH = {"cuda": 8192, "cpu": 1536}
REPEATS = 5


def measure(threads: int | None = None, backend: str | None = None) -> tuple[Gpu, float, str]:
    """(this machine, bytes that other processes hold of its GPU, what was measured in words).

    `threads` limits a CPU's matrix products and copies (a rank of several gets one). `backend` is "torch" or "numpy",
    None takes what is there. Rates are the best of a few repeats: what the machine can do, not what it did while busy.
    """
    try:
        if backend in (None, "torch"):
            import torch

            return _with_torch(torch, threads)
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


def _with_torch(torch: Any, threads: int | None) -> tuple[Gpu, float, str]:
    cuda = torch.cuda.is_available()
    device, before = ("cuda" if cuda else "cpu"), torch.get_num_threads()
    if threads and not cuda:
        torch.set_num_threads(threads)
    try:
        used_threads = torch.get_num_threads()
        source = torch.ones(COPY_BYTES * (8 if cuda else 1), dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        wait = torch.cuda.synchronize if cuda else _nothing
        copy = 2 * source.numel() / _best(lambda: (target.copy_(source), wait()))
        rates = {}
        for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16 if cuda else torch.bfloat16)):
            width = WIDTH[device]
            left = torch.ones((width, width), dtype=dtype, device=device)
            rates[name] = 2 * width**3 / _best(lambda matrix=left: (matrix @ matrix, wait()))  # type: ignore[misc]
    finally:
        torch.set_num_threads(before)
    if cuda:
        free, total = torch.cuda.mem_get_info()
        own = torch.cuda.memory_reserved()
        name, others = torch.cuda.get_device_name(), float(max(0, total - free - own))
        said = "CUDA"
    else:
        total, name, others = _ram(), "this machine's processor", 0.0
        said = f"{used_threads} thread{'s' if used_threads > 1 else ''}"
    return _gpu(name, total, copy, rates), others, _words(copy, rates, said)


def _nothing() -> None:
    """Nothing to wait for: a CPU's work is done when the call is back."""


def _with_numpy() -> tuple[Gpu, float, str]:
    import numpy as np

    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    copy = 2 * COPY_BYTES / _best(lambda: np.copyto(target, source))
    left = np.ones((WIDTH["cpu"], WIDTH["cpu"]), np.float32)
    rate = 2 * WIDTH["cpu"] ** 3 / _best(lambda: left @ left)
    rates = {"fp32": rate, "fp16": rate}  # numpy has no fast 16-bit products: 32-bit ones stand in
    return _gpu("this machine's processor", _ram(), copy, rates), 0.0, _words(copy, rates, "numpy")


def _gpu(name: str, memory: float, copy: float, rates: dict[str, float]) -> Gpu:
    """The link is that of a copy until `with_link` puts a measured one in its place."""
    return Gpu(name, memory, copy, rates, copy, "pcie", None, "measured here")


def _ram() -> float:
    """Bytes of main memory that are free for use now."""
    import psutil

    return float(psutil.virtual_memory().available)


def _words(copy: float, rates: dict[str, float], how: str) -> str:
    products = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items())
    return f"Measured here ({how}): copy {copy / 1e9:.1f} GB/s, matrix products {products}."


def with_link(gpu: Gpu, ranks: int) -> tuple[Gpu, float, str]:
    """(the machine with its measured link, seconds that ranks wait for each other each time, both in words)."""
    from trtllm_workshop.planner_link import measure_link

    found = measure_link(ranks)
    said = (
        f"{ranks} processes add up a token's values in {1e6 * found.message_seconds:.0f} µs, and send "
        f"{found.bytes_per_second / 1e9:.2f} GB/s of 16-bit values. Rates of one rank are those of one thread while the others "
        "rest: on fewer cores than ranks, and where the memory is shared, it will be slower."
    )
    return replace(gpu, link=found.bytes_per_second), found.message_seconds, said
