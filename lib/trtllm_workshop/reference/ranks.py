"""The other ranks, as rank 0 sees them: it leads, they follow."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trtllm_workshop.checkpoint import RankMapping, config_section, read_config
from trtllm_workshop.reference.configs import KvCacheConfig
from trtllm_workshop.reference.engine import Engine, default_device, load_engine
from trtllm_workshop.reference.parallel import STEP_LIMIT_S, Communicator, device_of
from trtllm_workshop.reference.rank_processes import RankError, RankProcesses, start_limit_s
from trtllm_workshop.reference.step_plan import StepPlan, encode
from trtllm_workshop.reference.thread_count import FewerThreads

# How long after a broken connection the end of a process is waited for, to say which it was.
REASON_LIMIT_S = 5.0


def engine_ranks(folder: str | Path) -> RankMapping:
    """How many ranks the engine of a folder has.

    Raises:
        BrokenWeights: for a config.json that cannot be read.
    """
    config = read_config(Path(folder))
    if "pretrained_config" not in config:  # `load_engine` says what is wrong with such an engine
        return RankMapping()
    return RankMapping.from_config(config_section(config, "pretrained_config"), 0)


def load_ranks(folder: str | Path) -> tuple[Engine, Ranks | None]:
    """Rank 0 of an engine folder, and the other ranks, started, if it has more than one.

    Raises:
        RankError: when a rank does not come up.
        EngineError, WrongFolderKind, BrokenWeights: for an engine that cannot be loaded here.
    """
    place = engine_ranks(folder)
    return (load_engine(folder), None) if place.tp_size * place.pp_size == 1 else start_ranks(folder)


def asked_ranks(tensor_parallel: Any, pipeline_parallel: Any) -> tuple[int, int]:
    """The two arguments of LLM, checked.

    Raises:
        ValueError: for what is no whole number from 1 on.
    """
    sizes = {"tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name}={size!r} must be a whole number of ranks, 1 or more")
    return tensor_parallel, pipeline_parallel


def check_ranks(folder: Path, kind: str, asked: tuple[int, int]) -> None:
    """An engine or checkpoint folder is split already; other numbers than its own are refused, 1 asks for nothing.

    Raises:
        ValueError: naming both numbers.
    """
    config = read_config(folder)
    place = engine_ranks(folder) if kind == "engine" else RankMapping.from_config(config, 0)
    names = (("tensor_parallel_size", place.tp_size), ("pipeline_parallel_size", place.pp_size))
    for wanted, (name, split) in zip(asked, names, strict=True):
        if wanted not in (1, split):
            raise ValueError(
                f"{name}={wanted} is not consistent with the {kind}'s {split}: {folder} was split when it was converted. "
                f"Leave {name} out, or convert and build again"
            )


class Ranks:
    """Leads the other ranks of one engine.

    Args:
        communicator: of rank 0.
        processes: those of the others, when this process started them; None when mpirun did.
        threads: gives this process its threads back at the end.
        meeting: the file where they met, to remove at the end.
    """

    def __init__(
        self,
        communicator: Communicator,
        processes: RankProcesses | None,
        threads: FewerThreads | None = None,
        meeting: Path | None = None,
    ) -> None:
        self._meeting = meeting
        self._communicator, self._processes, self._threads = communicator, processes, threads
        self._error: RankError | None = None
        self._closed = False
        if processes is not None:
            processes.on_loss(communicator.abort)

    @property
    def mapping(self) -> RankMapping:
        return self._communicator.mapping

    @property
    def pids(self) -> list[int]:
        """Process numbers of the ranks that this process started, from 1 on."""
        return [] if self._processes is None else self._processes.pids

    def prepare(self, config: KvCacheConfig, max_batch_size: int) -> Communicator:
        """Tell the others what their KV-cache pools are made by; pools must be allocated next, on all ranks."""
        with self.together():
            words = {"kv_cache_config": config.model_dump(mode="json"), "max_batch_size": max_batch_size}
            self._communicator.announce_words(words)
        return self._communicator

    def announce(self, plan: StepPlan) -> None:
        """Tell the others the next step, which this rank must run too."""
        self._communicator.announce(encode(plan))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around what all ranks do: afterwards they are all well, or there is a RankError and none is left.

        A failure here leaves the others in the middle of a step, so there is no going on.
        """
        self._check()
        try:
            yield
        except BaseException as error:
            self._error = self._reason(error)
            self._end()
            raise self._error from error
        self._check()

    def _check(self) -> None:
        error = self._error or (self._processes.error if self._processes is not None else None)
        if error is not None:
            self._error = error
            self._end()
            # A new one each time: an exception that is raised twice grows its traceback.
            raise RankError(str(error))
        if self._closed:
            raise RankError("the ranks of this engine were ended: make a new LLM to generate again")

    def _reason(self, error: BaseException) -> RankError:
        if isinstance(error, RankError):
            return error
        known = None if self._processes is None else self._processes.wait_for_error(REASON_LIMIT_S)
        if known is not None:
            return known
        first = (str(error).splitlines() or [""])[0]
        return RankError(
            f"the ranks could not finish a step together ({type(error).__name__}: {first}). A rank has ended, or did not "
            f"answer within {STEP_LIMIT_S:g} s; all were ended: start again"
        )

    def close(self) -> None:
        """Let the others end, and give up connections and ports. Safe to call twice."""
        if not self._closed and self._processes is None and self._error is None:
            with contextlib.suppress(RuntimeError):  # one that is gone needs no telling
                self._communicator.announce(encode(None))
        self._end()

    def _end(self) -> None:
        self._closed = True
        if self._processes is not None:
            self._processes.end()
        self._communicator.close()
        if self._meeting is not None:
            self._meeting.unlink(missing_ok=True)
        if self._threads is not None:
            self._threads.end()


def start_ranks(folder: str | Path, limit_s: float | None = None) -> tuple[Engine, Ranks]:
    """Start the ranks of an engine folder in processes of their own, this process being rank 0.

    Args:
        folder: with one rankN.engine for every rank.
        limit_s: seconds until all must be ready; by default `start_limit_s`.

    Returns:
        rank 0's engine, and the other ranks. They wait for `Ranks.prepare`.

    Raises:
        RankError: when one does not come up; nothing is left of the others then.
        EngineError, WrongFolderKind, BrokenWeights: for an engine that cannot be loaded here.
    """
    limit = start_limit_s() if limit_s is None else limit_s
    until = time.monotonic() + limit
    place, kind = engine_ranks(folder), default_device().type
    world = place.tp_size * place.pp_size
    job = {"engine_dir": str(Path(folder).resolve()), "device": kind, "limit_s": limit}
    on_processor = kind == "cpu"
    processes = RankProcesses([job] * (world - 1), 1 if on_processor else None)
    threads = FewerThreads(1) if on_processor else None
    try:
        processes.wait_for("started", until, limit)
        communicator = _connect(place, kind, processes, until, limit)
    except BaseException:
        processes.end()
        if threads is not None:
            threads.end()
        raise
    ranks = Ranks(communicator, processes, threads)
    try:
        engine = load_engine(folder, communicator.device, 0, communicator)
        processes.wait_for("ready", until, limit)
    except BaseException:
        ranks.close()
        raise
    return engine, ranks


def _connect(place: RankMapping, kind: str, processes: RankProcesses, until: float, limit: float) -> Communicator:
    """Rank 0's communicator; a rank that ends meanwhile is reported at once, although connecting cannot be interrupted."""
    made: list[Any] = []
    done = threading.Event()

    def connect() -> None:
        try:
            left = max(until - time.monotonic(), 1.0)
            made.append(Communicator(place, processes.meeting, device_of(0, kind), connect_limit_s=left))
        except Exception as error:
            made.append(error)
        done.set()

    threading.Thread(target=connect, name="ranks-connect", daemon=True).start()
    while not done.wait(0.02):
        if processes.error is not None:
            raise processes.error
    if isinstance(made[0], Exception):
        known = processes.wait_for_error(REASON_LIMIT_S)
        raise known or RankError(
            f"the ranks did not find each other within {limit:g} s ({made[0]}); they meet on 127.0.0.1, which must not be "
            "blocked"
        ) from made[0]
    return made[0]


def join_ranks(folder: str | Path, rank: int, meeting: Path, kind: str | None = None) -> tuple[Engine, Communicator]:
    """One of several processes that somebody else started: connect to the others and load this rank's engine.

    Raises:
        RankError: when the others do not come.
        EngineError, WrongFolderKind, BrokenWeights: for an engine that cannot be loaded here.
    """
    zero, limit = engine_ranks(folder), start_limit_s()
    kind = kind or default_device().type
    place = RankMapping(zero.tp_size, zero.pp_size, rank)
    if kind == "cpu":
        torch.set_num_threads(1)
    try:
        communicator = Communicator(place, meeting, device_of(rank, kind), connect_limit_s=limit)
    except RuntimeError as error:
        raise RankError(f"the other ranks did not come within {limit:g} s ({str(error)[:200]})") from error
    return load_engine(folder, communicator.device, rank, communicator), communicator
