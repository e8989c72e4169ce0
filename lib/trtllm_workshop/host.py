"""The machine around the GPU: processor, memory, disks and mounts, kind of host, MPI, and installed package versions.

Readers take the folder, text or mapping they look at as an argument, so that a test can describe a made-up machine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_FLAGS = (
    "avx2", "f16c", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_tile", "amx_bf16", "amx_int8",
    "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip
PACKAGES = (
    "torch", "tensorrt_llm", "tensorrt", "transformers", "tokenizers", "huggingface_hub", "hf_transfer", "hf_xet",
    "nvidia-modelopt", "numpy", "safetensors", "mpi4py", "papermill", "jupyterlab", "ipywidgets", "trtllm-workshop",
)  # fmt: skip
RELOADED = ("numpy", "torch", "transformers", "tokenizers", "huggingface_hub", "safetensors", "tensorrt_llm")
LASTING_FILESYSTEMS = re.compile("ext[234]|xfs|btrfs|zfs|nfs4?|cifs|9p|virtiofs|lustre|ceph|fuse.*")
SYSTEM_FOLDERS = re.compile("/(etc|proc|sys|dev|run|usr|lib|lib64|bin|sbin|boot|var/lib)(/.*)?")


@dataclass(frozen=True)
class Cpu:
    """Model, cores this process may use (affinity and container limit counted) and the `CPU_FLAGS` it has."""

    model: str
    cores: int
    flags: tuple[str, ...]


@dataclass(frozen=True)
class Mount:
    """One mounted file system."""

    point: str
    filesystem: str


@dataclass(frozen=True)
class Folder:
    """A folder that a run writes to, measured at the nearest existing parent; one ``device``, one disk."""

    role: str
    path: str
    measured: str
    free_bytes: int
    total_bytes: int
    device: int
    filesystem: str | None = None


@dataclass(frozen=True)
class Mpi:
    """The MPI programs on PATH, and whether Python could import mpi4py (it is not imported)."""

    mpirun: str | None
    mpicc: str | None
    mpi4py: bool


@dataclass(frozen=True)
class StaleModule:
    """A package that pip has changed after this process loaded it."""

    name: str
    loaded: str
    installed: str


def read_cpu(root: Path = Path("/")) -> Cpu:
    """The processor from /proc/cpuinfo, as far as it can be read."""
    text = _read(root / "proc/cpuinfo")
    model = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    have = set(flags.group(1).split()) if flags else set()
    name = model.group(1) if model else platform.processor() or platform.machine()
    name = " ".join(re.sub(r"\((?:R|TM)\)|\bCPU\b|@.*", "", name).split())
    return Cpu(name, _cores(root), tuple(flag for flag in CPU_FLAGS if flag in have))


def _cores(root: Path) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(root / "sys/fs/cgroup/cpu.max").split()
    if len(quota) != 2:  # the older control groups keep the two numbers in two files
        folder = root / "sys/fs/cgroup/cpu"
        quota = [*_read(folder / "cpu.cfs_quota_us").split(), *_read(folder / "cpu.cfs_period_us").split()]
    if len(quota) == 2 and quota[0].isdecimal() and quota[1].isdecimal() and int(quota[1]):
        cores = min(cores, math.ceil(int(quota[0]) / int(quota[1])))
    return max(cores, 1)


def read_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """(total, available) bytes of RAM, a container's own limit counted; None where the system does not say."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    sizes = {name: int(kib) * 1024 for name, kib in lines}
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    if total is None and root == Path("/") and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder, limit_name, used_name, cached_name in (
        ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = (_read(root / folder / name).strip() for name in (limit_name, used_name))
        if not limit.isdecimal() or (total is not None and int(limit) >= total):
            continue
        total = int(limit)
        cached = re.search(rf"^{cached_name} (\d+)", _read(root / folder / "memory.stat"), re.MULTILINE)
        left = total - (int(used) if used.isdecimal() else 0) + (int(cached.group(1)) if cached else 0)
        available = min(left, total, available if available is not None else total)
    return total, available


def read_mounts(root: Path = Path("/")) -> list[Mount]:
    """The mounted file systems; blanks in a path are written as \\040 in the kernel's table."""
    mounts = []
    for line in _read(root / "proc/mounts").splitlines():
        cells = line.split(" ")
        if len(cells) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal.group(1), 8)), cells[1])
            mounts.append(Mount(point, cells[2]))
    return mounts


def mount_of(path: str | Path, mounts: list[Mount]) -> Mount | None:
    """The mount that holds `path`: the longest mount point above it, the last one mounted there."""
    target = Path(os.path.abspath(path))
    above = [mount for mount in mounts if target.is_relative_to(mount.point)]
    return max(reversed(above), key=lambda mount: len(Path(mount.point).parts), default=None)


def volumes(mounts: list[Mount]) -> tuple[str, ...]:
    """Mount points in a container (overlay root) that outlive it; empty outside a container."""
    root = mount_of("/", mounts)
    if root is None or root.filesystem != "overlay":
        return ()
    lasting = (mount.point for mount in mounts if LASTING_FILESYSTEMS.fullmatch(mount.filesystem))
    return tuple(point for point in dict.fromkeys(lasting) if not SYSTEM_FOLDERS.fullmatch(point))


def measure_folder(role: str, path: str | Path, mounts: list[Mount]) -> Folder | None:
    """Free space for `path`, which need not exist yet. None when no parent can be measured."""
    place = Path(os.path.abspath(os.path.expanduser(path)))
    for parent in (place, *place.parents):
        try:
            usage, device = shutil.disk_usage(parent), os.stat(parent).st_dev
        except OSError:
            continue
        mount = mount_of(parent.resolve(), mounts)
        filesystem = mount.filesystem if mount else None
        return Folder(role, str(place), str(parent), usage.free, usage.total, device, filesystem)
    return None


def hub_cache(environ: Mapping[str, str], cache_dir: str | Path | None = None) -> Path:
    """Where hub downloads land: the folder given, else HF_HUB_CACHE, HF_HOME, XDG_CACHE_HOME or the home folder."""
    if cache_dir:
        return Path(cache_dir)
    if environ.get("HF_HUB_CACHE"):
        return Path(environ["HF_HUB_CACHE"])
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]) / "hub"
    caches = environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(caches) / "huggingface" / "hub"


def shared_memory_bytes(path: str = "/dev/shm", statvfs: Callable[[str], Any] | None = None) -> int | None:
    """Size of the file system through which the processes of one machine share memory; None where there is none."""
    try:
        stat = (statvfs or os.statvfs)(path)
    except (OSError, AttributeError):
        return None
    return int(stat.f_frsize * stat.f_blocks)


def host_kind(environ: Mapping[str, str], root: Path = Path("/"), modules: Mapping[str, Any] | None = None) -> str:
    """colab, kaggle, runpod, wsl, container or plain."""
    loaded = sys.modules if modules is None else modules
    if "google.colab" in loaded or environ.get("COLAB_RELEASE_TAG") or environ.get("COLAB_GPU"):
        return "colab"
    if environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE"):
        return "kaggle"
    if environ.get("RUNPOD_POD_ID"):
        return "runpod"
    if environ.get("WSL_DISTRO_NAME") or "microsoft" in _read(root / "proc/version").lower():
        return "wsl"
    marks = (root / ".dockerenv", root / "run/.containerenv")
    groups = _read(root / "proc/1/cgroup")
    if any(mark.exists() for mark in marks) or re.search(r"docker|kubepods|containerd|libpod", groups):
        return "container"
    return "container" if environ.get("KUBERNETES_SERVICE_HOST") else "plain"


def in_notebook(modules: Mapping[str, Any] | None = None) -> bool:
    """Whether this process is a Jupyter kernel; IPython is looked at only when it is loaded already."""
    ipython = (sys.modules if modules is None else modules).get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return hasattr(shell, "kernel")


def read_mpi(environ: Mapping[str, str]) -> Mpi:
    """MPI's launcher and compiler on the given PATH."""
    path = environ.get("PATH", "")
    return Mpi(shutil.which("mpirun", path=path), shutil.which("mpicc", path=path), installed("mpi4py"))


def installed(module: str) -> bool:
    """Whether a top-level module could be imported, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def package_versions(names: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Versions of the installed packages among `names`, from their metadata; nothing is imported."""
    found = {name: _installed_version(name) for name in names}
    return {name: version for name, version in found.items() if version}


def stale_modules(
    modules: Mapping[str, Any] | None = None, version: Callable[[str], str | None] | None = None
) -> tuple[StaleModule, ...]:
    """Loaded packages whose installed version is another by now: only a restart of the process loads the new files."""
    loaded, look_up = (sys.modules if modules is None else modules), version or _installed_version
    stale = []
    for name in RELOADED:
        now = getattr(loaded.get(name), "__version__", None)
        then = look_up(name) if isinstance(now, str) else None
        if isinstance(now, str) and then and not _same_version(now, then):
            stale.append(StaleModule(name, now, then))
    return tuple(stale)


def _same_version(first: str, second: str) -> bool:
    """Equal; a build label (+cu130) counts only if both sides have one, since some wheels' metadata lack it."""
    (public_a, _, label_a), (public_b, _, label_b) = first.partition("+"), second.partition("+")
    return public_a == public_b and (label_a == label_b or not label_a or not label_b)


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
