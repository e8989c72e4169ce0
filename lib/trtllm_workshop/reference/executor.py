"""The step loop: schedule, run the graph once for all requests of the step, choose tokens, end what is done.

Any thread may submit, abort or step. One step runs at a time and serves the requests of all threads; nobody else waits for
it: what is submitted or aborted meanwhile is taken up when the next step begins, or this one ends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from trtllm_workshop.reference.configs import ContextChunkingPolicy, KvCacheConfig, SchedulerConfig
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.interrupts import interrupts_held
from trtllm_workshop.reference.iteration_stats import IterationStats
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.kv_pool import KvPool
from trtllm_workshop.reference.rank_step import RankStep
from trtllm_workshop.reference.ranks import Ranks
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.scheduler import Scheduler
from trtllm_workshop.reference.step_runner import LaunchedStep, StepRunner


def lowered(name: str, wanted: int | None, limit: int) -> int:
    """A limit of the engine, or less if less is wanted. Raises ValueError below 1."""
    if wanted is not None and wanted < 1:
        raise ValueError(f"{name}={wanted} must be at least 1; leave it out for the engine's {limit}")
    return min(wanted or limit, limit)


class Executor:
    """Runs requests on one engine, many at a time.

    Args:
        engine: the loaded engine.
        kv_cache_config: size of the KV cache, and whether blocks are reused for equal prefixes.
        max_batch_size, max_num_tokens: fewer requests, or tokens, a step than the engine allows, if given.
        scheduler_config: the capacity scheduler's policy.
        enable_chunked_context: let a long prompt take several steps.
        most_stats: iterations whose statistics are kept.
        ranks: the other ranks of the engine, if there are any; `close` ends them.

    Raises:
        RankError: when another rank ends before all are ready.
        ValueError: for a limit below 1, a pool without a single block, or chunks on an engine that cannot read cached tokens
            back in the context phase.
    """

    def __init__(
        self,
        engine: Engine,
        kv_cache_config: KvCacheConfig | None = None,
        max_batch_size: int | None = None,
        *,
        max_num_tokens: int | None = None,
        scheduler_config: SchedulerConfig | None = None,
        enable_chunked_context: bool = False,
        most_stats: int | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.engine, self._ranks = engine, ranks
        build, config = engine.build_config, kv_cache_config or KvCacheConfig()
        scheduling, first_come = scheduler_config or SchedulerConfig(), ContextChunkingPolicy.FIRST_COME_FIRST_SERVED
        paged_context = bool(build["plugin_config"].get("use_paged_context_fmha", True))
        if enable_chunked_context and not paged_context:
            raise ValueError(
                "chunked context needs an engine built with --use_paged_context_fmha enable: without it the context phase "
                "does not read what earlier chunks left in the cache"
            )
        self.max_batch_size = lowered("max_batch_size", max_batch_size, build["max_batch_size"])
        self.max_num_tokens = lowered("max_num_tokens", max_num_tokens, build["max_num_tokens"])
        # Padding rows of CUDA graphs write to a block that no request gets.
        communicator = None if ranks is None else ranks.prepare(config, self.max_batch_size)
        pool = KvPool.allocate(engine, config, spare=1 if engine.device.type == "cuda" else 0, ranks=communicator)
        self.pool, self.pool_description = pool.tensor, pool.description
        # Without paged context attention a cached prefix could not be read either.
        reuse = config.enable_block_reuse and paged_context
        self.kv_cache = KvCacheManager(pool.blocks, pool.tokens_per_block, reuse)
        self.scheduler: Scheduler[Request] = Scheduler(
            self.kv_cache,
            self.max_batch_size,
            self.max_num_tokens,
            policy=scheduling.capacity_scheduler_policy.value,
            enable_chunked_context=enable_chunked_context,
            context_chunking_policy=(scheduling.context_chunking_policy or first_come).value,
        )
        steps = RankStep(engine, pool, self.max_batch_size, communicator)
        if engine.device.type == "cuda":
            with torch.inference_mode():
                steps.warm_up()
        self._runner = StepRunner(steps, self.kv_cache, self.scheduler, engine.device, ranks)
        self._ahead: LaunchedStep | None = None  # launched, its tokens not read yet
        self.stats = IterationStats(self.max_batch_size, most_stats)
        self._last_end = 0.0
        self._lock = threading.Lock()
        self._submitted: deque[Request] = deque()
        self._aborted: deque[Request] = deque()
        self._abort_all = False

    def close(self) -> None:
        """End the other ranks, after the step that runs. Safe to call twice."""
        if self._ranks is not None:
            with self._lock:
                self._ranks.close()

    @property
    def iterations(self) -> int:
        """How many steps have run."""
        return self.stats.iterations

    def gauges(self) -> dict[str, int]:
        """Requests and KV-cache blocks at this moment; read without waiting for the step that runs."""
        running, cache = self.scheduler.num_running, self.kv_cache
        free = cache.free_blocks
        return {
            "requests_running": running,
            "requests_waiting": len(self.scheduler.waiting) + len(self._submitted),
            "kv_blocks_used": cache.num_blocks - free,
            "kv_blocks_free": free,
            "iterations": self.iterations,
        }

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: when it can never run on this engine or pool.
        """
        self.scheduler.check(request)
        self._submitted.append(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out, whatever state they are in, and free their blocks: at once, or when the running step ends."""
        self._aborted.extend(requests)
        self._take_aborted()

    def abort_all(self) -> None:
        """Abort every request there is: at once, or when the running step ends."""
        self._abort_all = True
        self._take_aborted()

    @property
    def busy(self) -> bool:
        scheduler = self.scheduler
        asked = self._submitted or self._aborted or self._abort_all
        return bool(asked or self._ahead or scheduler.waiting or scheduler.num_running)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with interrupts_held():
            try:
                with self._lock:
                    yield
            finally:
                # Aborted after the step's last look, by somebody who found the lock taken.
                self._take_aborted()

    def _take_aborted(self) -> None:
        # A thread that holds the lock already, in a listener, gets here too: it must not wait for itself.
        while (self._aborted or self._abort_all) and self._lock.acquire(blocking=False):
            with interrupts_held():
                try:
                    self._drop_aborted()
                finally:
                    self._lock.release()

    def _drop_aborted(self) -> None:
        """Under the lock: forget aborted requests and tell their listeners."""
        if self._abort_all:
            self._abort_all = False
            self._aborted.extend([*self.scheduler.running, *self.scheduler.waiting, *self._submitted])
        ended = []
        while self._aborted:
            request = self._aborted.popleft()
            if request.cancel():
                ended.append(request)
        if ended:
            self._admit_submitted()
            self.scheduler.finish(ended)
            self._forget_empty_step()
            for request in ended:
                request.tell()

    def _forget_empty_step(self) -> None:
        """A step that runs ahead for requests which have all ended meanwhile leaves nothing to wait for."""
        if self._ahead is not None and all(place.request.finished for place in self._ahead.places()):
            self._ahead = None

    def _admit_submitted(self) -> None:
        while self._submitted:
            request = self._submitted.popleft()
            if not request.finished:  # aborted before it came here
                self.scheduler.add(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one iteration.

        On CUDA the next iteration is launched before this one's tokens are read, so that the device works while the host looks
        at tokens; a request that turns out to have ended has then run one row too many.

        Returns:
            The requests that got a token, finished ones included. Empty when there is nothing to do.
        """
        with self._alone():
            self._admit_submitted()
            self._drop_aborted()
            try:
                launched = self._ahead
                if launched is None:
                    launched = self._ahead = self._launch(None)
                if launched is None:
                    return []
                following = None
                if self._runner.runs_ahead and launched.plain:
                    following = self._launch(launched)
                touched = self._collect(launched)
                self._ahead = following
                self._forget_empty_step()
                return touched
            except BaseException as error:
                self._fail(error)
                raise

    def _launch(self, before: LaunchedStep | None) -> LaunchedStep | None:
        batch = self.scheduler.schedule()
        if not batch.context and not batch.generation:
            return None
        return self._runner.launch(batch, before)

    def _collect(self, launched: LaunchedStep) -> list[Request]:
        """Wait for a step's tokens and give them to their requests."""
        batch = launched.batch
        touched = self._accept(launched, self._runner.tokens_of(launched))
        ended = [r for r in touched if r.finished]
        self.scheduler.finish(ended)
        now = time.perf_counter()
        self.stats.add(
            seconds=now - max(self._last_end, launched.started),
            active=self.scheduler.num_running,
            queued=len(self.scheduler.waiting) + len(self._submitted),
            completed=len(ended),
            kv_cache=self.kv_cache.stats(),
            contexts=len(batch.context),
            context_tokens=sum(chunk.count for chunk in batch.context),
            generations=len(batch.generation),
            paused=len(batch.paused),
        )
        self._last_end = now
        # A listener that fails ends its own request, and no other.
        self._aborted.extend(r for r in touched if not r.tell())
        return touched

    @staticmethod
    def _accept(launched: LaunchedStep, best: list[int]) -> list[Request]:
        """Give each request its token; a chunk that is not its prompt's last gives none. `best`: the most likely tokens."""
        logits = launched.logits
        touched = []
        for request, chunk, start, end in launched.places():
            if request.finished:  # cancelled, or ended by the step before this one
                continue
            if logits is not None and chunk and request.reads_whole_context and not request.token_ids:
                request.keep_context(logits[start:end], chunk.start, chunk.is_last)
            if chunk is not None and not chunk.is_last:
                continue
            if logits is None or request.plain:
                request.accept(best[end - 1])
            else:
                request.choose(logits[end - 1])
            touched.append(request)
        return touched

    def _fail(self, error: BaseException) -> None:
        """After a step that failed nothing is known about the requests it served: they end, with the error."""
        requests, self._ahead = self.scheduler.running, None
        self.scheduler.finish(requests, computed=False)
        for request in requests:
            if request.cancel():
                request.error = (
                    error if isinstance(error, Exception) else RuntimeError(f"a step was interrupted: {error!r}")
                )
            request.tell()
