"""How long ranks of this machine take to add up their tensors, measured with as many processes as there will be ranks.

The processes start, find each other through a file, time their sums and end; each gives up by itself after LIMIT_S.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trtllm_workshop.planner_gpus import PlanProblem

LIMIT_S = 60.0
SMALL, LARGE = 512, 2**21  # values in a tensor: one token of a small model, and enough to see the rate
REPEATS = 30


@dataclass(frozen=True)
class Link:
    """`message_seconds` of a sum of a few values, `bytes_per_second` that a rank sends beyond that (16-bit values in a ring)."""

    message_seconds: float
    bytes_per_second: float


def measure_link(ranks: int) -> Link:
    """Starts `ranks` processes of one thread each. Raises PlanProblem when they do not come to an end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "trtllm_workshop.planner_link", str(ranks), str(Path(folder) / "meeting")]
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(ranks):
                started.append(
                    subprocess.Popen(
                        [*words, str(rank)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                    )
                )
            said, complaint = started[0].communicate(timeout=2 * LIMIT_S)
            for other in started[1:]:
                other.wait(timeout=LIMIT_S)
            return Link(**json.loads(said.splitlines()[-1]))
        except subprocess.TimeoutExpired:
            raise PlanProblem(
                f"{ranks} ranks did not finish a sum within {2 * LIMIT_S:.0f} s: plan with --tp 1"
            ) from None
        except (ValueError, IndexError, TypeError):
            last = (complaint.strip().splitlines() or ["no word"])[-1]
            raise PlanProblem(
                f"{ranks} ranks could not be connected on this machine ({last}): plan with --tp 1"
            ) from None
        finally:
            for process in started:
                if process.poll() is None:
                    process.kill()
                process.wait()
                for pipe in (process.stdout, process.stderr):
                    if pipe:
                        with contextlib.suppress(OSError):
                            pipe.close()


def rates(small: float, large: float, ranks: int) -> Link:
    """From the seconds of a small and a large sum over so many ranks."""
    sent = 2 * (ranks - 1) / ranks * 2 * (LARGE - SMALL)
    return Link(small, sent / max(large - small, 1e-9))


def _rank(ranks: int, meeting: str, rank: int) -> None:
    import torch

    from trtllm_workshop.checkpoint import RankMapping
    from trtllm_workshop.reference.parallel import Communicator

    torch.set_num_threads(1)
    communicator = Communicator(
        RankMapping(ranks, 1, rank), meeting, backend="gloo", connect_limit_s=LIMIT_S, step_limit_s=LIMIT_S
    )
    found = []
    for size in (SMALL, LARGE):
        values = torch.ones(1, size)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            communicator.allreduce(values)
            times.append(time.perf_counter() - begin)
        found.append(sorted(times)[len(times) // 2])
    if rank == 0:
        link = rates(found[0], found[1], ranks)
        print(json.dumps({"message_seconds": link.message_seconds, "bytes_per_second": link.bytes_per_second}))


if __name__ == "__main__":
    _rank(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
