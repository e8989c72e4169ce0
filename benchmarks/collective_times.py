"""What the sums and gathers of one generation step take by themselves, in the shapes that the step has.

As many processes as there are ranks meet, as those of an engine do, and run all collectives of a step one behind the other:
two all-reduces of [batch, hidden] a layer and one all-gather of [batch, vocabulary / ranks]. Over NCCL they are recorded in
a CUDA graph, as the engine records them. Nothing stands between them, so ranks that wait for each other's products in a
real step are not seen here: the figure is what the exchange costs at least.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from trtllm_workshop.checkpoint import RankMapping, padded_vocabulary
from trtllm_workshop.model_spec import ModelSpec
from trtllm_workshop.reference.parallel import Communicator, device_of
from trtllm_workshop.reference.rank_worker import end_with_parent

STEPS, ROUNDS = 10, 7


@dataclass(frozen=True)
class Exchange:
    """Sizes of one step's collectives: all-reduces of [batch, hidden], then one all-gather of [batch, columns]."""

    batch: int
    hidden: int
    sums: int
    columns: int


def exchange_of(spec: ModelSpec, tp: int, batch: int) -> Exchange:
    """What a generation step of so many requests exchanges: a sum after attention and one after the MLP of each layer."""
    columns = padded_vocabulary(spec.vocab_size, tp) // tp
    return Exchange(batch, spec.hidden_size, 2 * spec.num_hidden_layers, columns)


def collective_milliseconds(tp: int, exchanges: list[Exchange], kind: str, limit_s: float) -> list[float]:
    """Milliseconds of all collectives of a step, for each of `exchanges`, by `tp` processes.

    Args:
        kind: `cuda` or `cpu`.
        limit_s: seconds until all must be done.

    Raises:
        RuntimeError: when a rank fails or the time is over, with its last lines.
    """
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        job = {"tp": tp, "kind": kind, "limit_s": limit_s, "meeting": str(Path(folder) / "meeting")}
        job["exchanges"] = [asdict(one) for one in exchanges]
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(tp)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, __file__, json.dumps({**job, "rank": rank})]
                with log.open("wb") as output:
                    pipe = subprocess.PIPE  # ends with this process, and the rank with it
                    processes.append(subprocess.Popen(command, stdin=pipe, stdout=output, stderr=subprocess.STDOUT))
            for rank, process in enumerate(processes):
                code = process.wait(max(until - time.monotonic(), 0.1))
                if code:
                    last = "\n".join(logs[rank].read_text(errors="replace").splitlines()[-8:])
                    raise RuntimeError(f"timing the collectives: rank {rank} of {tp} ended with {code}:\n{last}")
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"timing the collectives of {tp} ranks took more than {limit_s:g} s") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(logs[0].read_text().splitlines()[-1])


def _rank(job: dict) -> None:
    end_with_parent(None)
    torch.set_num_threads(1)
    device = device_of(job["rank"], job["kind"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place, limit = RankMapping(job["tp"], 1, job["rank"]), job["limit_s"]
    ranks = Communicator(place, job["meeting"], device, connect_limit_s=limit, step_limit_s=limit)
    found = []
    with torch.inference_mode():
        for one in (Exchange(**sizes) for sizes in job["exchanges"]):
            hidden = torch.ones(one.batch, one.hidden, dtype=torch.bfloat16, device=device)
            logits = torch.ones(one.batch, one.columns, dtype=torch.bfloat16, device=device)
            found.append(_milliseconds(ranks, one.sums, hidden, logits))
    if job["rank"] == 0:
        print(json.dumps(found), flush=True)
    ranks.close()


def _milliseconds(ranks: Communicator, sums: int, hidden: torch.Tensor, logits: torch.Tensor) -> float:
    def step() -> None:
        for _ in range(sums):
            ranks.allreduce(hidden)
        ranks.allgather(logits)

    on_gpu, run = hidden.is_cuda, step
    for _ in range(2):  # connections are made and buffers taken at first use
        step()
    if ranks.capturable:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        run = graph.replay
    times = []
    for _ in range(ROUNDS):
        if on_gpu:
            torch.cuda.synchronize()
        ranks.least(0)  # all ranks begin together
        begin = time.perf_counter()
        for _ in range(STEPS):
            run()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / STEPS * 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    _rank(json.loads(sys.argv[1]))
