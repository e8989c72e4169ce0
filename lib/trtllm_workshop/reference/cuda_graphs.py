"""Generation steps under CUDA graphs, and tokens that stay on the device from one step to the next.

A generation step of a small batch is hundreds of kernels of a few microseconds each; launched one by one from Python, the device
waits for the processor most of the time. A CUDA graph is recorded once and then launched as one. It replays the same kernels on the
same addresses, so every input lies in a buffer that stays, and a step is padded to the next of a few batch sizes. Padding rows are
requests of one token in a block of their own (`padding_block`), which no request owns.

The processor sends little: the tokens, the lengths, and the block table when it has changed, in one copy. Positions and slots follow
on the device. The chosen tokens stay there too: the next step may be launched before the processor has read them, with references
to rows of the step before in the place of token ids (`row_reference`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

FIRST_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def batch_sizes(most: int) -> tuple[int, ...]:
    """The batch sizes that are recorded: dense where padding costs a large share, sparse above; the last is `most`."""
    sizes = {*FIRST_SIZES, *range(192, 513, 64), *range(640, most, 128)}
    return (*sorted(size for size in sizes if size < most), most)


def row_reference(row: int) -> int:
    """Stands for a token that only the device knows yet: the one of this row of the step before."""
    return -1 - row


def resolve_tokens(tokens: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """Token ids, with references replaced.

    tokens: [n], int64, ids or `row_reference`s; previous: [rows], int64, the tokens of the step before.
    """
    rows = (-1 - tokens).clamp_(min=0)
    return torch.where(tokens < 0, previous.index_select(0, rows), tokens)


def send(device: torch.device, *columns: Sequence[int] | np.ndarray) -> list[torch.Tensor]:
    """Lists of integers as int64 tensors on the device, by one copy that nothing waits for."""
    sizes = [len(column) for column in columns]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    values, at = host.numpy(), 0
    for column, size in zip(columns, sizes, strict=True):
        values[at : at + size] = column
        at += size
    # The allocator of pinned memory gives this piece out again only when the copy is done.
    return list(host.to(device, non_blocking=True).split(sizes))


class PendingTokens:
    """Tokens on their way from the device; `wait` gives them as a list.

    The copy is queued at once, behind the step that makes the tokens: later steps may overwrite the tensor.
    """

    def __init__(self, tokens: torch.Tensor) -> None:
        self._event = None
        self._host = tokens
        if tokens.device.type == "cuda":
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tokens.clone()

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._host.tolist()


@dataclass(frozen=True)
class GenerationStep:
    """What a step leaves on the device; buffers of the graphs, good until the next step.

    tokens: [requests], int64, the largest logit's. logits: [requests, vocabulary] if they were asked for.
    """

    tokens: torch.Tensor
    logits: torch.Tensor | None


@dataclass(frozen=True)
class _Buffers:
    """Views of the input buffer for one batch size: tokens [size], lengths [size], table [size, max blocks]."""

    tokens: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor


class GenerationGraphs:
    """Runs steps in which every request generates, each under a CUDA graph of the next larger batch size.

    Graphs are recorded when first needed, or by `warm_up`. They share one pool of memory. Where nothing can be recorded
    (`capture=False`, a processor) the same steps run operator by operator: same inputs, same results.

    Args:
        run: the engine's, see `network.INPUT_NAMES`.
        pool: the KV-cache pool, padding block included.
        max_batch_size: of the engine, which allows no larger step.
        max_blocks: most blocks of a request, as many as max_seq_len needs.
        padding_block: index of a block that no request gets.
        tokens_per_block: of the pool.
        capture: whether to record; by default on CUDA. Only right when no kernel depends on lengths that the processor knows, see
            `cuda_kernels.can_capture`.
    """

    def __init__(
        self,
        run: Callable[..., torch.Tensor],
        pool: torch.Tensor,
        max_batch_size: int,
        max_blocks: int,
        padding_block: int,
        tokens_per_block: int,
        capture: bool | None = None,
    ) -> None:
        if not 0 <= padding_block < pool.shape[1]:
            raise ValueError(f"padding_block={padding_block} is none of the pool's {pool.shape[1]} blocks")
        self._run, self._pool, self._per_block = run, pool, tokens_per_block
        self._max_blocks, self._padding_block = max_blocks, padding_block
        self.sizes = batch_sizes(max_batch_size)
        self._capture = pool.is_cuda if capture is None else capture
        self._padded = self._capture
        self._device = pool.device
        self._inputs = torch.zeros(max_batch_size * (2 + max_blocks), dtype=torch.int64, device=self._device)
        self._tokens = torch.zeros(max_batch_size, dtype=torch.int64, device=self._device)
        self._logits: torch.Tensor | None = None
        self._rows = torch.arange(max_batch_size, device=self._device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._capture else None
        self._side = torch.cuda.Stream(self._device) if self._capture else None
        # What the device's table holds, to send only what is new.
        self._table = np.full((max_batch_size, max_blocks), padding_block, dtype=np.int64)
        self._known: list[list[int]] = [[] for _ in range(max_batch_size)]
        self._sent_size = 0

    def size_for(self, requests: int) -> int:
        """The batch size that a step of so many requests is padded to.

        Raises:
            ValueError: when there are more requests than the engine allows, or none.
        """
        if not 1 <= requests <= self.sizes[-1]:
            raise ValueError(f"a step of {requests} requests: 1 to {self.sizes[-1]} are possible (max_batch_size)")
        return next(size for size in self.sizes if size >= requests) if self._padded else requests

    @torch.inference_mode()
    def step(
        self,
        tokens: Sequence[int],
        lengths: Sequence[int],
        blocks: Sequence[list[int]],
        previous: torch.Tensor | None = None,
        want_logits: bool = False,
    ) -> GenerationStep:
        """Queue one step; nothing is waited for.

        Args:
            tokens: of each request the newest token, or `row_reference(row of the step before)`.
            lengths: tokens in the cache after this step.
            blocks: the blocks of each request, in order; a list may be the caller's own and grow between steps.
            previous: [rows], int64 on the device: the tokens of the step before, when that step was not one of this object's.
            want_logits: whether the logits are kept.
        """
        count, size = len(tokens), self.size_for(len(tokens))
        if previous is not None:
            self._tokens[: len(previous)].copy_(previous)
        if self._capture and (size, want_logits) not in self._graphs:
            self._record(size, want_logits)
        self._send(size, tokens, lengths, blocks)
        if self._capture:
            self._graphs[size, want_logits].replay()
            logits = self._logits
        else:
            logits = self._body(size, torch.tensor([*lengths, *[1] * (size - count)], dtype=torch.int32))
        kept = logits[:count] if want_logits and logits is not None else None
        return GenerationStep(self._tokens[:count], kept)

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int] | None = None) -> None:
        """Record the graphs of these batch sizes (by default all), the largest first, whose memory the others then share."""
        for size in sorted(self.sizes if sizes is None else {self.size_for(size) for size in sizes}, reverse=True):
            if self._capture and (size, False) not in self._graphs:
                self._record(size, False)

    def _buffers(self, size: int) -> _Buffers:
        tokens, lengths, table = self._inputs[: size * (2 + self._max_blocks)].split(
            (size, size, size * self._max_blocks)
        )
        return _Buffers(tokens, lengths, table.view(size, self._max_blocks))

    def _body(self, size: int, host_lengths: torch.Tensor) -> torch.Tensor:
        """The step itself: everything here is recorded. Returns the logits, [size, vocabulary]."""
        given = self._buffers(size)
        positions = given.lengths - 1
        block = given.table.gather(1, (positions // self._per_block)[:, None])[:, 0]
        slots = block * self._per_block + positions % self._per_block
        ids = resolve_tokens(given.tokens, self._tokens)
        ones = torch.ones(size, dtype=torch.int32)
        host = (ones, ones, host_lengths)
        logits = self._run(ids, positions, self._rows[:size], self._pool, slots, given.table, given.lengths, *host)
        self._tokens[:size] = logits.argmax(-1)
        return logits

    def _record(self, size: int, want_logits: bool) -> None:
        """Record a graph. The kernels run once before, on padding rows alone, so that all of them are compiled."""
        self._send(size, [], [], [])
        host_lengths = torch.full((size,), self._max_blocks * self._per_block, dtype=torch.int32)
        kept = self._tokens.clone()
        current, side = torch.cuda.current_stream(), self._side
        if side is None:
            raise RuntimeError("this object was made without CUDA graphs (capture=False)")
        side.wait_stream(current)
        with torch.cuda.stream(side):
            logits = self._body(size, host_lengths)
            if want_logits and self._logits is None:
                self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
            del logits
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=side, capture_error_mode="thread_local"):
            logits = self._body(size, host_lengths)
            if self._logits is not None and want_logits:
                self._logits[:size] = logits
            # Kept by nobody, its memory serves the other graphs as well.
            del logits
        self._tokens.copy_(kept)
        self._graphs[size, want_logits] = graph

    def _send(self, size: int, tokens: Sequence[int], lengths: Sequence[int], blocks: Sequence[list[int]]) -> None:
        """Copy a step's inputs to the device; the table only if it has changed or lies there for another size."""
        count, changed = len(tokens), size != self._sent_size
        for row, of_request in enumerate(blocks):
            if self._known[row] != of_request:
                self._table[row, : len(of_request)] = of_request
                self._known[row] = list(of_request)
                changed = True
        for row in range(count, size):
            if self._known[row]:
                self._table[row] = self._padding_block
                self._known[row] = []
                changed = True
        numbers = size * (2 + self._max_blocks) if changed else 2 * size
        host = torch.empty(numbers, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        values = host.numpy()
        values[:count], values[count:size] = tokens, 0
        values[size : size + count], values[size + count : 2 * size] = lengths, 1
        if changed:
            values[2 * size :] = self._table[:size].reshape(-1)
            self._sent_size = size
        self._inputs[:numbers].copy_(host, non_blocking=True)
