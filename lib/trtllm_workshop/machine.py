"""What this machine is: GPUs, driver, CUDA, links, processor, memory, disks, Python, MPI and the kind of host."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop import host, nvidia_smi
from trtllm_workshop.gpu import Gpu, GpuReport, load_nvml, memory_fit, read_nvml
from trtllm_workshop.host import Cpu, Folder, Mpi, StaleModule
from trtllm_workshop.nvidia_smi import Links, Runner
from trtllm_workshop.precision import Support, precision_support

__all__ = ["Gpu", "Machine", "Support", "detect", "machine_line", "memory_fit", "precision_support"]

GIB = 1024**3


@dataclass(frozen=True)
class Machine:
    """Everything `detect` found. None means unknown; sizes are bytes unless a name ends in mib."""

    gpus: tuple[Gpu, ...]
    driver_version: str | None
    cuda_version: str | None
    gpu_problem: str | None
    gpu_source: str
    visible_devices: str | None
    links: Links | None
    cpu: Cpu
    ram_total: int | None
    ram_available: int | None
    folders: tuple[Folder, ...]
    volumes: tuple[str, ...]
    shm: int | None
    system: str
    python: str
    in_notebook: bool
    host: str
    mpi: Mpi
    packages: dict[str, str]
    stale: tuple[StaleModule, ...]

    @property
    def least_gpu_memory_mib(self) -> int | None:
        """Memory of the smallest GPU; None without a GPU or when one of them does not report its size."""
        sizes = [gpu.memory_total_mib for gpu in self.gpus]
        return min((size for size in sizes if size), default=None) if all(sizes) else None

    @property
    def total_gpu_memory_mib(self) -> int | None:
        """Memory of all GPUs together; None without a GPU or when one of them does not report its size."""
        sizes = [gpu.memory_total_mib for gpu in self.gpus if gpu.memory_total_mib]
        return sum(sizes) if sizes and len(sizes) == len(self.gpus) else None

    def folder(self, role: str) -> Folder | None:
        """The measured folder of a role: "work", "cache" or "tmp"."""
        return next((folder for folder in self.folders if folder.role == role), None)

    def summary(self) -> str:
        """One line for a report: processor, memory, GPUs, driver, Python and host kind."""
        driver = f", driver {self.driver_version}" if self.driver_version else ""
        return f"{machine_line(self)}{driver}, {self.system}, Python {self.python}, {self.host} host"

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `json.dumps` accepts, with the line of `summary` and the precision table of every GPU."""
        precision = {}
        for gpu in self.gpus:
            table = precision_support(gpu.compute_capability)
            precision[str(gpu.index)] = {name: asdict(support) for name, support in table.items()}
        return {**asdict(self), "summary": self.summary(), "precision": precision}


def machine_line(machine: Machine | None = None) -> str:
    """Short text to print beside a measured number, such as "AMD EPYC, 2 cores, 24 GB, no GPU"."""
    machine = machine or detect()
    parts = [machine.cpu.model, f"{machine.cpu.cores} core{'s' if machine.cpu.cores != 1 else ''}"]
    if machine.ram_total:
        parts.append(f"{machine.ram_total / GIB:.0f} GB")
    names: dict[str, int] = {}
    for gpu in machine.gpus:
        size = f" {gpu.memory_total_mib / 1024:.0f} GB" if gpu.memory_total_mib else ""
        names[gpu.name + size] = names.get(gpu.name + size, 0) + 1
    parts.extend(f"{count} x {name}" for name, count in names.items())
    return ", ".join(parts if names else [*parts, "no GPU"])


def detect(
    work_dir: str | Path | None = None,
    runner: Runner = nvidia_smi.run_command,
    nvml: Callable[[], Any] = load_nvml,
    *,
    cache_dir: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Machine:
    """Describes this machine; imports no heavy package and never raises for a broken driver.

    `work_dir`: the run's folder (default ``work``); `cache_dir`: an explicit hub cache, which wins over HF_HOME.
    `runner` runs nvidia-smi, `nvml` returns the pynvml module or None, `root` is where /proc and /sys are looked up.
    """
    env = os.environ if environ is None else environ
    report = _gpus(runner, nvml)
    mounts = host.read_mounts(root)
    places: dict[str, str | Path] = {"work": work_dir or "work", "cache": host.hub_cache(env, cache_dir)}
    places["tmp"] = env.get("TMPDIR") or tempfile.gettempdir()
    folders = (host.measure_folder(role, path, mounts) for role, path in places.items())
    topology = runner(["nvidia-smi", "topo", "-m"]) if len(report.gpus) > 1 else None
    ram_total, ram_available = host.read_memory(root)
    return Machine(
        gpus=report.gpus,
        driver_version=report.driver_version,
        cuda_version=report.cuda_version,
        gpu_problem=report.problem,
        gpu_source=report.source,
        visible_devices=env.get("CUDA_VISIBLE_DEVICES"),
        links=nvidia_smi.parse_topology(topology.text) if topology and topology.returncode == 0 else None,
        cpu=host.read_cpu(root),
        ram_total=ram_total,
        ram_available=ram_available,
        folders=tuple(folder for folder in folders if folder is not None),
        volumes=host.volumes(mounts),
        shm=host.shared_memory_bytes(),
        system=f"{platform.system()} {platform.machine()}",
        python=".".join(map(str, sys.version_info[:3])),
        in_notebook=host.in_notebook(),
        host=host.host_kind(env, root),
        mpi=host.read_mpi(env),
        packages=host.package_versions(),
        stale=host.stale_modules(),
    )


def _gpus(runner: Runner, nvml: Callable[[], Any]) -> GpuReport:
    """NVML first; nvidia-smi where NVML is missing, does not start or lists nothing."""
    first = read_nvml(nvml)
    if first.gpus:
        return first
    second = nvidia_smi.query(runner)
    if second.gpus or second.problem or first.source == "NVML":
        return second
    # Without nvidia-smi there is most likely no NVIDIA driver at all, and NVML's "library not found" is not a problem.
    known = first.problem and ("driver and library differ" in first.problem or "not loaded" in first.problem)
    return first if known else GpuReport()
