"""From a scheduled batch to the graph's inputs: packed tokens, positions, cache slots and block tables."""

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
class StepInputs:
    """One step's inputs in the order of `network.INPUT_NAMES`, the pool left out, and whose logits come out.

    Attributes:
        tensors: input_ids, position_ids, last_token_ids.
        cache: slot_mapping, kv_cache_block_offsets, sequence_length, host_request_types, host_query_lengths,
            host_sequence_lengths; see `attention.attend`.
        rows: how many rows of logits each request has: context chunks first, then generation requests.
    """

    tensors: tuple[torch.Tensor, ...]
    cache: tuple[torch.Tensor, ...]
    rows: list[int]


def pack(
    batch: ScheduledBatch[Request],
    kv_cache: KvCacheManager,
    tokens_in_cache: Callable[[Request], int],
    newest: Mapping[int, int],
    tables: BlockTables,
    device: torch.device,
) -> StepInputs:
    """Pack a batch.

    Args:
        batch: what the scheduler chose; its tokens are in no cache yet.
        kv_cache: knows the blocks of each request.
        tokens_in_cache: of a request, this step's included.
        newest: by request id, what stands for the newest token of a request that generates, if the host does not know it.
        tables: kept from step to step.
        device: where the graph runs.
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
    contexts = len(batch.context)
    host = torch.tensor([[0] * contexts + [1] * len(batch.generation), lengths, totals], dtype=torch.int32)
    sent = send(device, ids, positions, last, slots, offsets.reshape(-1), totals)
    cache = (sent[3], sent[4].view(offsets.shape), sent[5], *host.unbind(0))
    return StepInputs((sent[0], sent[1], sent[2]), cache, rows)
