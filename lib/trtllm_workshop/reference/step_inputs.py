"""From a scheduled batch to the graph's inputs: packed tokens, positions, cache slots and block tables.

What the scheduler decides becomes plain integers first (`PackedStep`), which can be told to other ranks; each rank makes
tensors of them on its own device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_workshop.reference.cuda_graphs import send
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.scheduler import ScheduledBatch


class BlockTables:
    """The block lists of requests as rows of integers; what has not grown since the last step is not converted again."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[list[int], np.ndarray]] = {}

    def stack(self, kv_cache: KvCacheManager, request_ids: Sequence[int], width: int) -> np.ndarray:
        """[requests, width], int64: the first `width` blocks of each request; 0 where it has fewer."""
        table = np.zeros((len(request_ids), width), dtype=np.int64)
        kept = {}
        for index, request_id in enumerate(request_ids):
            blocks = kv_cache.blocks(request_id)
            known, row = self._rows.get(request_id, (None, None))
            # The manager lets a list grow in place; a request that was paused and came back has a new one.
            if row is None or known is not blocks or len(row) != len(blocks):
                row = np.array(blocks, dtype=np.int64)
            kept[request_id] = (blocks, row)
            table[index, : min(len(row), width)] = row[:width]
        self._rows = kept
        return table


@dataclass(frozen=True)
class PackedStep:
    """One step's inputs as integers of the host.

    Attributes:
        ids, positions, slots: of each packed token; an id may be a `cuda_graphs.row_reference`.
        last: packed tokens whose logits come out.
        types, lengths, totals: of each request: 0 for a context chunk and 1 for generation, new tokens, and tokens in the
            cache afterwards; context chunks come first.
        table: [requests, blocks of the longest], int64.
    """

    ids: Sequence[int] | np.ndarray
    positions: Sequence[int] | np.ndarray
    slots: Sequence[int] | np.ndarray
    last: Sequence[int] | np.ndarray
    types: Sequence[int] | np.ndarray
    lengths: Sequence[int] | np.ndarray
    totals: Sequence[int] | np.ndarray
    table: np.ndarray

    def send(self, device: torch.device) -> StepInputs:
        """The same as tensors on the device; nothing is waited for."""
        host = torch.from_numpy(np.array([self.types, self.lengths, self.totals], dtype=np.int32))
        table, totals = self.table.reshape(-1), self.totals
        sent = send(device, self.ids, self.positions, self.last, self.slots, table, totals)
        cache = (sent[3], sent[4].view(self.table.shape), sent[5], *host.unbind(0))
        return StepInputs(sent[0], sent[1], sent[2], cache)


@dataclass(frozen=True)
class StepInputs:
    """One step's inputs on the device, the pool left out; see `network.INPUT_NAMES`.

    Attributes:
        cache: slot_mapping, kv_cache_block_offsets, sequence_length, host_request_types, host_query_lengths,
            host_sequence_lengths; see `attention.attend`.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    last_token_ids: torch.Tensor
    cache: tuple[torch.Tensor, ...]


def pack(
    batch: ScheduledBatch[Request],
    kv_cache: KvCacheManager,
    tokens_in_cache: Callable[[Request], int],
    newest: Mapping[int, int],
    tables: BlockTables,
) -> tuple[PackedStep, list[int]]:
    """Pack a batch; also says how many rows of logits each request has, context chunks first.

    Args:
        batch: what the scheduler chose; its tokens are in no cache yet.
        kv_cache: knows the blocks of each request.
        tokens_in_cache: of a request, this step's included.
        newest: by request id, what stands for the newest token of a request that generates, if the host does not know it.
        tables: kept from step to step.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    rows, lengths, totals, request_ids = [], [], [], []

    def add(request: Request, new: list[int], start: int, all_rows: bool) -> None:
        end = len(ids) + len(new)
        last.extend(range(len(ids), end) if all_rows else (end - 1,))
        rows.append(len(new) if all_rows else 1)
        ids.extend(new)
        positions.extend(range(start, start + len(new)))
        slots.extend(kv_cache.slots(request.request_id, start, len(new)))
        lengths.append(len(new))
        totals.append(start + len(new))
        request_ids.append(request.request_id)

    for chunk in batch.context:
        request, end = chunk.request, chunk.start + chunk.count
        prompt, made = request.prompt_token_ids, request.token_ids
        known = prompt if end <= len(prompt) else prompt + made
        add(request, known[chunk.start : end], chunk.start, request.reads_whole_context and not made)
    for request in batch.generation:
        token = newest.get(request.request_id)
        add(request, request.token_ids[-1:] if token is None else [token], tokens_in_cache(request) - 1, False)
    offsets = tables.stack(kv_cache, request_ids, -(-max(totals) // kv_cache.tokens_per_block))
    types = [0] * len(batch.context) + [1] * len(batch.generation)
    return PackedStep(ids, positions, slots, last, types, lengths, totals, offsets), rows
