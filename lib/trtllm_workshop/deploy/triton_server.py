"""Start a real Triton Inference Server: NVIDIA's container has one, and so does the wheel of nvidia-pytriton."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_workshop.ports import LOOPBACK
from trtllm_workshop.server_process import Server, ServerFailed, start_server
from trtllm_workshop.shell import ShownError
from trtllm_workshop.toolchain import Toolchain

CONTAINER = Path("/opt/tritonserver")
HEALTH = "/v2/health/ready"
SHARED = "trtllm_workshop"  # beginning of the names of shared memory
# What an interpreter says about itself; the stub that runs model.py must be of the same version and find its libraries.
_ASK = """
import json, sys, sysconfig, importlib.util
found = importlib.util.find_spec("pytriton")
print(json.dumps({
    "version": "%d.%d" % sys.version_info[:2],
    "packages": sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")}),
    "library": sysconfig.get_config_var("LIBDIR") if sysconfig.get_config_var("Py_ENABLE_SHARED") else None,
    "wheel": list(found.submodule_search_locations)[0] if found else None,
}))
"""


class TritonMissing(ShownError):
    """There is no tritonserver that this toolchain's Python could use; the message says what was looked for."""


@dataclass(frozen=True)
class TritonInstall:
    """A tritonserver.

    Attributes:
        program: the executable.
        backends: folder of its backends.
        stub: what runs model.py for this Python version; None where the backend brings one that fits.
        libraries: folders for the library path.
        packages: folders for PYTHONPATH of the models.
        source: in words, where it comes from.
    """

    program: Path
    backends: Path
    stub: Path | None
    libraries: tuple[Path, ...]
    packages: tuple[Path, ...]
    source: str


def find_tritonserver(toolchain: Toolchain) -> TritonInstall:
    """The container's server where there is one, the wheel's otherwise.

    Raises:
        TritonMissing: when there is neither, or the wheel has no stub for the toolchain's Python.
    """
    if (CONTAINER / "bin" / "tritonserver").is_file():
        return TritonInstall(
            CONTAINER / "bin" / "tritonserver", CONTAINER / "backends", None, (CONTAINER / "lib",), (), str(CONTAINER)
        )
    about = ask_python(toolchain)
    if not about["wheel"]:
        raise TritonMissing(
            f"no tritonserver: there is no {CONTAINER}, and nvidia-pytriton, whose wheel holds one, is not installed for "
            f"{toolchain.python}; pip install nvidia-pytriton (Linux, x86_64), or use NVIDIA's tritonserver container"
        )
    wheel = Path(about["wheel"])
    inside = wheel / "tritonserver"
    stub = inside / "python_backend_stubs" / about["version"] / "triton_python_backend_stub"
    for file in (inside / "bin" / "tritonserver", inside / "backends" / "python" / "libtriton_python.so", stub):
        if not file.is_file():
            have = ", ".join(sorted(path.name for path in (inside / "python_backend_stubs").glob("*"))) or "none"
            raise TritonMissing(
                f"nvidia-pytriton has no {file}; it serves models of Python {have}, and the toolchain's is "
                f"{about['version']}. Use one of these, or install nvidia-pytriton again"
            )
    libraries = [wheel.with_name("nvidia_pytriton.libs"), *([Path(about["library"])] if about["library"] else [])]
    packages = tuple(map(Path, about["packages"]))
    source = f"nvidia-pytriton, stub of Python {about['version']}"
    return TritonInstall(inside / "bin" / "tritonserver", inside / "backends", stub, tuple(libraries), packages, source)


def ask_python(toolchain: Toolchain) -> dict[str, Any]:
    """Version, package folders and library folder of the toolchain's Python, and where pytriton lies in it (None: nowhere).

    Raises TritonMissing when it does not answer.
    """
    try:
        done = subprocess.run(
            [str(toolchain.python), "-c", _ASK],
            env=toolchain.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
        raise TritonMissing(f"{toolchain.python} does not say which Python it is ({problem}); check it") from None


def prepare_backends(install: TritonInstall, folder: Path) -> Path:
    """A backend folder with the Python backend and the stub that fits, under `folder`; the container's own as it is."""
    if install.stub is None:
        return install.backends
    version = install.stub.parent.name
    target = Path(folder) / f"backends-{version}"
    stub = target / "python" / install.stub.name
    if stub.is_file() and stub.stat().st_size == install.stub.stat().st_size:
        return target
    new = target.with_name(f".{target.name}.writing-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    shutil.copytree(install.backends / "python", new / "python")
    shutil.copy2(install.stub, new / "python" / install.stub.name)
    (new / "python" / install.stub.name).chmod(0o755)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(new, target)
    return target


def start_tritonserver(
    toolchain: Toolchain,
    repository: str | Path,
    *,
    log: str | Path,
    timeout_s: float = 120.0,
    env: Mapping[str, str] | None = None,
    quiet: bool = False,
    finish_s: int = 30,
) -> Server:
    """Serve the models of `repository` on free ports of the loopback address, and wait until all are ready.

    The returned server's `ports` are `port` (HTTP, also `url`), `grpc_port` and `metrics_port`. Every wait has a limit, after
    which the whole group is killed: a server that misses a library loads for ever and ignores signals.

    A server that is asked to end waits for open HTTP connections, idle ones too, and what still runs after `finish_s` is lost:
    close your clients first. `replacement()` makes a restart without a gap.

    Args:
        toolchain: whose Python runs the models; they can import `tensorrt_llm`.
        repository: folder with one folder a model.
        log: file for the server's output; files of its start lie beside it.
        timeout_s: seconds until all models must be ready.
        finish_s: seconds that accepted requests get when it is asked to end.

    Raises:
        TritonMissing: when there is no server here.
        ServerFailed: when a model does not load; the message ends with the server's last lines.
    """
    install = find_tritonserver(toolchain)
    log, repository = Path(log).resolve(), Path(repository).resolve()
    sweep_shared_memory()
    backends = prepare_backends(install, log.parent / "tritonserver")
    prefix = f"{SHARED}_{os.getpid()}_{uuid.uuid4().hex[:6]}_"
    words = [
        install.program, f"--model-repository={repository}", f"--backend-directory={backends}",
        "--allow-http=true", f"--http-address={LOOPBACK}", "--http-port={port}",
        "--allow-grpc=true", f"--grpc-address={LOOPBACK}", "--grpc-port={grpc_port}",
        "--allow-metrics=true", f"--metrics-address={LOOPBACK}", "--metrics-port={metrics_port}",
        f"--exit-timeout-secs={finish_s}", f"--backend-config=python,shm-region-prefix-name={prefix}",
    ]  # fmt: skip
    if install.stub is not None:
        words.append("--disable-auto-complete-config")
    command = " ".join(shlex.quote(str(word)) if "{" not in str(word) else str(word) for word in words)
    try:
        return start_server(
            toolchain, command, log=log, health=HEALTH, timeout_s=timeout_s, quiet=quiet,
            env=server_environment(toolchain, install, env),
        )  # fmt: skip
    except ServerFailed as failure:
        reasons = failed_models(log.read_text(encoding="utf-8", errors="replace"))
        raise ServerFailed("\n".join([*reasons, str(failure)]), failure.result) from None


def failed_models(log: str) -> list[str]:
    """One line for each model that did not load, with the reason that the server's log gives."""
    found = re.findall(r"\"failed to load '([^']+)' version \d+: (.*)\"$", log, re.MULTILINE)
    return [f"model {name} did not load: " + reason.split("\\n")[0] for name, reason in found]


def server_environment(toolchain: Toolchain, install: TritonInstall, env: Mapping[str, str] | None) -> dict[str, str]:
    """Variables for the server and the stubs that it starts: paths of libraries and packages, on top of the toolchain's."""
    base = toolchain.environment(env)
    libraries = [*map(str, install.libraries), *base.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    packages = [*base.get("PYTHONPATH", "").split(os.pathsep), *map(str, install.packages)]
    return {
        **(env or {}),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, packages)),
    }


def sweep_shared_memory(folder: Path = Path("/dev/shm")) -> int:
    """Remove shared memory that killed servers left, of programs that are gone; how many files."""
    count = 0
    for file in folder.glob(f"{SHARED}_*_*"):
        pid = file.name[len(SHARED) + 1 :].split("_")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                file.unlink()
                count += 1
    return count
