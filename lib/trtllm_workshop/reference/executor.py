"""The step loop: schedule, run the graph once for all requests of the step, choose tokens, end what is done."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch

from trtllm_workshop.reference.configs import KvCacheConfig
from trtllm_workshop.reference.engine import Engine
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.request import Request, logprobs_of
from trtllm_workshop.reference.sampler import choose, is_plain_greedy
from trtllm_workshop.reference.scheduler import Scheduler

CPU_POOL_CAP = 1 << 30  # bytes; a laptop keeps the rest of its memory


def free_bytes(device: torch.device) -> int:
    """Memory that is free now on the device, in bytes; on a CPU, what the system calls available."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def pool_blocks(
    config: KvCacheConfig, block_bytes: int, per_block: int, most_tokens: int, device: torch.device
) -> tuple[int, str]:
    """How many blocks the KV-cache pool gets, and the rule that decided, in words.

    The smallest of: free_gpu_memory_fraction of the free memory (on a CPU capped at 1 GiB), `max_tokens`, and what the
    engine can ever use (max_batch_size x max_seq_len).

    Raises:
        ValueError: when not even one block fits.
    """
    share = int(free_bytes(device) * config.free_gpu_memory_fraction)
    rules = [(share // block_bytes, f"{config.free_gpu_memory_fraction:.0%} of the free memory")]
    if device.type == "cpu":
        rules.append((CPU_POOL_CAP // block_bytes, "the cap of 1 GiB on a CPU"))
    rules.append((-(-most_tokens // per_block), "max_batch_size x max_seq_len of the engine"))
    if config.max_tokens is not None:
        rules.append((-(-config.max_tokens // per_block), f"KvCacheConfig(max_tokens={config.max_tokens})"))
    blocks, rule = min(rules, key=lambda r: r[0])
    if blocks < 1:
        raise ValueError(
            f"no room for a single KV-cache block of {block_bytes} bytes ({rule}); free memory or build a smaller engine"
        )
    return blocks, rule


class Executor:
    """Runs requests on one engine, many at a time.

    Args:
        engine: the loaded engine.
        kv_cache_config: size of the KV cache.
        max_batch_size: fewer requests a step than the engine allows, if given.
    """

    def __init__(
        self, engine: Engine, kv_cache_config: KvCacheConfig | None = None, max_batch_size: int | None = None
    ) -> None:
        self.engine = engine
        config, build = engine.pretrained_config, engine.build_config
        limit = build["max_batch_size"]
        if max_batch_size is not None and max_batch_size < 1:
            raise ValueError(
                f"max_batch_size={max_batch_size} must be at least 1; leave it out for the engine's {limit}"
            )
        self.max_batch_size = min(max_batch_size or limit, limit)
        per_block = build["plugin_config"]["tokens_per_block"]
        shape = (config["num_hidden_layers"], per_block, 2, config["num_key_value_heads"], config["head_size"])
        block_bytes = engine.kv_cache_dtype.itemsize * torch.Size(shape).numel()
        blocks, rule = pool_blocks(
            kv_cache_config or KvCacheConfig(), block_bytes, per_block, limit * build["max_seq_len"], engine.device
        )
        self.pool_description = (
            f"KV cache: {blocks} blocks of {per_block} tokens = {blocks * per_block} tokens, "
            f"{blocks * block_bytes / 2**20:.1f} MiB (decided by {rule})"
        )
        self.pool = torch.zeros(shape[0], blocks, *shape[1:], dtype=engine.kv_cache_dtype, device=engine.device)
        self.kv_cache = KvCacheManager(blocks, per_block)
        self.scheduler: Scheduler[Request] = Scheduler(self.kv_cache, self.max_batch_size, build["max_num_tokens"])
        self.iterations = 0
        # One step at a time, whichever thread asks: a step serves the requests of all of them.
        self._lock = threading.RLock()

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: when it can never run on this engine or pool.
        """
        with self._lock:
            self.scheduler.add(request)

    def abort(self, requests: Iterable[Request]) -> None:
        """Take requests out, whatever state they are in, and free their blocks."""
        requests = list(requests)
        with self._lock:
            for request in requests:
                request.finish_reason = request.finish_reason or "cancelled"
            self.scheduler.finish(requests)

    @property
    def busy(self) -> bool:
        with self._lock:
            return bool(self.scheduler.waiting or self.scheduler.running)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Run one iteration.

        Returns:
            The requests that got a token, finished ones included.
        """
        with self._lock:
            context, generation = self.scheduler.schedule()
            requests: list[Request] = [*context, *generation]
            if not requests:
                return []
            self.iterations += 1
            logits = self._forward(context, generation)
            self._accept(requests, len(context), logits)
            self.scheduler.finish([r for r in requests if r.finished])
            return requests

    def _forward(self, context: list[Request], generation: list[Request]) -> torch.Tensor:
        """Pack one step and run the graph: [rows, vocabulary]; a row per request, or per token for context logits."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        lengths, totals, tables = [], [], []
        for index, request in enumerate([*context, *generation]):
            known = len(request.prompt_token_ids) + len(request.token_ids)
            new = request.prompt_token_ids if index < len(context) else request.token_ids[-1:]
            start = known - len(new)
            ids += new
            positions += range(start, known)
            slots += self.kv_cache.slots(request.request_id, start, len(new))
            rows += (
                range(len(ids) - len(new), len(ids))
                if index < len(context) and wants_context(request)
                else [len(ids) - 1]
            )
            lengths.append(len(new))
            totals.append(known)
            tables.append(self.kv_cache.blocks(request.request_id))
        width = max(len(t) for t in tables)
        tables = [t + [0] * (width - len(t)) for t in tables]
        device = self.engine.device
        tensor = torch.tensor
        return self.engine.run(
            tensor(ids, device=device),
            tensor(positions, device=device),
            tensor(rows, device=device),
            self.pool,
            tensor(slots, device=device),
            tensor(tables, device=device),
            tensor(totals, device=device),
            tensor([0] * len(context) + [1] * len(generation), dtype=torch.int32),
            tensor(lengths, dtype=torch.int32),
            tensor(totals, dtype=torch.int32),
        )

    def _accept(self, requests: list[Request], contexts: int, logits: torch.Tensor) -> None:
        """Choose each request's token from its row of logits."""
        best = logits.argmax(-1).tolist()
        row = 0
        for index, request in enumerate(requests):
            if index < contexts and wants_context(request):
                self._keep_context(request, logits[row : row + len(request.prompt_token_ids)])
                row += len(request.prompt_token_ids) - 1
            params = request.params
            if (
                is_plain_greedy(params, request.rules)
                and params.logprobs is None
                and not params.return_generation_logits
            ):
                token = best[row]
            else:
                values = logits[row].float().cpu()
                token = choose(
                    values, params, request.rules, request.prompt_token_ids, request.token_ids, request.generator
                )
                if params.logprobs is not None:
                    request.logprobs.append(logprobs_of(values, token, params.logprobs))
                if params.return_generation_logits:
                    request.generation_logits.append(values)
            request.accept(token)
            row += 1

    @staticmethod
    def _keep_context(request: Request, logits: torch.Tensor) -> None:
        values = logits.float().cpu()
        if request.params.return_context_logits:
            request.context_logits = values
        if request.params.prompt_logprobs is not None:
            # The logits after token i judge token i + 1; the first token has none.
            following = request.prompt_token_ids[1:]
            count = request.params.prompt_logprobs
            request.prompt_logprobs = [logprobs_of(v, t, count) for v, t in zip(values, following, strict=False)]


def wants_context(request: Request) -> bool:
    """Whether the logits of every prompt token are needed, not only the last one's."""
    return request.params.return_context_logits or request.params.prompt_logprobs is not None
