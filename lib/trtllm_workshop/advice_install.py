"""Failures of installation, libraries and downloads: how each looks, why it happens, what to do."""

from __future__ import annotations

import re

from trtllm_workshop.advice_model import Advice, Context, Rule

TORCH = "2.9.1"
TORCH_INDEX = "https://download.pytorch.org/whl/cu130"
INSTALL_TORCH = f"pip install torch=={TORCH} --index-url {TORCH_INDEX}, then restart the kernel"


def wheel_stub(context: Context) -> Advice | None:
    """P08: the public index has only a stub, and no real wheel fits this Python."""
    match = context.search(r"wheel-stub:\s*Testing wheel (\S+) against tag (\S+)")
    if match is None and context.search(r"wheel[-_]stub|InstallFailedError") is None:
        return None
    tag = match.group(2) if match else ""
    python = re.match(r"cp(\d)(\d+)", tag)
    seen = f"; the stub looked for {tag}" if tag else ""
    if python and python.group(1) + "." + python.group(2) not in ("3.10", "3.12"):
        seen += f", which is Python {python.group(1)}.{python.group(2)}"
    cause = f"pip found a small stub that fetches the real wheel, and got none for this Python{seen}"
    fix = "make an environment with Python 3.12 (3.10 also has wheels) and let it reach https://pypi.nvidia.com"
    return Advice(cause, fix, "P08")


def torch_abi(context: Context) -> Advice | None:
    """P10: symbols of at::, c10:: or torch:: are missing, so torch is not the one the wheel was built with."""
    match = context.search(r"undefined symbol: (_ZN?K?(?:2at|3c10|5torch)\w*)")
    if match is None:
        return None
    cause = f"the installed torch is not the one TensorRT-LLM was built against (missing {match.group(1)})"
    return Advice(cause, INSTALL_TORCH, "P10")


def mpi4py(context: Context) -> Advice | None:
    """P12: pip wants to compile mpi4py and finds no MPI."""
    pattern = (
        r"Failed (?:to build|building wheel for) mpi4py|Could not build wheels for .{0,80}mpi4py|mpicc.{0,40}not found"
    )
    if context.search(pattern) is None:
        return None
    cause = "mpi4py is compiled during installation and found no MPI headers and libraries"
    return Advice(cause, "apt-get install -y libopenmpi-dev, then run pip again", "P12")


def libmpi(context: Context) -> Advice | None:
    """No Open MPI on the machine at all."""
    if context.search(r"libmpi\.so\.40: cannot open shared object file") is None:
        return None
    return Advice("Open MPI is not installed", "apt-get install -y libopenmpi-dev", "P12")


def cublas13(context: Context) -> Advice | None:
    """The wheel is linked with CUDA 13, and torch brought the libraries of CUDA 12."""
    match = context.search(r"(lib(?:cublasLt|cublas|cudart)\.so\.13): cannot open shared object file")
    if match is None:
        return None
    cause = f"{match.group(1)} is missing: TensorRT-LLM 1.2.1 needs CUDA 13, and the default torch brings CUDA 12"
    return Advice(cause, INSTALL_TORCH, "P10")


def libpython(context: Context) -> Advice | None:
    """The Python of the environment has no shared library."""
    match = context.search(r"libpython(3\.\d+)\.so\S*: cannot open shared object file")
    if match is None:
        return None
    version = match.group(1)
    cause = f"the shared library of Python {version} is not installed"
    return Advice(cause, f"apt-get install -y libpython{version} python{version}-dev")


def slurm(context: Context) -> Advice | None:
    """Debian's Open MPI under srun."""
    if context.search(r"OMPI was not built with SLURM") is None:
        return None
    return Advice("this Open MPI cannot be started by srun", "start with mpirun, or use the release container")


def turing(context: Context) -> Advice | None:
    """A T4 has no attention kernels in the 1.x releases."""
    if (
        context.search(r"AttentionOp::initialize|no (?:FMHA )?kernel image is available|Unsupported architecture.*75")
        is None
    ):
        return None
    cause = "this GPU has no kernels in TensorRT-LLM 1.x (a T4, compute capability 7.5, is the usual case)"
    return Advice(cause, "use an Ampere GPU or newer, for example A100, L4 or RTX 4090")


def hf_transfer(context: Context) -> Advice | None:
    """P20: the fast download path gives up where the plain one would resume."""
    if context.search(r"Consider disabling HF_HUB_ENABLE_HF_TRANSFER") is not None:
        cause = "the fast download (hf_transfer) was interrupted; it neither retries nor resumes"
        return Advice(
            cause, "run again with HF_HUB_ENABLE_HF_TRANSFER=0; the plain download goes on where it stopped", "P20"
        )
    if (
        context.search(r"HF_HUB_ENABLE_HF_TRANSFER=1.{0,120}(?:hf_transfer|not).{0,60}(?:available|installed)")
        is not None
    ):
        cause = "HF_HUB_ENABLE_HF_TRANSFER=1 is set, but the package hf_transfer is not installed"
        return Advice(cause, "pip install hf_transfer, or unset the variable", "P20")
    return None


def stale_numpy(context: Context) -> Advice | None:
    """P14: numpy was replaced while an older one was loaded."""
    if (
        context.search(
            r"numpy\.dtype size changed|numpy\.core\.multiarray failed to import|previously imported in this runtime"
        )
        is None
    ):
        return None
    cause = "a package was replaced after this kernel had loaded it"
    return Advice(cause, "restart the kernel now, before downloading weights", "P14")


def disk_full(context: Context) -> Advice | None:
    """P23: some folder of the run is on a full file system."""
    if context.search(r"No space left on device|Not enough free disk space") is None:
        return None
    match = re.search(r"No space left on device:? ?['\"]?([^'\"\n]+)", context.text)
    where = f" ({match.group(1).strip()})" if match and match.group(1).strip() else ""
    cause = f"a file system is full{where}; the temporary folder and the cache may lie on another one than the target"
    return Advice(
        cause, "free space there, or point TMPDIR and HF_HOME at the large disk; workshop doctor lists them", "P23"
    )


INSTALL_RULES: tuple[Rule, ...] = (
    wheel_stub,
    torch_abi,
    mpi4py,
    libmpi,
    cublas13,
    libpython,
    slurm,
    turing,
    hf_transfer,
    stale_numpy,
    disk_full,
)
