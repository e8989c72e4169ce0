"""What stands in the way on this machine: findings with a severity and one concrete fix each.

Codes are stable names for programs. "error": it will fail; "warning": it may fail or lose data; "info": good to know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtllm_workshop.host import Folder, StaleModule
from trtllm_workshop.machine import GIB, Machine
from trtllm_workshop.nvidia_smi import peer_access
from trtllm_workshop.precision import runs_tensorrt_llm

RELEASE = "1.2.1"
RELEASE_CUDA = "13.1"  # what the release container of 1.2.1 is built on; any CUDA 13 driver will do
COURSE_PYTHONS = ("3.10", "3.11", "3.12")
INSTALL_DISK = 80 * 10**9  # reports: an 80 GB disk was enough, a 32 GB disk was not
INSTALL_DISK_TOO_SMALL = 40 * 10**9
RUN_NEEDS = {"work": 4 * 10**9, "cache": 10**9, "tmp": 5 * 10**8}  # one course run on the small model, generously
RUN_MEMORY = 4 * GIB
LEAST_SHM = GIB

# The driver branch in the file name of each CUDA release's Linux installer. For CUDA 13 any 580 will do, as NVIDIA's
# page on minor version compatibility says (docs.nvidia.com/deploy/cuda-compatibility).
DRIVERS = {
    "12.0": 525, "12.1": 530, "12.2": 535, "12.3": 545, "12.4": 550, "12.5": 555, "12.6": 560, "12.8": 570, "12.9": 575,
}  # fmt: skip
DATA_CENTER = re.compile(r"\b(?:Tesla|[AHBLVTP][1-9]\d{0,2}[A-Z]?|GH200|GB[23]00|DGX)\b")
CONSUMER = re.compile(r"GeForce|RTX|GTX|TITAN|Quadro", re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """One thing to know, with severity "error", "warning" or "info", and the one thing to do about it."""

    severity: str
    code: str
    message: str
    fix: str


def wheel_pythons(release: str) -> tuple[str, ...]:
    """The Python versions that a TensorRT-LLM release has wheels for: 3.10 alone up to 0.15, then also 3.12."""
    major, minor = ([int(part) for part in re.findall(r"\d+", release)] + [0, 0])[:2]
    return ("3.10",) if (major, minor) < (0, 16) else ("3.10", "3.12")


def check_wheel(release: str, python: str) -> list[Finding]:
    """Whether pip can find a wheel of `release` for this Python; otherwise it would fail inside a source stub."""
    have, wanted = ".".join(python.split(".")[:2]), wheel_pythons(release)
    if have in wanted:
        return []
    message = f"TensorRT-LLM {release} has wheels for Python {' and '.join(wanted)} only; this is Python {python}"
    return [
        Finding("error", "python-wheel", message, f"make an environment with Python {wanted[-1]} (environment.yml)")
    ]


def is_data_center(gpu_name: str) -> bool:
    """Whether the card is a data-centre one (A100, L40S, H200 ...), on which CUDA's compatibility packages work."""
    return bool(DATA_CENTER.search(gpu_name)) and not CONSUMER.search(gpu_name)


def driver_for(cuda: str) -> int | None:
    """The oldest driver branch for a CUDA release, None for one that is not in the table."""
    return 580 if cuda.split(".")[0] == "13" else DRIVERS.get(".".join(cuda.split(".")[:2]))


def check_driver(driver: str | None, gpu_name: str, cuda: str) -> list[Finding]:
    """Whether `driver` is new enough for software built on `cuda`: a warning on data-centre cards, else refused."""
    need = driver_for(cuda)
    branch = (driver or "").split(".")[0]
    if need is None or not branch.isdecimal():
        message = f"cannot tell whether driver {driver or 'unknown'} runs CUDA {cuda}"
        return [Finding("warning", "driver", message, "run nvidia-smi and compare its CUDA version")]
    if int(branch) >= need:
        return []
    message = f"driver {driver} is too old for CUDA {cuda}, which needs branch {need}"
    if is_data_center(gpu_name):
        fix = f"update the driver to {need} or newer, or install NVIDIA's CUDA forward-compatibility package"
        return [Finding("warning", "driver", f"{message}; on {gpu_name} a compatibility package can help", fix)]
    message += f"; NVIDIA's compatibility package is for data-centre cards and does not help on {gpu_name}"
    return [Finding("error", "driver", message, f"choose a pod or host with driver >= {need}, or an older image")]


def check_space(folders: Sequence[Folder], needs: Mapping[str, int]) -> list[Finding]:
    """Names the folder whose disk is too small for `needs` (role -> bytes); folders on one disk are added up."""
    findings = []
    for device in dict.fromkeys(folder.device for folder in folders):
        here = [folder for folder in folders if folder.device == device and needs.get(folder.role)]
        need = sum(needs[folder.role] for folder in here)
        if not here or need <= (free := min(folder.free_bytes for folder in here)):
            continue
        roles = " and ".join(f"the {folder.role} folder {folder.path}" for folder in here)
        message = (
            f"too little space for {roles}: {need / 1e9:.1f} GB needed, {free / 1e9:.1f} GB free "
            f"(measured at {here[0].measured})"
        )
        fix = {"work": "give --work-dir on a larger disk", "cache": "set HF_HOME to a folder on a larger disk"}
        findings.append(
            Finding("error", "disk", message, fix.get(here[0].role, "set TMPDIR to a folder on a larger disk"))
        )
    return findings


def check_cache_volume(cache: Folder | None, volumes: Sequence[str]) -> list[Finding]:
    """In a container with a volume: whether the model cache lies on the volume or vanishes with the container."""
    if cache is None or not volumes or cache.filesystem != "overlay":
        return []
    message = f"models are cached in {cache.path}, which is deleted with the container; {volumes[0]} outlives it"
    return [Finding("warning", "cache-volume", message, f"export HF_HOME={volumes[0].rstrip('/')}/huggingface")]


def check_mpi(mpicc: str | None, mpi4py: bool) -> list[Finding]:
    """TensorRT-LLM always needs mpi4py, also on one GPU, and pip builds it with the MPI compiler."""
    if mpicc or mpi4py:
        return []
    message = "mpicc is not on PATH, so pip cannot build mpi4py, which TensorRT-LLM needs also on one GPU"
    return [
        Finding(
            "error", "mpi", message, "install OpenMPI dev before pip: apt-get install -y libopenmpi-dev openmpi-bin"
        )
    ]


def check_stale(stale: Sequence[StaleModule], in_notebook: bool) -> list[Finding]:
    """Packages that were replaced on disk while this process has the old ones loaded."""
    if not stale:
        return []
    changed = ", ".join(f"{item.name} {item.loaded} is loaded, {item.installed} is installed" for item in stale)
    what = "the kernel (Runtime > Restart session on Colab)" if in_notebook else "this Python process"
    return [Finding("error", "restart", f"restart now: {changed}", f"restart {what} before any download")]


def check_shm(machine: Machine) -> list[Finding]:
    """Whether /dev/shm, through which NCCL and worker processes exchange data, has a useful size."""
    if machine.shm is None or machine.shm >= LEAST_SHM:
        return []
    message = f"/dev/shm has {machine.shm / 2**20:.0f} MB; NCCL's 'internal error' in containers can come from that"
    severity = "warning" if machine.gpus else "info"
    return [Finding(severity, "shm", message, "start the container with --ipc=host or --shm-size=1g")]


def check_links(machine: Machine) -> list[Finding]:
    """Pairs of GPUs that most likely cannot reach each other's memory directly."""
    if machine.links is None:
        return []
    count = min(len(machine.gpus), len(machine.links.gpus))
    pairs = [(a, b) for a in range(count) for b in range(a + 1, count)]
    slow = [(a, b) for a, b in pairs if peer_access(machine.links.between(a, b), machine.gpus[a].name) is False]
    if not slow:
        return []
    a, b = slow[0]
    message = (
        f"GPU{a} and GPU{b} are connected by {machine.links.between(a, b)}: most likely no direct access to each "
        f"other's memory ({len(slow)} of {len(pairs)} pairs), so tensor parallelism exchanges data through the host"
    )
    fix = "keep a model that fits on one GPU on one GPU; if NCCL hangs, set NCCL_P2P_DISABLE=1 for the run"
    return [Finding("info", "p2p", message, fix)]


def preflight_tensorrt_llm(machine: Machine, release: str = RELEASE, cuda: str = RELEASE_CUDA) -> list[Finding]:
    """What would make an installation of TensorRT-LLM fail, found before pip starts; no "error" means go ahead."""
    findings = check_wheel(release, machine.python)
    if not machine.system.startswith("Linux"):
        findings.append(
            Finding("error", "system", f"TensorRT-LLM runs on Linux; this is {machine.system}", "use Linux")
        )
    if machine.gpu_problem:
        findings.append(_gpu_problem(machine.gpu_problem))
    elif not machine.gpus:
        fix = "choose a machine with an NVIDIA GPU of the Ampere generation or newer"
        findings.append(Finding("error", "no-gpu", "no NVIDIA GPU found", fix))
    else:
        findings += check_driver(machine.driver_version, machine.gpus[0].name, cuda)
    for gpu in machine.gpus:
        runs = runs_tensorrt_llm(gpu.compute_capability)
        if not runs.supported:
            severity, start = ("error", "cannot run") if runs.supported is False else ("warning", "may not run")
            message = f"GPU {gpu.index} ({gpu.name}) {start} TensorRT-LLM {release}: {runs.reason}"
            findings.append(Finding(severity, "compute-capability", message, "choose Ampere (A100, A10) or newer"))
    work = machine.folder("work")
    if work and work.free_bytes < INSTALL_DISK:
        severity = "error" if work.free_bytes < INSTALL_DISK_TOO_SMALL else "warning"
        message = (
            f"{work.free_bytes / 1e9:.0f} GB free at {work.measured}: installing TensorRT-LLM filled a 32 GB disk, "
            "80 GB was enough"
        )
        findings.append(Finding(severity, "install-disk", message, "take a disk of 80 GB or more"))
    return findings + check_mpi(machine.mpi.mpicc, machine.mpi.mpi4py)


def doctor(machine: Machine) -> list[Finding]:
    """All findings for running the course here, errors first.

    What only rules out the real TensorRT-LLM is a warning as long as it is not installed: the reference toolchain runs.
    """
    findings = check_space(machine.folders, RUN_NEEDS)
    if ".".join(machine.python.split(".")[:2]) not in COURSE_PYTHONS:
        message = f"the course needs Python {COURSE_PYTHONS[0]} to {COURSE_PYTHONS[-1]}; this is {machine.python}"
        findings.append(Finding("error", "python", message, "make the environment with Python 3.12"))
    if machine.ram_available is not None and machine.ram_available < RUN_MEMORY:
        message = f"{machine.ram_available / GIB:.1f} GB of memory is available, a full run may take up to 4 GB"
        findings.append(Finding("warning", "memory", message, "close other programs, or run with the smoke profile"))
    if machine.gpu_problem:
        findings.append(_gpu_problem(machine.gpu_problem))
    elif not machine.gpus:
        message = "no NVIDIA GPU found; the reference toolchain will be used"
        fix = "nothing to do for the course; TensorRT-LLM itself needs an NVIDIA GPU, Ampere or newer"
        findings.append(Finding("info", "no-gpu", message, fix))
    else:
        installed = "tensorrt_llm" in machine.packages
        for found in preflight_tensorrt_llm(machine):
            if installed and found.code in ("install-disk", "mpi"):
                continue
            severity = "warning" if found.severity == "error" and not installed else found.severity
            findings.append(Finding(severity, found.code, found.message, found.fix))
    if machine.gpus and machine.visible_devices is not None and machine.visible_devices.strip() in ("", "-1"):
        message = f"CUDA_VISIBLE_DEVICES={machine.visible_devices!r} hides every GPU from CUDA programs"
        findings.append(Finding("warning", "hidden-gpus", message, "unset CUDA_VISIBLE_DEVICES"))
    for gpu in machine.gpus:
        if gpu.mig:
            message = (
                f"GPU {gpu.index} ({gpu.name}) is split by MIG: a program gets one slice, not the memory shown here"
            )
            fix = "list the slices with nvidia-smi -L and set CUDA_VISIBLE_DEVICES to the UUID of one"
            findings.append(Finding("warning", "mig", message, fix))
        if gpu.memory_total_mib is None:
            message = f"GPU {gpu.index} ({gpu.name}) does not report its memory; fit checks cannot decide"
            findings.append(Finding("info", "gpu-memory", message, "supply the size that the GPU may use"))
    findings += check_cache_volume(machine.folder("cache"), machine.volumes)
    findings += check_stale(machine.stale, machine.in_notebook)
    findings += check_shm(machine) + check_links(machine)
    return sorted(findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def _gpu_problem(problem: str) -> Finding:
    if "driver and library differ" in problem:
        fix = "reboot (or reload the NVIDIA kernel modules); in a container, restart it after the host's driver update"
    elif "not loaded" in problem:
        fix = "load or install the NVIDIA driver on the host; start a container with --gpus all"
    else:
        fix = "run nvidia-smi by hand and solve what it reports"
    return Finding("error", "gpu-unusable", problem, fix)
