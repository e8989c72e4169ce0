"""Installs TensorRT-LLM on a GPU machine, in an environment of its own. Standard library only: it runs before any package.

A notebook's first cell calls :func:`prepare`; by hand it is ``python -m trtllm_workshop.install_gpu``. The kernel's own
packages stay as they are: TensorRT-LLM wants an older numpy and transformers than Colab has loaded, and exchanging them
under a running kernel breaks it. The versions come from data/tensorrt_llm_pins.json.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes.util
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH_INDEX = "https://download.pytorch.org/whl/cu130"  # the default index has torch for CUDA 12 only
NVIDIA_INDEX = "https://pypi.nvidia.com"  # PyPI itself has a small stub that fetches the real wheel from here
EXAMPLES = "https://github.com/NVIDIA/TensorRT-LLM.git"  # the wheel does not carry convert_checkpoint.py and its like
CHECKOUT = Path(__file__).resolve().parents[2]
SWITCH = "TRTLLM_WORKSHOP_INSTALL"
DISK_REFUSED_GB = 32  # an installation ran out of 32 GB in a report
# What a kernel needs to import, and the requirement that brings it (tests/test_pins.py compares with pyproject.toml).
KERNEL_PACKAGES = {
    "huggingface_hub": "huggingface-hub>=0.34",
    "ipywidgets": "ipywidgets>=8.1",
    "jinja2": "jinja2>=3.1",
    "matplotlib": "matplotlib>=3.8",
    "nbformat": "nbformat>=5.10",
    "numpy": "numpy>=1.26",
    "papermill": "papermill>=2.6",
    "psutil": "psutil>=5.9",
    "pynvml": "nvidia-ml-py>=12.560",
    "safetensors": "safetensors>=0.4.5",
    "tokenizers": "tokenizers>=0.22",
    "tqdm": "tqdm>=4.66",
    "yaml": "pyyaml>=6.0",
}
# The reference toolchain runs in the kernel's Python; with TensorRT-LLM these live in its own environment.
REFERENCE_PACKAGES = {
    "gguf": "gguf>=0.17",
    "ml_dtypes": "ml-dtypes>=0.5",
    "onnx": "onnx>=1.17",
    "torch": "torch>=2.9",
    "transformers": "transformers>=4.57",
}


class CannotInstall(RuntimeError):
    """A step failed. The text has the command, the last lines of its output, and what to do next."""


@dataclass(frozen=True)
class Gpu:
    """One row of nvidia-smi; ``capability`` is (major, minor), None when the driver does not tell it."""

    name: str
    driver: str
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Decision:
    """What to do on this machine and why. ``action``: ready, install, offer, or reference (no TensorRT-LLM here)."""

    action: str
    reason: str


def load_pins() -> dict[str, Any]:
    """The versions that TensorRT-LLM asks for, from the package's data."""
    path = Path(__file__).with_name("data") / "tensorrt_llm_pins.json"
    pins: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return pins


def constraints(pins: dict[str, Any]) -> list[str]:
    """The lines of the pip constraints file; constraints-gpu.txt holds the same for people who use conda."""
    packages = pins["packages"]
    held = [f"torch=={packages['torch']['version']}+cu130"]
    for name in ("transformers", "nvidia-modelopt", "numpy", "setuptools"):
        held.append(name + packages[name]["requires"])
    return [*held, "huggingface-hub<1.0"]


def host() -> str:
    """``colab``, ``runpod``, ``kaggle`` or an empty text for any other machine."""
    with contextlib.suppress(ImportError, ValueError):
        if importlib.util.find_spec("google.colab") is not None:
            return "colab"
    if os.environ.get("RUNPOD_POD_ID"):
        return "runpod"
    return "kaggle" if os.environ.get("KAGGLE_KERNEL_RUN_TYPE") else ""


def query_gpus() -> tuple[list[Gpu], str]:
    """The GPUs, or none and the reason. The exit code comes first: nvidia-smi prints its failures where rows belong."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return [], "no NVIDIA GPU here (there is no nvidia-smi)"
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi did not answer: {error}"
    if result.returncode:
        said = (result.stdout + result.stderr).strip().splitlines() or ["no word"]
        return [], f"no usable GPU: nvidia-smi ended with code {result.returncode}: {said[0]}"
    gpus = []
    for row in result.stdout.strip().splitlines():
        name, driver, capability = ([part.strip() for part in row.split(",")] + ["", ""])[:3]
        match = re.fullmatch(r"(\d+)\.(\d+)", capability)
        gpus.append(Gpu(name, driver, (int(match[1]), int(match[2])) if match else None))
    return gpus, "" if gpus else "nvidia-smi lists no GPU"


def decide(gpus: list[Gpu], problem: str, where: str, switch: str = "", installed: str = "") -> Decision:
    """Whether to install, from the facts alone. ``switch`` is the value of TRTLLM_WORKSHOP_INSTALL: 1, 0 or empty."""
    pins = load_pins()
    version, minimum = pins["target_version"], pins["cuda"]["driver_minimum"]
    if not gpus:
        hint = {"colab": " For a GPU: Runtime > Change runtime type > A100, then run all cells again."}.get(where, "")
        return Decision("reference", problem + "." + hint)
    gpu = gpus[0]
    floor = tuple(int(part) for part in pins["compute_capability_minimum"]["value"].split("."))
    if gpu.capability is not None and gpu.capability < floor:
        have = ".".join(map(str, gpu.capability))
        return Decision(
            "reference",
            f"{gpu.name} has compute capability {have}; TensorRT-LLM {version} needs {floor[0]}.{floor[1]} or newer (A100, "
            "L4, RTX 30 and 40, H100 ...). It would install and then fail at start.",
        )
    branch = re.match(r"\d+", gpu.driver)
    if branch is None or int(branch[0]) < minimum:
        choose = {
            "colab": "A Colab runtime's driver cannot be changed; try again later or rent a pod.",
            "runpod": "Choose a pod by CUDA version 13.0 or newer in RunPod's filter.",
        }.get(where, f"Install driver {minimum} or newer.")
        return Decision(
            "reference",
            f"{gpu.name} has driver {gpu.driver or 'unknown'}; TensorRT-LLM {version} is built for CUDA 13 and needs driver "
            f"{minimum} or newer. {choose}",
        )
    if installed:
        return Decision("ready", f"TensorRT-LLM {installed} is installed; {gpu.name}, driver {gpu.driver}")
    if switch == "0" or (switch != "1" and not where):
        return Decision(
            "offer",
            f"{gpu.name} with driver {gpu.driver} can run TensorRT-LLM {version}, which is not installed. To install it "
            f"(about {pins['disk_gb']['value']} GB of disk): {sys.executable} -m trtllm_workshop.install_gpu",
        )
    return Decision("install", f"{gpu.name}, driver {gpu.driver}: installing TensorRT-LLM {version}")


def environment_folder() -> Path:
    """Where the environment goes: TRTLLM_WORKSHOP_ENV, or work/venv-trtllm in the checkout, where the toolchain looks."""
    return Path(os.environ.get("TRTLLM_WORKSHOP_ENV") or CHECKOUT / "work" / "venv-trtllm")


def installed_version(folder: Path, pins: dict[str, Any]) -> str:
    """The installed TensorRT-LLM: in the kernel's own Python (a container), or in our finished environment; else ''."""
    from importlib.metadata import PackageNotFoundError, version

    with contextlib.suppress(PackageNotFoundError):
        return version("tensorrt_llm")
    return str(pins["target_version"]) if "check" in _done(folder) and (folder / "bin" / "python").exists() else ""


def find_python(wheels: Iterable[str], kernel: str = "") -> tuple[str, str]:
    """(interpreter, version) that TensorRT-LLM has a wheel for, 3.12 first; ('', '') when there is none."""
    kernel = kernel or f"{sys.version_info.major}.{sys.version_info.minor}"
    for version in sorted(wheels, key=lambda text: -int(text.split(".")[1])):
        if kernel == version:
            return sys.executable, version
        found = shutil.which(f"python{version}")
        if found and subprocess.run([found, "-c", "import venv"], capture_output=True).returncode == 0:
            return found, version
    return "", ""


def prepare(say: Callable[[str], None] = print, kernel: str = "") -> Decision:
    """What a notebook's first cell does: looks, says what it found, installs when this is a rented GPU machine.

    ``kernel`` replaces the running Python's version in tests. Raises CannotInstall with the failing step's last lines.
    """
    pins, folder = load_pins(), environment_folder()
    gpus, problem = query_gpus()
    where = host()
    found = decide(gpus, problem, where, os.environ.get(SWITCH, ""), installed_version(folder, pins))
    say(found.reason)
    if found.action == "install":
        install(folder, pins, say, kernel)
        found = Decision("ready", found.reason)
    if found.action == "ready" and (folder / "bin" / "python").exists():
        os.environ.setdefault("TRTLLM_PYTHON", str(folder / "bin" / "python"))
    if found.action in ("reference", "offer"):
        say("The reference toolchain runs the course's commands here.")
    add_kernel_packages(found.action == "ready", bool(where), say)
    return found


def missing_packages(names: dict[str, str]) -> list[str]:
    """The requirements whose module this Python cannot find."""
    return [requirement for module, requirement in names.items() if importlib.util.find_spec(module) is None]


def add_kernel_packages(with_tensorrt_llm: bool, rented: bool, say: Callable[[str], None]) -> None:
    """Installs what this kernel lacks; nothing that is there is changed. On an own machine it only says how."""
    wanted = KERNEL_PACKAGES if with_tensorrt_llm else {**KERNEL_PACKAGES, **REFERENCE_PACKAGES}
    missing = missing_packages(wanted)
    if not missing:
        return
    if not rented:
        raise CannotInstall(
            f"this kernel ({sys.executable}) lacks {', '.join(missing)}. Start the notebooks with `make lab` in {CHECKOUT}, "
            f"or install them: {sys.executable} -m pip install {' '.join(map(repr, missing))}"
        )
    say(f"Installing for this kernel: {', '.join(missing)}")
    run_step([sys.executable, "-m", "pip", "install", "--no-input", *missing], say)
    importlib.invalidate_caches()


def install(folder: Path, pins: dict[str, Any], say: Callable[[str], None] = print, kernel: str = "") -> None:
    """Makes the environment step by step. A finished step is written down, so a second call goes on where one stopped.

    Raises CannotInstall; what was done until then stays and is used by the next call.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if not _done(folder) and free < DISK_REFUSED_GB:
        raise CannotInstall(
            f"{folder.parent} has {free:.0f} GB free; the installation takes more than {DISK_REFUSED_GB} GB and "
            f"{pins['disk_gb']['value']} GB are advised. Give the machine a larger disk, or set TRTLLM_WORKSHOP_ENV to a "
            "folder on one."
        )
    started = time.monotonic()
    python = folder / "bin" / "python"
    held = folder.parent / "constraints-gpu.txt"
    held.write_text("\n".join(constraints(pins)) + "\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off", "--constraint", str(held)]
    torch = f"torch=={pins['packages']['torch']['version']}+cu130"
    indexes = ["--extra-index-url", TORCH_INDEX, "--extra-index-url", NVIDIA_INDEX]
    release = pins["target_version"]
    steps: list[tuple[str, str, Callable[[], list[list[str]]]]] = [
        ("python", "the environment", lambda: _make_environment(folder, pins, say, kernel)),
        ("mpi", "Open MPI", _mpi_commands),
        ("torch", "torch for CUDA 13", lambda: [[*pip, "--extra-index-url", TORCH_INDEX, torch]]),
        ("tensorrt_llm", f"TensorRT-LLM {release}", lambda: [[*pip, *indexes, f"tensorrt_llm=={release}"]]),
        ("examples", "the examples of the same release", lambda: _examples_commands(folder.parent, release)),
        ("check", "a first import", lambda: [[str(python), "-c", "import tensorrt_llm"]]),
    ]
    for number, (key, title, commands) in enumerate(steps, 1):
        if key in _done(folder):
            say(f"[{number}/{len(steps)}] {title}: done earlier")
            continue
        say(f"[{number}/{len(steps)}] {title} ({time.monotonic() - started:.0f} s so far)")
        for command in commands():
            run_step(command, say)
        _note(folder, key)
    say(f"TensorRT-LLM {release} is ready after {time.monotonic() - started:.0f} s: {python}")


def run_step(command: list[str], say: Callable[[str], None]) -> None:
    """Runs one command with its output shown line by line. Raises CannotInstall with the last lines when it fails."""
    say("$ " + " ".join(command))
    last: collections.deque[str] = collections.deque(maxlen=20)
    environment = {
        **os.environ,
        "GIT_LFS_SKIP_SMUDGE": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    environment.pop("PYTHONPATH", None)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError as error:
        raise CannotInstall(f"{command[0]} could not be started: {error}") from error
    assert process.stdout is not None
    with process, process.stdout:
        try:
            for line in process.stdout:
                if not line.startswith(("Requirement already satisfied", "WARNING: Location")):
                    last.append(line.rstrip())
                    say("  " + line.rstrip())
        except BaseException:
            process.terminate()
            raise
    if process.returncode:
        output = "\n".join(last)
        raise CannotInstall(
            f"this step failed with exit code {process.returncode}:\n  {' '.join(command)}\nIts last lines:\n{output}\n"
            f"{_advice(output)}Mend the cause and run the cell again: it goes on from here."
        )


def _advice(output: str) -> str:
    with contextlib.suppress(ImportError):
        from trtllm_workshop.advice import advise

        return "".join(f"{item.cause} {item.fix}\n" for item in advise(output))
    return ""


def _make_environment(folder: Path, pins: dict[str, Any], say: Callable[[str], None], kernel: str) -> list[list[str]]:
    python, version = find_python(pins["python"]["wheels"], kernel)
    shutil.rmtree(folder, ignore_errors=True)  # half of an earlier attempt
    if not python:
        wheels = " and ".join(pins["python"]["wheels"])
        say(f"TensorRT-LLM has wheels for Python {wheels}, and none of them is here: uv brings Python 3.12.")
        tools = folder.parent / "tools"
        uv = shutil.which("uv") or str(tools / "bin" / "uv")
        get = [[sys.executable, "-m", "pip", "install", "--no-input", "--target", str(tools), "uv"]]
        return [*([] if Path(uv).is_file() else get), [uv, "venv", "--seed", "--python", "3.12", str(folder)]]
    say(f"A Python {version} environment in {folder}")
    if subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode == 0:
        return [[python, "-m", "venv", str(folder)]]
    # Debian's and Colab's Python come without ensurepip: the kernel's pip puts one into the new environment.
    seed = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--no-input", "pip"]
    return [[python, "-m", "venv", "--without-pip", str(folder)], seed]


def _mpi_commands() -> list[list[str]]:
    if ctypes.util.find_library("mpi"):
        return []
    if shutil.which("apt-get") and os.geteuid() == 0:
        return [["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "libopenmpi-dev", "openmpi-bin"]]
    raise CannotInstall(
        "TensorRT-LLM needs Open MPI also on one GPU. Install it (apt install libopenmpi-dev openmpi-bin)."
    )


def _examples_commands(parent: Path, release: str) -> list[list[str]]:
    target = parent / "TensorRT-LLM"
    if (target / "examples").is_dir():
        return []
    temporary = parent / "TensorRT-LLM.part"
    shutil.rmtree(temporary, ignore_errors=True)
    return [
        ["git", "clone", "--quiet", "--depth", "1", "--branch", f"v{release}", EXAMPLES, str(temporary)],
        ["mv", str(temporary), str(target)],
    ]


def _stamp(folder: Path) -> Path:
    return folder / "workshop-steps.txt"  # inside, so that it goes when the environment goes


def _done(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return _stamp(folder).read_text(encoding="utf-8").split()
    return []


def _note(folder: Path, key: str) -> None:
    _stamp(folder).write_text("\n".join([*_done(folder), key]) + "\n", encoding="utf-8")


def main() -> int:
    """``python -m trtllm_workshop.install_gpu``: installs when the machine can run TensorRT-LLM; 1 when it cannot."""
    os.environ[SWITCH] = "1"
    try:
        return 0 if prepare().action == "ready" else 1
    except CannotInstall as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
