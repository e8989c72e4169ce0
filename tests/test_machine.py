"""Describing a machine: a fake NVML, made-up /proc trees, and this very machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from trtllm_workshop import host
from trtllm_workshop.machine import detect, machine_line, precision_support
from trtllm_workshop.nvidia_smi import CommandOutput

NO_SMI = CommandOutput(127, "")
GIB = 1024**3


class FakeNvml:
    """Answers like pynvml for a list of cards; a value that is an exception is raised."""

    def __init__(
        self, *cards: dict, driver: object = b"580.65.06", cuda: object = 13010, init: Exception | None = None
    ):
        self.cards, self.driver, self.cuda, self.init, self.closed = cards, driver, cuda, init, False

    def nvmlInit(self):
        if self.init:
            raise self.init

    def nvmlShutdown(self):
        self.closed = True

    def nvmlSystemGetDriverVersion(self):
        return self.driver

    def nvmlSystemGetCudaDriverVersion(self):
        return self.cuda

    def nvmlDeviceGetCount(self):
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.cards[index]

    def __getattr__(self, name):
        def answer(card):
            value = card.get(name.removeprefix("nvmlDeviceGet"), RuntimeError("Not Supported"))
            if isinstance(value, Exception):
                raise value
            return value

        return answer


def card(name: str, total_gib: float, capability: tuple[int, int], **more) -> dict:
    memory = SimpleNamespace(total=int(total_gib * GIB), free=int(total_gib * GIB) - 2**20)
    return {"Name": name, "MemoryInfo": memory, "CudaComputeCapability": capability, **more}


def no_smi(argv):
    return NO_SMI


def test_nvml_fields_are_read_one_by_one():
    nvml = FakeNvml(
        card("NVIDIA H100 80GB HBM3", 80, (9, 0), MigMode=(1, 1)),
        {"Name": b"NVIDIA GB10", "CudaComputeCapability": (12, 1), "MemoryInfo": RuntimeError("Not Supported")},
        {"Name": RuntimeError("GPU is lost"), "MemoryInfo": SimpleNamespace(total=0, free=0)},
    )
    machine = detect(runner=no_smi, nvml=lambda: nvml)
    first, second, third = machine.gpus
    assert (first.name, first.memory_total_mib, first.memory_free_mib) == ("NVIDIA H100 80GB HBM3", 81920, 81919)
    assert (first.compute_capability, first.mig, first.driver_version) == ("9.0", True, "580.65.06")
    assert (second.name, second.memory_total_mib, second.compute_capability, second.mig) == (
        "NVIDIA GB10",
        None,
        "12.1",
        None,
    )
    assert (third.memory_total_mib, third.memory_free_mib, third.compute_capability) == (None, None, None)
    assert (machine.cuda_version, machine.gpu_source) == ("13.1", "NVML") and nvml.closed


def test_P05_nvml_with_another_driver_is_a_problem_and_not_a_crash():
    nvml = FakeNvml(init=RuntimeError("Driver/library version mismatch"))
    machine = detect(runner=no_smi, nvml=lambda: nvml)
    assert machine.gpus == () and machine.gpu_problem == "no usable GPU: driver and library differ"
    absent = detect(runner=no_smi, nvml=lambda: FakeNvml(init=RuntimeError("NVML Shared Library Not Found")))
    assert absent.gpus == () and absent.gpu_problem is None


def test_nvidia_smi_answers_where_nvml_does_not_start():
    def runner(argv):
        row = "index, name, memory.total [MiB]\n0, NVIDIA L4, 23034 MiB\n"
        return CommandOutput(0, row) if "--query" in " ".join(argv) else CommandOutput(1, "")

    machine = detect(runner=runner, nvml=lambda: FakeNvml(init=RuntimeError("Unknown Error")))
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4"] and machine.gpu_source == "nvidia-smi"


def test_the_lines_for_reports():
    nvml = FakeNvml(*[card("NVIDIA H200", 140.4, (9, 0))] * 2)
    machine = detect(runner=no_smi, nvml=lambda: nvml)
    assert machine_line(machine).endswith("2 x NVIDIA H200 140 GB")
    assert "driver 580.65.06" in machine.summary() and "\n" not in machine.summary()
    plain = detect(runner=no_smi, nvml=lambda: None)
    assert machine_line(plain).endswith("no GPU") and f"{plain.cpu.cores} core" in machine_line(plain)


def test_this_machine_is_described_without_heavy_imports(tmp_path):
    code = (
        "import json, sys\nfrom trtllm_workshop.machine import detect\nmachine = detect(sys.argv[1])\n"
        "print(json.dumps(machine.to_dict()))\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub', 'numpy', 'mpi4py', 'tensorrt_llm'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a" / "b")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["cpu"]["cores"] >= 1 and facts["ram_total"] > 2**28
    assert {folder["role"] for folder in facts["folders"]} == {"work", "cache", "tmp"}
    work = facts["folders"][0]
    assert work["path"] == str(tmp_path / "a" / "b") and work["measured"] == str(tmp_path)
    assert work["device"] == os.stat(tmp_path).st_dev and 0 < work["free_bytes"] <= work["total_bytes"]
    assert facts["packages"]["torch"] and facts["python"].startswith("3.")


@pytest.fixture
def tree(tmp_path):
    """Writes files of a made-up root folder."""

    def write(**files: str) -> Path:
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/").replace("DOT", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return write


def test_cpu_model_and_instruction_sets(tree):
    flags = "fpu sse2 avx2 avx512f avx512_bf16 amx_tile amx_bf16 amx_int8"
    root = tree(proc__cpuinfo=f"processor : 0\nmodel name\t: Intel(R) Xeon(R) CPU @ 2.20GHz\nflags\t\t: {flags}\n")
    cpu = host.read_cpu(root)
    assert cpu.model == "Intel Xeon"
    assert cpu.flags == ("avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8")


def test_container_limits_win_over_the_host(tree):
    limits = {"sys__fs__cgroup__cpuDOTmax": "100000 100000\n", "sys__fs__cgroup__memoryDOTmax": f"{8 * GIB}\n"}
    limits["sys__fs__cgroup__memoryDOTcurrent"] = f"{6 * GIB}\n"
    limits["sys__fs__cgroup__memoryDOTstat"] = f"anon 5\ninactive_file {GIB}\n"
    root = tree(proc__meminfo="MemTotal: 67108864 kB\nMemAvailable: 60000000 kB\n", **limits)
    assert host.read_memory(root) == (8 * GIB, 3 * GIB)
    assert host.read_cpu(root).cores == 1


def test_memory_without_a_limit(tree):
    root = tree(proc__meminfo="MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n", sys__fs__cgroup__memoryDOTmax="max\n")
    assert host.read_memory(root) == (GIB, GIB // 2)


@pytest.mark.parametrize(
    ("environ", "modules", "files", "kind"),
    [
        ({}, {"google.colab": object()}, {}, "colab"),
        ({"COLAB_RELEASE_TAG": "release-colab_2026"}, {}, {}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {}, {}, "kaggle"),
        ({"RUNPOD_POD_ID": "abc"}, {}, {"DOTdockerenv": ""}, "runpod"),
        ({}, {}, {"proc__version": "Linux version 5.15.90.1-microsoft-standard-WSL2"}, "wsl"),
        ({}, {}, {"DOTdockerenv": ""}, "container"),
        ({}, {}, {"proc__1__cgroup": "12:cpu:/kubepods/besteffort/pod1\n"}, "container"),
        ({}, {}, {"proc__1__cgroup": "0::/init.scope\n"}, "plain"),
    ],
)
def test_host_kinds(tree, environ, modules, files, kind):
    assert host.host_kind(environ, tree(**files), modules) == kind


def test_a_kernel_is_recognised_without_importing_ipython():
    assert host.in_notebook({}) is False
    shell = SimpleNamespace(kernel=object())
    assert host.in_notebook({"IPython": SimpleNamespace(get_ipython=lambda: shell)}) is True
    assert host.in_notebook({"IPython": SimpleNamespace(get_ipython=lambda: None)}) is False


MOUNTS = (
    "overlay / overlay rw 0 0\nproc /proc proc rw 0 0\n/dev/sda1 /etc/hosts ext4 rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    "/dev/sda1 /usr/bin/nvidia-smi ext4 ro 0 0\nmfs#eu /workspace fuse rw 0 0\nnas /my\\040data nfs4 rw 0 0\n"
)


def test_P22_volumes_are_told_apart_from_the_container_layer(tree):
    mounts = host.read_mounts(tree(proc__mounts=MOUNTS))
    assert host.volumes(mounts) == ("/workspace", "/my data")
    assert host.mount_of("/workspace/hf/hub", mounts).filesystem == "fuse"
    assert host.mount_of("/workspace2", mounts).filesystem == "overlay"
    assert host.mount_of("/root/.cache/huggingface", mounts).filesystem == "overlay"
    assert host.volumes([host.Mount("/", "ext4"), host.Mount("/data", "ext4")]) == ()


def test_P22_an_explicit_cache_folder_wins_over_the_variables(tmp_path):
    variables = {"HF_HOME": "/workspace/hf", "HF_HUB_CACHE": "/cache", "XDG_CACHE_HOME": "/xdg"}
    assert host.hub_cache(variables, tmp_path) == tmp_path
    assert host.hub_cache(variables) == Path("/cache")
    assert host.hub_cache({"HF_HOME": "/workspace/hf"}) == Path("/workspace/hf/hub")
    assert host.hub_cache({"XDG_CACHE_HOME": "/xdg"}) == Path("/xdg/huggingface/hub")
    machine = detect(runner=no_smi, nvml=lambda: None, cache_dir=tmp_path / "mine", environ=variables)
    assert machine.folder("cache").path == str(tmp_path / "mine")


def test_P14_another_version_on_disk_than_in_memory_means_restart():
    loaded = {"numpy": SimpleNamespace(__version__="2.0.2"), "torch": SimpleNamespace(__version__="2.9.1+cu128")}
    on_disk = {"numpy": "1.26.4", "torch": "2.9.1"}
    (stale,) = host.stale_modules(loaded, on_disk.get)
    assert (stale.name, stale.loaded, stale.installed) == ("numpy", "2.0.2", "1.26.4")
    assert host.stale_modules(loaded, {"numpy": "2.0.2", "torch": "2.9.1+cu128"}.get) == ()
    (stale,) = host.stale_modules(loaded, {"numpy": "2.0.2", "torch": "2.9.1+cu130"}.get)
    assert stale.name == "torch"


def test_P14_a_real_import_is_compared_with_the_metadata_on_disk(tmp_path):
    (tmp_path / "numpy.py").write_text("__version__ = '2.0.2'\n")
    metadata = tmp_path / "numpy-2.0.2.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 2.0.2\n")
    code = (
        "import pathlib, sys\nfrom trtllm_workshop import host\n"
        "assert host.stale_modules() == () and 'numpy' not in sys.modules\n"
        "import numpy\nassert host.stale_modules() == ()\n"
        "path = pathlib.Path(sys.argv[1])\npath.write_text(path.read_text().replace('2.0.2', '1.26.4'))\n"
        "print(host.stale_modules())\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, str(metadata / "METADATA")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "loaded='2.0.2', installed='1.26.4'" in done.stdout


def test_P98_size_of_shared_memory():
    assert host.shared_memory_bytes(statvfs=lambda path: SimpleNamespace(f_frsize=4096, f_blocks=16384)) == 64 * 2**20
    assert host.shared_memory_bytes("/nowhere/at/all") is None


def test_P12_mpi_is_looked_up_on_path(tmp_path):
    assert host.read_mpi({"PATH": str(tmp_path)}).mpicc is None
    compiler = tmp_path / "mpicc"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert host.read_mpi({"PATH": str(tmp_path)}).mpicc == str(compiler)


@pytest.mark.parametrize(
    ("capability", "yes", "no"),
    [
        ("7.0", set(), {"fp16", "bf16", "int8", "fp8", "fp8_kv_cache", "fp4"}),
        ("7.5", set(), {"fp16", "bf16", "int8", "fp8", "fp8_kv_cache", "fp4"}),
        ("8.0", {"fp16", "bf16", "int8", "fp8_kv_cache"}, {"fp8", "fp4"}),
        ("8.6", {"fp16", "bf16", "int8", "fp8_kv_cache"}, {"fp8", "fp4"}),
        ("8.9", {"fp16", "bf16", "int8", "fp8", "fp8_kv_cache"}, {"fp4"}),
        ("9.0", {"fp16", "bf16", "int8", "fp8", "fp8_kv_cache"}, {"fp4"}),
        ("10.0", {"fp16", "bf16", "fp8", "fp8_kv_cache", "fp4"}, {"int8"}),
        ("12.1", {"fp16", "bf16", "int8", "fp8", "fp8_kv_cache", "fp4"}, set()),
    ],
)
def test_precision_by_compute_capability(capability, yes, no):
    table = precision_support(capability)
    assert {name for name, support in table.items() if support.supported is True} == yes
    assert {name for name, support in table.items() if support.supported is False} == no
    assert all(capability in support.reason for support in table.values())


@pytest.mark.parametrize("capability", [None, "", "N/A", "nine"])
def test_precision_is_unknown_without_a_compute_capability(capability):
    assert {support.supported for support in precision_support(capability).values()} == {None}
