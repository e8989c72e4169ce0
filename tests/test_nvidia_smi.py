"""Reading nvidia-smi: a real executable on PATH that prints what broken and odd machines print."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trtllm_workshop import nvidia_smi
from trtllm_workshop.gpu import memory_fit
from trtllm_workshop.machine import detect, machine_line

HEADER = "index, name, memory.total [MiB], memory.free [MiB], compute_cap, mig.mode.current, driver_version\n"
TABLE = "Tue Mar  3 10:00:00 2026\n| NVIDIA-SMI {0}   Driver Version: {0}   CUDA Version: {1} |\n"


@pytest.fixture
def fake_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts an executable nvidia-smi on PATH; its answers to the query, the table and topo are shell code."""

    def install(query: str = "exit 1", table: str = "exit 1", topo: str = "exit 1") -> None:
        script = tmp_path / "nvidia-smi"
        body = f'case "$1" in\n  --query-gpu=*) {query};;\n  topo) {topo};;\n  *) {table};;\nesac\n'
        script.write_text("#!/bin/sh\n" + body)
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return install


def text(content: str) -> str:
    return f"cat <<'END'\n{content}\nEND\n"


def test_P01_a_missing_value_costs_only_itself():
    vgpu = nvidia_smi.parse_query("[N/A], 24576, NVIDIA H100L-2-24C", ["memory.free", "memory.total", "name"])
    assert [(g.name, g.memory_total_mib, g.memory_free_mib) for g in vgpu] == [("NVIDIA H100L-2-24C", 24576, None)]
    old = nvidia_smi.parse_query(
        "NVIDIA A100, 81920, [N/A], [Not Supported]", ["name", "memory.total", "memory.free", "mig.mode.current"]
    )
    assert [(g.name, g.memory_total_mib, g.memory_free_mib, g.mig) for g in old] == [("NVIDIA A100", 81920, None, None)]


def test_P01_one_bad_row_does_not_lose_the_other_gpus():
    rows = [
        "0, NVIDIA A100-SXM4-40GB, 40960 MiB, 40000 MiB, 8.0, Disabled, 580.65.06",
        "1, NVIDIA A100-SXM4-40GB, [Unknown Error], ERR!, [N/A], [N/A], 580.65.06",
        "2, NVIDIA A100-SXM4-40GB, 40960 MiB, 39000 MiB, 8.0, Enabled, 580.65.06",
    ]
    gpus = nvidia_smi.parse_query(HEADER + "\n".join(rows))
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    assert [gpu.memory_total_mib for gpu in gpus] == [40960, None, 40960]
    assert [gpu.compute_capability for gpu in gpus] == ["8.0", None, "8.0"]
    assert [gpu.mig for gpu in gpus] == [False, None, True]


def test_P03_unified_memory_is_unknown_and_not_zero(fake_smi):
    fake_smi(
        text(HEADER + "0, NVIDIA GB10, [N/A], [N/A], 12.1, [N/A], 580.95.05"),
        text(TABLE.format("580.95.05", "13.0")),
    )
    machine = detect(nvml=lambda: None)
    (gpu,) = machine.gpus
    assert gpu.memory_total_mib is None and gpu.memory_free_mib is None
    assert machine.least_gpu_memory_mib is None and machine.total_gpu_memory_mib is None
    fit = memory_fit(gpu, need_mib=16000)
    assert fit.supported is None and "cannot decide" in fit.reason
    assert memory_fit(gpu, need_mib=16000, total_mib=120000).supported is True
    assert memory_fit(gpu, need_mib=160000, total_mib=120000).supported is False
    assert "NVIDIA GB10" in machine_line(machine) and " 0 GB" not in machine_line(machine)


def test_P05_text_of_a_failure_is_never_a_gpu_name(fake_smi):
    failure = "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 535.161"
    fake_smi(text(failure) + "exit 18", text(failure) + "exit 18")
    machine = detect(nvml=lambda: None)
    assert machine.gpus == ()
    assert machine.gpu_problem == "no usable GPU: driver and library differ (NVML library version: 535.161)"
    assert "no GPU" in machine.summary()


@pytest.mark.parametrize(
    ("code", "said", "expected"),
    [
        (9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "not loaded"),
        (6, "No devices were found", "finds no device"),
        (255, "Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error", "code 255"),
        (0, "No devices were found", "finds no device"),
    ],
)
def test_P05_other_failures_are_named(fake_smi, code, said, expected):
    fake_smi(text(said) + f"exit {code}")
    report = nvidia_smi.query()
    assert report.gpus == () and expected in (report.problem or "")


def test_a_corrupted_inforom_is_a_warning_and_the_table_counts(fake_smi):
    rows = HEADER + "0, Tesla T4, 15360 MiB, 15000 MiB, 7.5, [N/A], 550.54.15"
    fake_smi(text(rows + "\nWARNING: infoROM is corrupted at gpu 0000:00:1E.0") + "exit 14")
    assert [gpu.name for gpu in nvidia_smi.query().gpus] == ["Tesla T4"]


def test_P07_one_line_per_gpu(fake_smi):
    rows = "0, NVIDIA L4, 23034 MiB, 22000 MiB, 8.9, [N/A], 580.65.06\n"
    rows += "1, NVIDIA A10, 24564 MiB, 24000 MiB, 8.6, [N/A], 580.65.06"
    fake_smi(text(HEADER + rows), text(TABLE.format("580.65.06", "13.0")))
    machine = detect(nvml=lambda: None)
    assert [gpu.name for gpu in machine.gpus] == ["NVIDIA L4", "NVIDIA A10"]
    assert (machine.least_gpu_memory_mib, machine.total_gpu_memory_mib) == (23034, 23034 + 24564)
    assert (machine.driver_version, machine.cuda_version, machine.gpu_source) == ("580.65.06", "13.0", "nvidia-smi")


def test_a_field_that_an_old_driver_does_not_know_is_left_out(fake_smi):
    refusal = 'echo "Field \\"compute_cap\\" is not a valid field to query."; exit 2'
    rows = "index, name, memory.total [MiB], memory.free [MiB], mig.mode.current, driver_version\n"
    rows += "0, Tesla V100-SXM2-32GB, 32510 MiB, 32000 MiB, [N/A], 450.51.06"
    fake_smi(f'case "$1" in *compute_cap*) {refusal};; *) {text(rows)};; esac')
    (gpu,) = nvidia_smi.query().gpus
    assert (gpu.name, gpu.compute_capability, gpu.memory_total_mib) == ("Tesla V100-SXM2-32GB", None, 32510)


def test_no_nvidia_smi_means_no_gpu_and_no_problem(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    report = nvidia_smi.query()
    assert report.gpus == () and report.problem is None


def test_a_hanging_nvidia_smi_is_given_up(fake_smi, monkeypatch):
    fake_smi("exec sleep 30")
    monkeypatch.setattr(nvidia_smi, "TIMEOUT_SECONDS", 1)
    assert "no answer within 1 s" in (nvidia_smi.query().problem or "")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("| NVIDIA-SMI 550.54.15   Driver Version: 550.54.15   CUDA Version: 12.4 |", ("550.54.15", "12.4")),
        ("| NVIDIA-SMI 384.111                Driver Version: 384.111                   |", ("384.111", None)),
        ("| NVIDIA-SMI 610.43.02    KMD Version: 610.43.02    CUDA UMD Version: 13.3  |", ("610.43.02", "13.3")),
        ("nvidia-smi: command not found", (None, None)),
    ],
)
def test_P15_header_of_old_and_new_branches(line, expected):
    assert nvidia_smi.parse_header("Fri Jul  5 2024\n+----+\n" + line) == expected


TOPO = (
    "\x1b[4m\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV12\tSYS\tNODE\t0-63\t\tN/A\t\tN/A\n"
    "GPU1\tNV12\t X \tPHB\tSYS\t0-63\tN/A\t\tN/A\n"
    "GPU2\tSYS\tPHB\t X \tPIX\t\t\tN/A\n"
    "NIC0\tNODE\tSYS\tPIX\t X \t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
    "  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n"
)


def test_P95_topology_with_tabs_network_cards_and_legend():
    links = nvidia_smi.parse_topology(TOPO)
    assert links is not None and links.gpus == ("GPU0", "GPU1", "GPU2")
    assert links.matrix == (("X", "NV12", "SYS"), ("NV12", "X", "PHB"), ("SYS", "PHB", "X"))
    assert links.between(0, 1) == "NV12" and links.between(0, 7) is None
    for broken in ("", "\n", "GPU0\n", TOPO.split("GPU2\tSYS")[0], "Failed to initialize NVML"):
        assert nvidia_smi.parse_topology(broken) is None


@pytest.mark.parametrize(
    ("connection", "name", "expected"),
    [
        ("NV12", "NVIDIA A100 80GB PCIe", True),
        ("PIX", "NVIDIA L40S", True),
        ("PIX", "NVIDIA GeForce RTX 4090", False),
        ("PHB", "NVIDIA A10", False),
        ("NODE", "NVIDIA A30", False),
        ("SYS", "NVIDIA GeForce RTX 4090", False),
        ("X", "NVIDIA A10", None),
        ("N/A", "NVIDIA A10", None),
        (None, "NVIDIA A10", None),
    ],
)
def test_P95_peer_access_is_judged_from_link_and_card(connection, name, expected):
    assert nvidia_smi.peer_access(connection, name) is expected


CELL = st.sampled_from(
    ["[N/A]", "N/A", "ERR!", "12 MiB", "-1", "1e400", "8.9", "nan", "٣", "index", "name", "memory.total [MiB]"]
)


@given(st.one_of(st.text(), st.lists(st.lists(CELL, max_size=10).map(", ".join), max_size=5).map("\n".join)))
def test_the_csv_parser_never_raises(content):
    for gpu in nvidia_smi.parse_query(content):
        assert gpu.name
        assert gpu.memory_total_mib is None or gpu.memory_total_mib > 0


@given(st.text(alphabet="GPU01\tXNV \n\x1b[4m", max_size=200))
def test_the_topology_parser_never_raises(content):
    links = nvidia_smi.parse_topology(content)
    assert links is None or all(len(row) == len(links.gpus) for row in links.matrix)
