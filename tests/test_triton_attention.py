"""The attention kernels against the plain path: on a GPU for real, elsewhere through Triton's interpreter if Triton is there."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from triton_device import CUDA, DEVICE, TYPES, require_triton  # noqa: E402

require_triton()

from trtllm_workshop.reference import attention, triton_attention  # noqa: E402
from trtllm_workshop.reference.fp8 import to_e4m3  # noqa: E402

SIZES = [(8, 2, 64, 32), (6, 1, 128, 64), (4, 4, 16, 8)] + ([(32, 8, 128, 32), (32, 4, 64, 64)] if CUDA else [])
LENGTHS = [1, 31, 32, 33, 64, 65, 130] + ([1000, 2047] if CUDA else [])
# Rounding the result to 16 bits makes 2.8e-4 (float16) and 2.3e-3 (bfloat16), rounding the softmax's weights as much again.
TOLERANCE = {"float16": 8e-4, "bfloat16": 6e-3}


class Case:
    """A layer's pool with random content, and requests with blocks anywhere in it."""

    def __init__(self, sizes: tuple[int, int, int, int], kind: str, quantized: bool, new: list[int], total: list[int]):
        self.heads, self.kv_heads, self.size, per_block = sizes
        generator = torch.Generator().manual_seed(sum(total))
        self.dtype, requests = getattr(torch, kind), len(new)
        width = -(-max(total) // per_block) + 1  # longer than any request needs
        blocks = requests * width + 2
        self.table = torch.randperm(blocks, generator=generator)[: requests * width].view(requests, width).to(DEVICE)
        pool = torch.randn(blocks, per_block, 2, self.kv_heads, self.size, generator=generator)
        self.scale = torch.tensor([0.03], device=DEVICE) if quantized else None
        pool = (pool * 30).clamp(-448, 448).to(torch.float8_e4m3fn) if quantized else pool.to(self.dtype)
        self.new, self.total, self.lengths = new, total, torch.tensor(total, device=DEVICE)
        # What no request reads must not matter, so it is not even a number.
        used = torch.zeros(blocks, per_block, dtype=torch.bool)
        for row, length in zip(self.table.cpu(), total, strict=True):
            at = torch.arange(length)
            used[row[at // per_block], at % per_block] = True
        as_bytes = attention.as_plain_bytes(pool)
        as_bytes[~used] = 0x7F if quantized else float("nan")
        self.pool = pool.to(DEVICE)
        # Queries lie between keys and values of the packed projection, as in the engine.
        qkv = torch.randn(sum(new), self.heads + 2 * self.kv_heads, self.size, generator=generator).to(self.dtype)
        self.q = qkv.to(DEVICE)[:, : self.heads]

    def wanted(self) -> torch.Tensor:
        """The plain path request by request in float32: keys and values of new tokens read from the pool as well."""
        parts, start = [], 0
        for row, (new, total) in enumerate(zip(self.new, self.total, strict=True)):
            blocks = self.table[row : row + 1, : -(-total // self.pool.shape[1])]
            keys, values = attention._gather(self.pool, blocks, total, torch.float32, self.scale)
            q = self.q[None, start : start + new].float()
            past = (keys[:, : total - new], values[:, : total - new])
            parts.append(attention._context_attention(q, keys[:, total - new :], values[:, total - new :], past)[0])
            start += new
        return torch.cat(parts).flatten(1)

    def empty(self) -> torch.Tensor:
        shape = (self.q.shape[0], self.heads * self.size)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE)


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest ‖row - wanted row‖ / ‖wanted row‖."""
    return float(((got.float() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("splits", [1, 2, 8, None])
def test_generation(kind: str, quantized: bool, sizes: Any, splits: int | None) -> None:
    case = Case(sizes, kind, quantized, [1] * len(LENGTHS), LENGTHS)
    out = case.empty()
    triton_attention.generation_attention(case.q, case.pool, case.scale, case.table, case.lengths, out, splits=splits)
    assert distance(out, case.wanted()) < TOLERANCE[kind]


@pytest.mark.skipif(not CUDA, reason="the interpreter's rounding to e4m3 loses carries: needs a CUDA GPU")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_result_in_e4m3_is_the_rounded_16_bit_result(splits: int) -> None:
    case = Case(SIZES[0], "float16", True, [1] * len(LENGTHS), LENGTHS)
    arguments = (case.q, case.pool, case.scale, case.table, case.lengths)
    plain, scale = case.empty(), torch.tensor([0.004], device=DEVICE)
    triton_attention.generation_attention(*arguments, plain, splits=splits)
    codes = torch.empty(plain.shape, dtype=torch.float8_e4m3fn, device=DEVICE)
    triton_attention.generation_attention(*arguments, codes, scale, splits=splits)
    assert float(plain.abs().max()) > 0.1
    assert torch.equal(codes.float(), to_e4m3(plain, scale).float())


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_context(kind: str, quantized: bool, sizes: Any) -> None:
    """Fresh prompts, chunks behind cached tokens and single tokens in one launch."""
    new, cached = [70, 1, 64, 3, 65], [0, 90, 32, 0, 7]
    total = [a + b for a, b in zip(new, cached, strict=True)]
    case = Case(sizes, kind, quantized, new, total)
    tiles = torch.tensor(triton_attention.context_tiles(new, total), dtype=torch.int32, device=DEVICE)
    out = case.empty()
    triton_attention.context_attention(case.q, case.pool, case.scale, case.table, tiles, out)
    assert distance(out, case.wanted()) < TOLERANCE[kind]


def test_tiles_cover_every_new_token_once_and_the_longest_come_first() -> None:
    new, total = [1, 200, 64, 65], [500, 200, 128, 1000]
    tiles = triton_attention.context_tiles(new, total)
    seen = {}
    for request, first, count, before in tiles:
        assert 1 <= count <= triton_attention.ROWS
        for index in range(count):
            assert first + index not in seen
            seen[first + index] = (request, before + index)
    wanted = [(row, at) for row, (n, t) in enumerate(zip(new, total, strict=True)) for at in range(t - n, t)]
    assert [seen[token] for token in range(sum(new))] == wanted
    before = [tile[3] for tile in tiles]
    assert before == sorted(before, reverse=True)


def test_splits_fill_the_device_and_depend_on_the_number_of_requests_alone() -> None:
    for kv_heads, itemsize in ((1, 2), (4, 2), (8, 1)):
        splits = [triton_attention.splits_for(requests, kv_heads, 132, itemsize) for requests in range(1, 2049)]
        assert splits == sorted(splits, reverse=True) and splits[-1] == 1
        assert all(1 <= s <= triton_attention.MOST_SPLITS and s & (s - 1) == 0 for s in splits)
    assert triton_attention.splits_for(64, 8, 132, 2) == 1 and triton_attention.splits_for(1, 8, 132, 2) > 16
    assert triton_attention.splits_for(64, 8, 132, 1) == 2
