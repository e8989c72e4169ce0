"""Processes that mpirun started: which of how many this one is, and where they meet.

Open MPI tells each process its number in environment variables (docs.open-mpi.org, "Environment variables"). Nothing else of
MPI is used: the ranks exchange their tensors through `parallel.Communicator`, as those that `LLM` starts do.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from trtllm_workshop.reference.engine import Engine, EngineError
from trtllm_workshop.reference.rank_worker import follow
from trtllm_workshop.reference.ranks import Ranks, engine_ranks, join_ranks, load_engine


@dataclass(frozen=True)
class Launch:
    """This process is `rank` of `size`; `job` names the mpirun that started them all, `folder` is its own, gone with it."""

    rank: int = 0
    size: int = 1
    job: str = ""
    folder: str = ""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Launch:
        """From the environment of a process; rank 0 of 1 without mpirun.

        Raises:
            EngineError: when the processes are spread over several hosts.
        """
        size, rank = int(environment.get("OMPI_COMM_WORLD_SIZE", 1)), int(environment.get("OMPI_COMM_WORLD_RANK", 0))
        here = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", size))
        if here != size:
            raise EngineError(
                f"{size} ranks were started and {here} of them on this host: the ranks meet on one host here. Start all of "
                "them on one, or use TensorRT-LLM"
            )
        folder = environment.get("PMIX_SERVER_TMPDIR", "")
        return cls(rank, size, environment.get("PMIX_NAMESPACE", ""), folder if Path(folder).is_dir() else "")

    @property
    def meeting(self) -> Path:
        """A file that no other run uses: numbers of processes come back, but not together with their time of start."""
        starter = psutil.Process(os.getppid())
        name = re.sub(r"[^\w-]", "-", f"trtllm-mpi-{os.getuid()}-{self.job}-{starter.pid}-{starter.create_time():.2f}")
        return Path(self.folder or tempfile.gettempdir()) / name


def check_world(folder: str | Path, launch: Launch, command: Sequence[str] = ()) -> None:
    """An engine needs exactly as many processes as it has ranks.

    Args:
        folder: of the engine.
        launch: of this process.
        command: what was typed, to show how to start it right.

    Raises:
        EngineError: with both numbers and the line to type.
    """
    place = engine_ranks(folder)
    world = place.tp_size * place.pp_size
    if world == launch.size:
        return
    typed = shlex.join(command) if command else f"python run.py --engine_dir {shlex.quote(str(folder))} …"
    right = typed if world == 1 else f"mpirun -n {world} {typed}"
    raise EngineError(
        f"Engine world size ({world}) != Runtime world size ({launch.size}). {folder} has {world} "
        f"rank{'s' if world > 1 else ''} (tp_size {place.tp_size} * pp_size {place.pp_size}), and {launch.size} "
        f"process{'es were' if launch.size > 1 else ' was'} started. Start it with: {right}"
    )


def load_launched(folder: str | Path, launch: Launch) -> tuple[Engine, Ranks | None]:
    """Rank 0's engine, and the other processes that mpirun started, if there are any.

    Raises:
        RankError: when the others do not come.
        EngineError, WrongFolderKind, BrokenWeights: for an engine that cannot be loaded here.
    """
    if launch.size == 1:
        return load_engine(folder), None
    engine, communicator = join_ranks(folder, 0, launch.meeting)
    return engine, Ranks(communicator, None, meeting=launch.meeting)


def follow_launched(folder: str | Path, launch: Launch) -> int:
    """Ranks after 0: take part in every step until rank 0 has no more. Returns the exit code."""
    try:
        follow(*join_ranks(folder, launch.rank, launch.meeting))
    except (EngineError, ValueError, RuntimeError, OSError) as error:
        print(f"[TRT-LLM] [E] rank {launch.rank}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0
