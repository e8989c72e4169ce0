"""A rank after 0: connects, loads its engine, and carries out what rank 0 plans until rank 0 ends it.

`python -m trtllm_workshop.reference.rank_worker '{"engine_dir": …}'` is how `LLM` starts one; under mpirun the process is
there already and calls `follow`.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1  # sys/prctl.h


def end_with_parent(parent: int | None) -> None:
    """End this process when its standard input ends, which rank 0 holds open as long as it lives.

    The thread works even while the main thread waits for another rank. On Linux the kernel does it too, if `parent` names
    the process whose main thread started this one.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1024):
                pass
        os._exit(0)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()
    if parent is not None and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before
            os._exit(0)


def follow(engine: Any, communicator: Any) -> None:
    """Carry out rank 0's plans until it says that there are no more.

    Args:
        engine: this rank's `engine.Engine`.
        communicator: its `parallel.Communicator`.

    Raises:
        RuntimeError: when another rank has ended.
    """
    import torch

    from trtllm_workshop.reference.configs import KvCacheConfig
    from trtllm_workshop.reference.kv_pool import KvPool
    from trtllm_workshop.reference.rank_step import RankStep
    from trtllm_workshop.reference.step_plan import decode

    told = communicator.listen_words()
    config = KvCacheConfig(**told["kv_cache_config"])
    pool = KvPool.allocate(engine, config, spare=1 if engine.device.type == "cuda" else 0, ranks=communicator)
    steps, before = RankStep(engine, pool, told["max_batch_size"], communicator), None
    with torch.inference_mode():
        if engine.device.type == "cuda":
            steps.warm_up()
        while (plan := decode(communicator.listen())) is not None:
            before = steps.run(plan, before)


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    job = json.loads((argv or sys.argv[1:])[0])
    end_with_parent(job["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is rank 0's
    with os.fdopen(job["said_to"], "w", encoding="utf-8") as stream:

        def say(word: str) -> None:
            stream.write(word + "\n")
            stream.flush()

        from trtllm_workshop.checkpoint import RankMapping
        from trtllm_workshop.reference.engine import load_engine
        from trtllm_workshop.reference.parallel import Communicator, device_of
        from trtllm_workshop.reference.ranks import engine_ranks

        say("started")
        zero = engine_ranks(job["engine_dir"])
        place = RankMapping(zero.tp_size, zero.pp_size, job["rank"])
        device = device_of(place.rank, job["device"])
        communicator = Communicator(place, Path(job["meeting"]), device, connect_limit_s=job["limit_s"])
        say("connected")
        engine = load_engine(job["engine_dir"], device, place.rank, communicator)
        say("ready")
        follow(engine, communicator)
    return 0


if __name__ == "__main__":
    sys.exit(main())
