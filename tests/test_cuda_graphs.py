"""Generation steps with inputs that stay on the device: against the engine's plain call, with and without CUDA graphs."""

from __future__ import annotations

import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_cuda_kernels import DEVICES, MODES, PER_BLOCK, POSITIONS, graph, spec  # noqa: E402
from trtllm_workshop.reference import cuda_kernels  # noqa: E402
from trtllm_workshop.reference.cuda_graphs import (  # noqa: E402
    GenerationGraphs,
    PendingTokens,
    batch_sizes,
    resolve_tokens,
    row_reference,
    send,
)
from trtllm_workshop.reference.engine import kv_cache_dtype  # noqa: E402

MOST_BLOCKS = POSITIONS // PER_BLOCK
MOST_REQUESTS = 4  # the limit of the graph that `graph` exports
BLOCKS = 40


def plain_step(
    run: Any, pool: torch.Tensor, tokens: list[int], lengths: list[int], blocks: list[list[int]]
) -> torch.Tensor:
    """A generation step as the executor's general path makes it. Returns [requests, vocabulary]."""
    device, width = pool.device, max(map(len, blocks))
    slots = [of[(n - 1) // PER_BLOCK] * PER_BLOCK + (n - 1) % PER_BLOCK for n, of in zip(lengths, blocks, strict=True)]
    table = [of + [0] * (width - len(of)) for of in blocks]
    ones, count = torch.ones(len(tokens), dtype=torch.int32), len(tokens)
    given = (torch.tensor(each, device=device) for each in (slots, table, lengths))
    first = (torch.tensor(each, device=device) for each in (tokens, [n - 1 for n in lengths], list(range(count))))
    return run(*first, pool, *given, ones, ones, torch.tensor(lengths, dtype=torch.int32))


class Load:
    """Requests that come and go, each with blocks of its own and tokens that the plain path chose."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.free = list(range(BLOCKS))
        self.random.shuffle(self.free)
        self.running: list[dict[str, Any]] = []

    def change(self) -> None:
        """Some requests end, some begin, at any place of the batch."""
        for request in list(self.running):
            if self.random.random() < 0.15 or request["length"] >= POSITIONS:
                self.free += request["blocks"]
                self.running.remove(request)
        while len(self.running) < MOST_REQUESTS and (not self.running or self.random.random() < 0.4):
            token, length = self.random.randrange(96), self.random.randrange(3 * PER_BLOCK)
            new = {"token": token, "length": length, "blocks": [], "row": None}
            for _ in range(-(-length // PER_BLOCK)):
                new["blocks"].append(self.free.pop())
            self.running.insert(self.random.randrange(len(self.running) + 1), new)

    def grow(self) -> None:
        for request in self.running:
            request["length"] += 1
            if request["length"] > len(request["blocks"]) * PER_BLOCK:
                request["blocks"].append(self.free.pop())


def graphs_for(run: Any, pool: torch.Tensor, **more: Any) -> GenerationGraphs:
    """Padded on a processor too, where only graphs would need it."""
    graphs = GenerationGraphs(run, pool, MOST_REQUESTS, MOST_BLOCKS, BLOCKS, PER_BLOCK, **more)
    graphs._padded = True
    return graphs


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["plain", "fp8-kv8"])
@pytest.mark.parametrize("seed", range(3))
def test_steps_equal_the_plain_calls(device: str, name: str, seed: int) -> None:
    mode, dtype = MODES[name], torch.bfloat16 if device == "cuda" else torch.float32
    run = cuda_kernels.optimize(graph(mode, device, dtype)())
    sizes = spec()
    shape = (sizes.num_hidden_layers, BLOCKS + 1, PER_BLOCK, 2, sizes.num_key_value_heads, sizes.head_size)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(kv_cache_dtype(mode, dtype)).to(device)
    wanted_pool = pool.clone()
    graphs, load = graphs_for(run, pool), Load(seed)
    for number in range(25):
        load.change()
        load.grow()
        now = load.running
        blocks, lengths = [r["blocks"] for r in now], [r["length"] for r in now]
        wanted = plain_step(run, wanted_pool, [r["token"] for r in now], lengths, blocks)
        known = [r["row"] is None or load.random.random() < 0.3 for r in now]
        given = [r["token"] if k else row_reference(r["row"]) for r, k in zip(now, known, strict=True)]
        with_logits = number % 3 == 0
        done = graphs.step(given, lengths, blocks, want_logits=with_logits)
        pending = PendingTokens(done.tokens)
        if with_logits:
            assert done.logits is not None and done.logits.shape == wanted.shape
            # On a processor the products of another batch size may be summed in another order.
            tolerance = 0.02 if device == "cuda" else 1e-5
            assert float((done.logits.float() - wanted.float()).norm() / wanted.float().norm()) < tolerance
        chosen = pending.wait()
        for row, (request, token) in enumerate(zip(now, chosen, strict=True)):
            # 16 bits decide near-ties either way; both paths go on with the same token.
            gap = float(wanted[row].max() - wanted[row, token])
            assert gap <= (0.05 if device == "cuda" else 1e-4), "the chosen token is not the largest logit"
            request["token"], request["row"] = token, row
        stays = torch.ones(pool.shape[1], dtype=torch.bool)
        stays[BLOCKS] = False
        written, expected = pool[:, stays].float(), wanted_pool[:, stays].float()
        assert torch.allclose(written, expected, atol=0.3 if device == "cuda" else 1e-4), (
            "a block that is not the step's was written"
        )


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_are_not_the_steps_are_never_touched(device: str) -> None:
    """Exactly the slots of the requests change, and the padding block."""
    mode, dtype = MODES["plain"], torch.bfloat16
    run, sizes = cuda_kernels.optimize(graph(mode, device, dtype)()), spec()
    shape = (sizes.num_hidden_layers, BLOCKS + 1, PER_BLOCK, 2, sizes.num_key_value_heads, sizes.head_size)
    pool = torch.full(shape, 7.0, dtype=dtype, device=device)
    graphs = graphs_for(run, pool)
    graphs.warm_up()
    for lengths in ([5, 9, 20], [6, 10], [1]):
        pool[:, :] = 7.0
        blocks = [[3 * row, 3 * row + 1, 3 * row + 2] for row in range(len(lengths))]
        graphs.step([1] * len(lengths), lengths, blocks)
        changed = (pool != 7.0).flatten(3).any(-1).any(0)
        slots = {(of[(n - 1) // PER_BLOCK], (n - 1) % PER_BLOCK) for n, of in zip(lengths, blocks, strict=True)}
        touched = {tuple(at) for at in changed.nonzero().tolist() if at[0] != BLOCKS}
        assert touched == slots


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_of_a_step_elsewhere_are_taken_from_the_device(device: str) -> None:
    mode = MODES["plain"]
    run, sizes = cuda_kernels.optimize(graph(mode, device)()), spec()
    shape = (sizes.num_hidden_layers, BLOCKS + 1, PER_BLOCK, 2, sizes.num_key_value_heads, sizes.head_size)
    pool = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    graphs = graphs_for(run, pool)
    blocks = [[0], [1], [2]]
    wanted = graphs.step([11, 12, 13], [1, 1, 1], blocks, want_logits=True).logits.clone()
    elsewhere = torch.tensor([13, 90, 11, 12], device=device)
    rows = [row_reference(2), row_reference(3), row_reference(0)]
    got = graphs.step(rows, [1, 1, 1], blocks, previous=elsewhere, want_logits=True).logits
    assert torch.equal(got, wanted)


def test_the_same_blocks_in_another_order_are_sent_again() -> None:
    """Between two steps the caller may change its own lists in place."""
    run, sizes = graph(MODES["plain"], "cpu", torch.float32)(), spec()
    shape = (sizes.num_hidden_layers, BLOCKS + 1, PER_BLOCK, 2, sizes.num_key_value_heads, sizes.head_size)
    pool = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graphs, mine, lengths = graphs_for(run, pool), [4, 5], [12]
    first = graphs.step([1], lengths, [mine], want_logits=True).logits.clone()
    mine.reverse()
    second = graphs.step([1], lengths, [mine], want_logits=True).logits
    assert float((first - second).abs().max()) > 1e-3


def test_batch_sizes_are_dense_below_and_end_at_the_limit() -> None:
    assert batch_sizes(1) == (1,) and batch_sizes(3) == (1, 2, 3)
    assert batch_sizes(64)[-3:] == (32, 48, 64)
    for most in (1, 2, 5, 64, 100, 512, 1000, 2048):
        sizes = batch_sizes(most)
        assert sizes[-1] == most and list(sizes) == sorted(set(sizes))
        for requests in range(17, most + 1):
            padded = next(size for size in sizes if size >= requests)
            assert padded <= max(1.5 * requests, requests + 8)


def test_too_many_requests_and_a_foreign_padding_block_are_refused() -> None:
    pool = torch.zeros(1, 3, PER_BLOCK, 2, 1, 16)
    with pytest.raises(ValueError, match="padding_block=3 is none of the pool's 3 blocks"):
        GenerationGraphs(lambda *_: pool, pool, 4, 2, 3, PER_BLOCK)
    graphs = GenerationGraphs(lambda *_: pool, pool, 4, 2, 2, PER_BLOCK)
    for count in (0, 5):
        with pytest.raises(ValueError, match=f"a step of {count} requests: 1 to 4 are possible"):
            graphs.step([1] * count, [1] * count, [[0]] * count)


@pytest.mark.parametrize("device", DEVICES)
def test_columns_travel_together_and_references_are_resolved(device: str) -> None:
    ids, lengths, none = send(torch.device(device), [5, row_reference(1), 7, row_reference(0)], [1, 2], [])
    assert lengths.tolist() == [1, 2] and none.tolist() == []
    previous = torch.tensor([100, 200, 300], device=device)
    assert resolve_tokens(ids, previous).tolist() == [5, 200, 7, 100]
    assert ids.tolist() == [5, -2, 7, -1], "the given ids stay as they are"
