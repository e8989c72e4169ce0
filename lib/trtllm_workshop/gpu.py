"""One GPU as the driver describes it, read through NVML (package ``nvidia-ml-py``, module ``pynvml``)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trtllm_workshop.precision import Support

MIB = 1024 * 1024


@dataclass(frozen=True)
class Gpu:
    """One GPU. None always means "the driver does not say", never 0: parts with unified memory report no size at all.

    ``compute_capability`` is text such as "8.9"; ``mig`` is whether Multi-Instance GPU mode is on; memory is in MiB.
    """

    index: int
    name: str
    memory_total_mib: int | None = None
    memory_free_mib: int | None = None
    compute_capability: str | None = None
    mig: bool | None = None
    driver_version: str | None = None

    def describe(self) -> str:
        """Name, memory in GiB and compute capability, with "unknown" where the driver is silent."""
        memory = f"{self.memory_total_mib / 1024:.0f} GiB" if self.memory_total_mib else "memory unknown"
        return f"{self.name} ({memory}, compute capability {self.compute_capability or 'unknown'})"


@dataclass(frozen=True)
class GpuReport:
    """What one way of asking found; ``problem`` says why a GPU that may be there cannot be used."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_version: str | None = None
    problem: str | None = None
    source: str = "none"


def memory_fit(gpu: Gpu, need_mib: float, total_mib: float | None = None) -> Support:
    """Whether `need_mib` fits on `gpu`; supported is None when the size is unknown and no `total_mib` is supplied."""
    size = total_mib or gpu.memory_total_mib
    if not size:
        return Support(
            None,
            f"cannot decide: {gpu.name} does not report its memory (it may share the system's RAM); "
            "supply the size that this GPU may use",
        )
    verdict = "fits into" if need_mib <= size else "does not fit into"
    return Support(need_mib <= size, f"{need_mib:.0f} MiB {verdict} the {size:.0f} MiB of {gpu.name}")


def load_nvml() -> Any:
    """The ``pynvml`` module, or None where nvidia-ml-py is not installed."""
    try:
        import pynvml
    except ImportError:
        return None
    return pynvml


def read_nvml(load: Callable[[], Any] = load_nvml) -> GpuReport:
    """Every GPU that NVML lists. A field that it cannot answer is None; a library that does not start is a problem."""
    nvml = load()
    if nvml is None:
        return GpuReport()
    try:
        nvml.nvmlInit()
    except Exception as error:  # each NVML failure is a class of its own, and a stub library raises yet another
        return GpuReport(problem=explain(str(error)))
    try:
        driver = _text(_ask(nvml, "nvmlSystemGetDriverVersion"))
        count = _ask(nvml, "nvmlDeviceGetCount") or 0
        gpus = [gpu for gpu in (_read_one(nvml, index, driver) for index in range(count)) if gpu is not None]
        return GpuReport(tuple(gpus), driver, _cuda_version(_ask(nvml, "nvmlSystemGetCudaDriverVersion")), None, "NVML")
    finally:
        with contextlib.suppress(Exception):
            nvml.nvmlShutdown()


def explain(text: str, returncode: int | None = None) -> str:
    """Why no GPU can be used, from the text (and exit status) of nvidia-smi or the message of an NVML error."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    lower = text.lower()
    if "version mismatch" in lower or returncode == 18:
        detail = f" ({lines[-1]})" if len(lines) > 1 else ""
        return f"no usable GPU: driver and library differ{detail}"
    if "couldn't communicate" in lower or "driver not loaded" in lower or returncode == 9:
        return "no usable GPU: the NVIDIA driver is not loaded or not reachable"
    if "no devices were found" in lower or returncode == 6:
        return "no usable GPU: the driver runs but finds no device"
    first = lines[0] if lines else "no message"
    return f"no usable GPU: {first}" + (f" (nvidia-smi ended with code {returncode})" if returncode else "")


def _ask(nvml: Any, function: str, *arguments: Any) -> Any:
    """One NVML answer or None: on MIG slices, virtual GPUs and unified memory only single questions fail."""
    try:
        return getattr(nvml, function)(*arguments)
    except Exception:
        return None


def _read_one(nvml: Any, index: int, driver: str | None) -> Gpu | None:
    handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    memory = _ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle)
    mig = _ask(nvml, "nvmlDeviceGetMigMode", handle)
    return Gpu(
        index=index,
        name=_text(_ask(nvml, "nvmlDeviceGetName", handle)) or "unnamed GPU",
        memory_total_mib=_mib(memory, "total"),
        memory_free_mib=_mib(memory, "free") if _mib(memory, "total") else None,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else None,
        mig=bool(mig[0]) if mig else None,
        driver_version=driver,
    )


def _mib(memory: Any, part: str) -> int | None:
    """MiB of a memory record. A total of 0 comes from unified-memory parts and means unknown."""
    value = getattr(memory, part, None)
    if value is None or (part == "total" and value <= 0):
        return None
    return int(value) // MIB


def _text(value: Any) -> str | None:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return str(value) if value is not None else None


def _cuda_version(number: int | None) -> str | None:
    """NVML packs the version as 1000 * major + 10 * minor."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None
