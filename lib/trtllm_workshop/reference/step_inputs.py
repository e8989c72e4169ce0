"""From a scheduled batch to the graph's inputs: packed tokens, positions, cache slots and block tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from trtllm_workshop.reference.cuda_graphs import send
from trtllm_workshop.reference.kv_cache import KvCacheManager
from trtllm_workshop.reference.request import Request
from trtllm_workshop.reference.scheduler import ScheduledBatch


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
    device: torch.device,
) -> StepInputs:
    """Pack a batch.

    Args:
        batch: what the scheduler chose; its tokens are in no cache yet.
        kv_cache: knows the blocks of each request.
        tokens_in_cache: of a request, this step's included.
        newest: by request id, what stands for the newest token of a request that generates, if the host does not know it.
        device: where the graph runs.
    """
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    last: list[int] = []
    rows, lengths, totals, tables = [], [], [], []

    def add(request: Request, new: list[int], start: int, all_rows: bool) -> None:
        end = len(ids) + len(new)
        last.extend(range(len(ids), end) if all_rows else (end - 1,))
        rows.append(len(new) if all_rows else 1)
        ids.extend(new)
        positions.extend(range(start, start + len(new)))
        slots.extend(kv_cache.slots(request.request_id, start, len(new)))
        lengths.append(len(new))
        totals.append(start + len(new))
        tables.append(kv_cache.blocks(request.request_id))

    for chunk in batch.context:
        request, end = chunk.request, chunk.start + chunk.count
        prompt, made = request.prompt_token_ids, request.token_ids
        known = prompt if end <= len(prompt) else prompt + made
        add(request, known[chunk.start : end], chunk.start, request.reads_whole_context and not made)
    for request in batch.generation:
        token = newest.get(request.request_id)
        add(request, request.token_ids[-1:] if token is None else [token], tokens_in_cache(request) - 1, False)
    used = [-(-total // kv_cache.tokens_per_block) for total in totals]
    offsets = np.zeros((len(tables), max(used)), dtype=np.int64)
    for row, (table, count) in enumerate(zip(tables, used, strict=True)):
        offsets[row, :count] = table[:count]
    contexts = len(batch.context)
    host = torch.tensor([[0] * contexts + [1] * len(batch.generation), lengths, totals], dtype=torch.int32)

    sent = send(device, ids, positions, last, slots, offsets.reshape(-1).tolist(), totals)
    cache = (sent[3], sent[4].view(offsets.shape), sent[5], *host.unbind(0))
    return StepInputs((sent[0], sent[1], sent[2]), cache, rows)
