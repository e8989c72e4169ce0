"""Findings: what is wrong, how badly, and the one thing to do; and the doctor command itself."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
from trtllm_workshop import doctor as doctor_command
from trtllm_workshop import findings
from trtllm_workshop.gpu import Gpu
from trtllm_workshop.host import Cpu, Folder, Mpi, StaleModule
from trtllm_workshop.machine import Machine
from trtllm_workshop.nvidia_smi import Links

GB = 10**9
A100 = Gpu(0, "NVIDIA A100-SXM4-40GB", 40960, 40000, "8.0", False, "580.65.06")
RTX4090 = Gpu(0, "NVIDIA GeForce RTX 4090", 24564, 24000, "8.9", None, "580.65.06")
T4 = Gpu(0, "Tesla T4", 15360, 15000, "7.5", None, "580.65.06")


def folder(role: str, free: float, device: int = 1, path: str = "", filesystem: str = "ext4") -> Folder:
    path = path or f"/{role}"
    return Folder(role, path, path, int(free), 500 * GB, device, filesystem)


def machine(*gpus: Gpu, **changes) -> Machine:
    """A machine on which nothing is wrong, except for the changes."""
    good = Machine(
        gpus=gpus,
        driver_version="580.65.06" if gpus else None,
        cuda_version="13.0" if gpus else None,
        gpu_problem=None,
        gpu_source="NVML" if gpus else "none",
        visible_devices=None,
        links=None,
        cpu=Cpu("AMD EPYC", 8, ("avx2",)),
        ram_total=64 * 2**30,
        ram_available=60 * 2**30,
        folders=(folder("work", 200 * GB), folder("cache", 200 * GB), folder("tmp", 200 * GB)),
        volumes=(),
        shm=16 * 2**30,
        system="Linux x86_64",
        python="3.12.3",
        in_notebook=False,
        host="plain",
        mpi=Mpi("/usr/bin/mpirun", "/usr/bin/mpicc", False),
        packages={},
        stale=(),
    )
    return dataclasses.replace(good, **changes)


def by_code(found):
    return {finding.code: finding for finding in found}


def test_a_good_gpu_machine_has_nothing_to_say():
    assert findings.doctor(machine(A100)) == []
    assert findings.preflight_tensorrt_llm(machine(A100)) == []
    assert findings.preflight_tensorrt_llm(machine(RTX4090, python="3.10.13")) == []


def test_no_gpu_is_information_and_names_the_reference_toolchain():
    (finding,) = findings.doctor(machine())
    assert (finding.severity, finding.code) == ("info", "no-gpu")
    assert "the reference toolchain will be used" in finding.message
    assert by_code(findings.preflight_tensorrt_llm(machine()))["no-gpu"].severity == "error"


@pytest.mark.parametrize(
    ("release", "python", "refused", "right"),
    [
        ("0.15.0", "3.11.7", True, "3.10"),
        ("0.15.0", "3.12.3", True, "3.10"),
        ("0.15.0", "3.10.13", False, ""),
        ("1.2.1", "3.11.7", True, "3.12"),
        ("1.2.1", "3.13.0", True, "3.12"),
        ("1.2.1", "3.12.3", False, ""),
        ("1.2.1", "3.10.13", False, ""),
    ],
)
def test_P08_release_and_python_are_checked_before_pip(release, python, refused, right):
    found = findings.check_wheel(release, python)
    assert bool(found) is refused
    if refused:
        assert found[0].severity == "error" and release in found[0].message and right in found[0].fix
        assert f"Python {right}" in found[0].message or f"and {right}" in found[0].message


def test_P08_the_preflight_refuses_the_kernels_python():
    found = by_code(findings.preflight_tensorrt_llm(machine(A100, python="3.11.7")))
    assert found["python-wheel"].severity == "error"


def test_P12_no_mpicc_means_openmpi_before_pip():
    found = by_code(findings.preflight_tensorrt_llm(machine(A100, mpi=Mpi(None, None, False))))
    assert found["mpi"].severity == "error"
    assert "install OpenMPI dev before pip" in found["mpi"].fix and "libopenmpi-dev" in found["mpi"].fix
    assert findings.preflight_tensorrt_llm(machine(A100, mpi=Mpi(None, None, True))) == []


def test_P14_a_stale_module_asks_for_a_restart_now():
    stale = (StaleModule("numpy", "2.0.2", "1.26.4"),)
    found = by_code(findings.doctor(machine(stale=stale, in_notebook=True)))["restart"]
    assert "restart now" in found.message and "2.0.2" in found.message and "1.26.4" in found.message
    assert "kernel" in found.fix and "before any download" in found.fix


def test_P15_old_driver_is_refused_on_a_consumer_card_and_a_warning_on_a_data_centre_card():
    (refused,) = findings.check_driver("550.54.15", "NVIDIA GeForce RTX 4090", "12.9")
    assert refused.severity == "error" and "driver >= 575" in refused.fix
    (warned,) = findings.check_driver("550.54.15", "NVIDIA A100-SXM4-40GB", "12.9")
    assert warned.severity == "warning" and "575" in warned.fix
    assert findings.check_driver("575.51.03", "NVIDIA GeForce RTX 4090", "12.9") == []
    assert findings.check_driver("550.54.15", "NVIDIA GeForce RTX 4090", "12.4") == []


def test_P15_release_1_2_1_needs_driver_580():
    for driver, codes in (("570.124.06", ["driver"]), ("580.65.06", []), ("590.44.01", [])):
        found = findings.preflight_tensorrt_llm(machine(RTX4090, driver_version=driver))
        assert [finding.code for finding in found] == codes
    (unknown,) = findings.preflight_tensorrt_llm(machine(RTX4090, driver_version=None))
    assert unknown.severity == "warning" and "cannot tell" in unknown.message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Tesla T4", True),
        ("Tesla V100-SXM2-32GB", True),
        ("A100-SXM4-40GB", True),
        ("NVIDIA A10", True),
        ("NVIDIA A10G", True),
        ("NVIDIA L40S", True),
        ("NVIDIA L4", True),
        ("NVIDIA H100L-2-24C", True),
        ("NVIDIA H200", True),
        ("NVIDIA B200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA GeForce RTX 4090", False),
        ("NVIDIA RTX A6000", False),
        ("NVIDIA RTX 6000 Ada Generation", False),
        ("NVIDIA TITAN V", False),
        ("", False),
    ],
)
def test_P15_data_centre_cards_by_name(name, expected):
    assert findings.is_data_center(name) is expected


def test_T4_cannot_run_and_V100_was_removed():
    for gpu, why in ((T4, "Turing"), (dataclasses.replace(T4, name="Tesla V100", compute_capability="7.0"), "0.16")):
        found = by_code(findings.preflight_tensorrt_llm(machine(gpu)))["compute-capability"]
        assert found.severity == "error" and why in found.message
    silent = dataclasses.replace(A100, compute_capability=None)
    assert by_code(findings.preflight_tensorrt_llm(machine(silent)))["compute-capability"].severity == "warning"


def test_what_only_rules_out_tensorrt_llm_is_a_warning_until_it_is_installed():
    assert by_code(findings.doctor(machine(T4)))["compute-capability"].severity == "warning"
    installed = machine(T4, packages={"tensorrt_llm": "1.2.1"})
    assert by_code(findings.doctor(installed))["compute-capability"].severity == "error"


@pytest.mark.parametrize(("free", "severity"), [(32 * GB, "error"), (79 * GB, "warning"), (81 * GB, None)])
def test_disk_for_an_installation(free, severity):
    found = by_code(findings.preflight_tensorrt_llm(machine(A100, folders=(folder("work", free),))))
    assert (found["install-disk"].severity if severity else None) == severity if severity else not found


def test_P22_a_cache_outside_the_volume_is_named():
    inside = folder("cache", 99 * GB, path="/workspace/hf/hub", filesystem="fuse")
    outside = folder("cache", 99 * GB, path="/root/.cache/huggingface/hub", filesystem="overlay")
    found = by_code(findings.doctor(machine(host="runpod", volumes=("/workspace",), folders=(outside,))))
    assert found["cache-volume"].severity == "warning"
    assert outside.path in found["cache-volume"].message
    assert found["cache-volume"].fix == "export HF_HOME=/workspace/huggingface"
    assert findings.check_cache_volume(inside, ("/workspace",)) == []
    assert findings.check_cache_volume(outside, ()) == []


def test_P23_of_three_devices_the_one_that_is_too_small_is_named():
    folders = [folder("work", 50 * GB, 1), folder("cache", 20 * GB, 2), folder("tmp", 64 * 10**6, 3, "/tmp")]
    (found,) = findings.check_space(folders, {"work": 10 * GB, "cache": 10 * GB, "tmp": GB})
    assert found.severity == "error" and "tmp folder /tmp" in found.message
    assert "1.0 GB needed" in found.message and "0.1 GB free" in found.message
    assert "/work" not in found.message and "/cache" not in found.message and "TMPDIR" in found.fix


def test_P23_folders_on_one_device_are_added_up():
    folders = [folder("work", 12 * GB, 7), folder("cache", 12 * GB, 7)]
    (found,) = findings.check_space(folders, {"work": 8 * GB, "cache": 8 * GB})
    assert "16.0 GB needed" in found.message and "12.0 GB free" in found.message
    assert findings.check_space([folders[0], folder("cache", 12 * GB, 8)], {"work": 8 * GB, "cache": 8 * GB}) == []


def test_P95_two_4090_without_direct_access_are_explained():
    two = (RTX4090, dataclasses.replace(RTX4090, index=1))
    found = by_code(findings.doctor(machine(*two, links=Links(("GPU0", "GPU1"), (("X", "PHB"), ("PHB", "X"))))))["p2p"]
    assert "PHB" in found.message and "1 of 1 pairs" in found.message and "NCCL_P2P_DISABLE=1" in found.fix
    nvlink = Links(("GPU0", "GPU1"), (("X", "NV12"), ("NV12", "X")))
    assert findings.doctor(machine(A100, dataclasses.replace(A100, index=1), links=nvlink)) == []


def test_P98_small_shared_memory_names_the_run_option():
    found = by_code(findings.doctor(machine(A100, dataclasses.replace(A100, index=1), shm=64 * 2**20)))["shm"]
    assert found.severity == "warning" and "64 MB" in found.message and "--shm-size=1g" in found.fix
    assert findings.doctor(machine(A100, shm=2**30)) == []
    assert by_code(findings.doctor(machine(shm=64 * 2**20)))["shm"].severity == "info"


def test_P05_an_unusable_gpu_is_an_error_with_its_own_fix():
    problem = "no usable GPU: driver and library differ (NVML library version: 535.161)"
    (found,) = findings.doctor(machine(gpu_problem=problem))
    assert (found.severity, found.code) == ("error", "gpu-unusable") and "reboot" in found.fix


def test_other_obstacles_of_the_course():
    found = by_code(findings.doctor(machine(python="3.9.2", ram_available=2**30)))
    assert found["python"].severity == "error" and found["memory"].severity == "warning"
    mig = dataclasses.replace(A100, mig=True)
    assert by_code(findings.doctor(machine(mig, visible_devices="")))["mig"].severity == "warning"
    assert by_code(findings.doctor(machine(A100, visible_devices="-1")))["hidden-gpus"].severity == "warning"
    assert (
        by_code(findings.doctor(machine(dataclasses.replace(A100, memory_total_mib=None))))["gpu-memory"].severity
        == "info"
    )


def test_every_finding_has_a_fix_and_errors_come_first():
    worst = machine(
        dataclasses.replace(T4, mig=True, memory_total_mib=None),
        driver_version="450.51",
        folders=(folder("work", 0), folder("cache", 0, 2, filesystem="overlay")),
        volumes=("/workspace",),
        stale=(StaleModule("torch", "2.8.0", "2.9.1"),),
        shm=0,
        python="3.14.0",
        mpi=Mpi(None, None, False),
        visible_devices="",
    )
    found = findings.doctor(worst)
    order = [("error", "warning", "info").index(finding.severity) for finding in found]
    assert order == sorted(order) and len({finding.code for finding in found}) >= 10
    assert all(finding.fix and finding.message for finding in found)


def test_the_report_shows_precision_and_fixes():
    t4 = machine(T4)
    report = doctor_command.render(t4, findings.doctor(t4))
    assert "Tesla T4 (15 GiB, compute capability 7.5)" in report
    assert "WARNING  GPU 0 (Tesla T4) cannot run" in report and "fix: choose Ampere" in report
    assert "No problem found." in doctor_command.render(machine(A100), [])


def test_the_command_on_this_machine(tmp_path, capsys):
    code = doctor_command.main(["--json", "--work-dir", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out)
    assert code == int(any(finding["severity"] == "error" for finding in printed["findings"]))
    assert set(printed["findings"][0]) == {"severity", "code", "message", "fix"} if printed["findings"] else True
    assert printed["machine"]["summary"]
    doctor_command.main(["--work-dir", str(tmp_path)])
    assert printed["machine"]["summary"] in capsys.readouterr().out


def test_exit_code_is_one_only_for_errors(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command, "detect", lambda work: machine(T4))
    assert doctor_command.main([]) == 0
    assert "WARNING" in capsys.readouterr().out
    assert doctor_command.main(["--install"]) == 1
    assert "ERROR" in capsys.readouterr().out


def test_a_work_folder_that_cannot_be_is_an_error(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("mine")
    for place, said in ((file, "is a file"), (file / "below", "lies below the file")):
        assert doctor_command.main(["--work-dir", str(place)]) == 1
        assert said in capsys.readouterr().out


def test_a_work_folder_on_a_read_only_file_system_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (found,) = doctor_command.work_dir_findings(str(tmp_path / "new"))
    assert (found.severity, found.code) == ("error", "work-dir") and str(tmp_path) in found.message
