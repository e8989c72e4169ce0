"""The first cell and the GPU installer on made-up machines: fake Colab, fake nvidia-smi, real interpreters, no network.

The cell runs in interpreters that have nothing but pip, as a rented machine's kernel has nothing of this course, up to the
point where something would have to come from the network.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trtllm_workshop import install_gpu
from trtllm_workshop.install_gpu import CannotInstall, Gpu
from trtllm_workshop.notebook_format import bootstrap_source

ROOT = Path(__file__).resolve().parents[1]
A100, RTX, T4 = "NVIDIA A100-SXM4-40GB, {}, 8.0", "NVIDIA GeForce RTX 4090, {}, 8.9", "Tesla T4, {}, 7.5"
FILES = ["__init__.py", "install_gpu.py", "data/tensorrt_llm_pins.json"]


def other_pythons() -> list[str]:
    """One working interpreter for each supported version that this machine has."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "tools" / "setup_env.py")
    assert spec and spec.loader
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    found: dict[str, str] = {}
    for python in [sys.executable, *setup.candidates()]:
        found.setdefault(setup.version_of(python), python)
    return [python for version, python in sorted(found.items()) if version in setup.PREFERRED]


@pytest.fixture(scope="session", params=other_pythons(), ids=lambda python: "-".join(Path(python).parts[-3:]))
def each_bare(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with pip and nothing else, of each version that is here."""
    return empty_environment(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of the running version."""
    return empty_environment(sys.executable, tmp_path_factory)


def empty_environment(python: str, factory: pytest.TempPathFactory) -> str:
    folder = factory.mktemp("bare")
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return str(folder / "bin" / "python")


class Machine:
    """A folder that plays a rented machine: its own home, PATH, Colab module, nvidia-smi and apt-get."""

    def __init__(self, folder: Path):
        self.folder, self.home, self.bin = folder, folder / "home", folder / "bin"
        self.home.mkdir()
        self.bin.mkdir()
        for tool in ("git", "rm", "mv", "sh"):
            self.bin.joinpath(tool).symlink_to(shutil.which(tool) or tool)
        self.environment = {
            "HOME": str(self.home),
            "PATH": str(self.bin),
            "PIP_NO_INDEX": "1",  # what a machine without a network amounts to, without its waiting
            "PIP_CONFIG_FILE": os.devnull,
            "PYTHONPATH": str(folder / "modules"),
            "PYTHONUNBUFFERED": "1",
        }

    def program(self, name: str, *lines: str) -> None:
        path = self.bin / name
        path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n", encoding="utf-8")
        path.chmod(0o755)

    def gpu(self, row: str, driver: str = "580.159.03") -> None:
        self.program("nvidia-smi", f"echo '{row.format(driver)}'")

    def colab(self) -> None:
        package = self.folder / "modules" / "google" / "colab"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()

    def repository(self) -> str:
        """A Git repository with what the first cell needs of the course; its address."""
        source = self.folder / "origin"
        for name in FILES:
            target = source / "lib" / "trtllm_workshop" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "lib" / "trtllm_workshop" / name, target)
        (source / "notebooks").mkdir()
        (source / "notebooks" / "README").touch()
        git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org", "-C", str(source)]
        for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "course"]):
            subprocess.run([*git, *words], check=True)
        return source.as_uri()

    def run(self, python: str, code: str) -> tuple[int, str]:
        """Runs code in a home folder without a checkout; exit code and all output."""
        done = subprocess.run(
            [python, "-c", code],
            cwd=self.home,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, done.stdout

    def cell(self, python: str, repo: str = "") -> tuple[int, str]:
        """Runs the first cell of a notebook."""
        return self.run(python, bootstrap_source(repo))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_cell_is_short_and_needs_only_the_standard_library() -> None:
    source = bootstrap_source()
    assert len(source.splitlines()) < 90
    imported = set(re.findall(r"^(?:import|from) ([a-z_.]+)", source, re.MULTILINE))
    assert {name.split(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"trtllm_workshop"}


def test_the_installer_imports_only_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import trtllm_workshop.install_gpu\n"
        "print({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    done = subprocess.run([sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "{'trtllm_workshop'}", done.stderr


def test_colab_without_a_repository_is_asked_for_one_and_nothing_is_installed(bare: str, machine: Machine) -> None:
    machine.colab()
    machine.gpu(A100, "550.54.15")
    code, output = machine.cell(bare)
    assert code == 1 and output.splitlines()[0].endswith("NVIDIA A100-SXM4-40GB, 550.54.15, 8.0")
    assert "RuntimeError" in output and "Set REPOSITORY in this cell" in output and "TRTLLM_WORKSHOP_REPO" in output
    assert list(machine.home.iterdir()) == []


def test_a_repository_that_cannot_be_fetched_says_so_in_gits_words(bare: str, machine: Machine) -> None:
    machine.colab()
    address = (machine.folder / "nowhere").as_uri()
    code, output = machine.cell(bare, address)
    assert code == 1 and "could not be fetched" in output and "fatal: " in output
    assert not (machine.home / "trtllm-workshop").exists()


def test_colab_on_cpu_fetches_the_course_and_says_how_to_get_a_gpu(bare: str, machine: Machine) -> None:
    machine.colab()
    code, output = machine.cell(bare, machine.repository())
    assert "no NVIDIA GPU" in output and "Runtime > Change runtime type > A100" in output
    assert "The reference toolchain runs the course's commands here." in output
    assert (machine.home / "trtllm-workshop" / "lib").is_dir()
    # The kernel lacks everything; without a network pip cannot bring it, and its own words are shown.
    assert code == 1 and "CannotInstall" in output and "No matching distribution" in output
    assert "tensorrt_llm==" not in output and not (machine.home / "trtllm-workshop" / "work").exists()


@pytest.mark.parametrize(
    ("row", "driver", "words"),
    [
        (A100, "535.104.05", "has driver 535.104.05; TensorRT-LLM 1.2.1 is built for CUDA 13 and needs driver 580"),
        (T4, "580.159.03", "Tesla T4 has compute capability 7.5"),
    ],
)
def test_a_gpu_that_cannot_run_it_gets_no_gpu_installation(
    bare: str, machine: Machine, row: str, driver: str, words: str
) -> None:
    machine.colab()
    machine.gpu(row, driver)
    _, output = machine.cell(bare, machine.repository())
    assert words in output and "The reference toolchain runs" in output
    assert "tensorrt_llm==" not in output and not (machine.home / "trtllm-workshop" / "work").exists()


def test_a_fitting_gpu_gets_an_environment_of_its_own_and_torch_first(each_bare: str, machine: Machine) -> None:
    bare = each_bare
    machine.colab()
    machine.gpu(A100)
    machine.program("apt-get", "exit 0")
    # A Python that says it is 3.12; making environments with it is real.
    machine.program("python3.12", f'exec "{bare}" "$@"')
    cell = "\n".join("    " + line for line in bootstrap_source(machine.repository()).splitlines())
    guarded = (
        f"try:\n{cell}\nexcept RuntimeError as error:\n    print(error)\n"  # an error does not end a notebook's kernel
    )
    code, output = machine.run(bare, f"{guarded}print('SECOND RUN')\n{guarded}")
    work = machine.home / "trtllm-workshop" / "work"
    assert code == 0, output
    assert "[1/6] the environment" in output and (work / "venv-trtllm" / "bin" / "python").exists()
    command = next(line for line in output.splitlines() if line.startswith("$ ") and "torch==2.9.1+cu130" in line)
    assert f"--constraint {work / 'constraints-gpu.txt'}" in command and "/whl/cu130" in command
    assert "torch==2.9.1+cu130" in (work / "constraints-gpu.txt").read_text(encoding="utf-8")
    assert "this step failed with exit code 1" in output and "ERROR: " in output
    assert "tensorrt_llm==1.2.1" not in output, "torch must be there before TensorRT-LLM is asked for"
    # The second call goes on where the first one stopped.
    second = output[output.index("SECOND RUN") :]
    assert "[1/6] the environment: done earlier" in second and "this step failed" in second
    assert "Fetching" in output and "Fetching" not in second


def test_a_kernel_without_a_wheel_asks_uv_for_python_312(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    with pytest.raises(CannotInstall, match=r"(?s)exit code 1.*--target .*tools uv.*No matching distribution"):
        install_gpu.install(tmp_path / "work" / "venv-trtllm", install_gpu.load_pins(), said.append, kernel="3.13")
    assert any("wheels for Python 3.10 and 3.12, and none of them is here" in line for line in said)
    machine.program("uv", 'echo "uv $@"', "exit 3")
    with pytest.raises(CannotInstall, match=r"exit code 3.*(?s:.*)uv venv --seed --python 3.12"):
        install_gpu.install(tmp_path / "work" / "venv-trtllm", install_gpu.load_pins(), said.append, kernel="3.11")


@pytest.mark.parametrize("kernel", ["3.10", "3.12"])
def test_a_kernel_with_a_wheel_is_used_itself(kernel: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.bin))
    assert install_gpu.find_python(["3.10", "3.12"], kernel) == (sys.executable, kernel)
    assert install_gpu.find_python(["3.10", "3.12"], "3.11") == ("", "")
    machine.program("python3.12", "exit 1")  # a shim without a Python behind it
    assert install_gpu.find_python(["3.10", "3.12"], "3.11") == ("", "")


def test_an_environment_that_went_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.program("uv", 'for last; do :; done; mkdir -p "$last/bin"', "exit 0")
    machine.program("mkdir", 'exec /bin/mkdir "$@"')
    machine.program("apt-get", "exit 100")
    monkeypatch.setattr(install_gpu.ctypes.util, "find_library", lambda name: None)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)
    folder, pins = tmp_path / "work" / "venv-trtllm", install_gpu.load_pins()
    said: list[str] = []
    for _ in range(2):
        with pytest.raises(CannotInstall):
            install_gpu.install(folder, pins, said.append, kernel="3.13")
        assert any("uv venv" in line for line in said)
        said.clear()
        shutil.rmtree(folder)


def test_a_small_disk_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = SimpleNamespace(total=100e9, used=90e9, free=10e9)
    monkeypatch.setattr(install_gpu.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CannotInstall, match=r"10 GB free.*80 GB are advised.*TRTLLM_WORKSHOP_ENV"):
        install_gpu.install(tmp_path / "work" / "venv", install_gpu.load_pins(), print)
    assert list((tmp_path / "work").iterdir()) == []


def test_P05_the_exit_code_of_nvidia_smi_comes_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(machine.bin))
    assert install_gpu.query_gpus() == ([], "no NVIDIA GPU here (there is no nvidia-smi)")
    machine.program("nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'", "exit 18")
    gpus, problem = install_gpu.query_gpus()
    assert gpus == [] and "code 18: Failed to initialize NVML" in problem
    machine.program("nvidia-smi", "echo 'NVIDIA A100, 580.1, 8.0'", "echo 'NVIDIA H100L-2-24C, [N/A], [N/A]'")
    assert install_gpu.query_gpus()[0] == [
        Gpu("NVIDIA A100", "580.1", (8, 0)),
        Gpu("NVIDIA H100L-2-24C", "[N/A]", None),
    ]


@pytest.mark.parametrize(
    ("gpu", "where", "switch", "installed", "action"),
    [
        (Gpu("RTX 4090", "580.1", (8, 9)), "runpod", "", "", "install"),
        (Gpu("RTX 4090", "580.1", (8, 9)), "", "", "", "offer"),
        (Gpu("RTX 4090", "580.1", (8, 9)), "", "1", "", "install"),
        (Gpu("RTX 4090", "580.1", (8, 9)), "runpod", "0", "", "offer"),
        (Gpu("RTX 4090", "580.1", (8, 9)), "runpod", "", "1.2.1", "ready"),
        (Gpu("RTX 4090", "[N/A]", (8, 9)), "runpod", "1", "", "reference"),
        (Gpu("RTX 4090", "1000.1", None), "runpod", "", "", "install"),
        (Gpu("B200", "590.1", (10, 0)), "runpod", "", "", "install"),
        (Gpu("T4", "590.1", (7, 5)), "colab", "1", "", "reference"),
    ],
)
def test_what_is_done_follows_from_the_facts(gpu: Gpu, where: str, switch: str, installed: str, action: str) -> None:
    assert install_gpu.decide([gpu], "", where, switch, installed).action == action


def test_P15_a_pod_with_an_old_driver_names_the_filter_to_use() -> None:
    decision = install_gpu.decide([Gpu("NVIDIA GeForce RTX 4090", "550.90", (8, 9))], "", "runpod")
    assert decision.action == "reference" and "driver 550.90" in decision.reason
    assert "CUDA version 13.0 or newer" in decision.reason


def test_in_this_checkout_the_cell_ends_quietly(machine: Machine) -> None:
    """As in every headless run: no GPU, all packages there, nothing to do."""
    environment = {**os.environ, "PATH": str(machine.bin)}
    done = subprocess.run(
        [sys.executable, "-c", bootstrap_source()],
        cwd=ROOT / "tests",
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "The reference toolchain runs the course's commands here." in done.stdout and done.stderr == ""
