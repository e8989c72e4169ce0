"""What ranks tell each other, with plain tensors: sums, pieces in rank order, pipeline neighbours, plans of any length."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from trtllm_workshop.checkpoint import RankMapping
from trtllm_workshop.reference.parallel import FIRST_PIECE, Communicator

pytestmark = pytest.mark.usefixtures("one_thread")


def on_ranks(tp, pp, meeting, work, **options):
    """Runs `work(communicator)` on every rank, each in a thread of its own: gloo needs no processes. Results in rank order."""

    def one(rank):
        mine = Communicator(RankMapping(tp, pp, rank), meeting, connect_limit_s=20, step_limit_s=20, **options)
        try:
            return work(mine)
        finally:
            mine.close()

    with ThreadPoolExecutor(tp * pp) as pool:
        return list(pool.map(one, range(tp * pp)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", [2, 3])
def test_sums_and_pieces(tmp_path, tp, dtype):
    inputs = [torch.randn(5, 4, generator=torch.Generator().manual_seed(rank)).to(dtype) for rank in range(tp)]

    def work(mine):
        x = inputs[mine.mapping.rank]
        kept = x.clone()
        result = mine.allreduce(x), mine.allgather(x)
        assert torch.equal(x, kept)
        return result

    results = on_ranks(tp, 1, tmp_path / "meeting", work)
    wanted = torch.stack(inputs).double().sum(0)
    for total, gathered in results:
        assert total.dtype == gathered.dtype == dtype
        assert torch.equal(total, results[0][0]), "all ranks must go on with the same numbers"
        torch.testing.assert_close(total.double(), wanted, rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert torch.equal(gathered, torch.cat(inputs, dim=-1))


def test_stages_have_their_own_sums_and_reach_their_neighbours(tmp_path):
    def work(mine):
        place = mine.mapping
        total = float(mine.allreduce(torch.tensor([float(place.rank)])))
        if place.is_first_stage:
            mine.send(torch.full((2, 3), place.rank + 0.5, dtype=torch.bfloat16), place.rank + 2)
            return total, None
        return total, mine.receive((2, 3), torch.bfloat16, place.rank - 2)

    results = on_ranks(2, 2, tmp_path / "meeting", work)
    assert [total for total, _ in results] == [1.0, 1.0, 5.0, 5.0]
    for rank in (2, 3):
        assert torch.equal(results[rank][1], torch.full((2, 3), rank - 1.5, dtype=torch.bfloat16))


@pytest.mark.parametrize("length", [0, 1, FIRST_PIECE - 1, FIRST_PIECE, 5000])
def test_plans_of_any_length(tmp_path, length):
    numbers = np.arange(length, dtype=np.int64) * 3 - 7

    def work(mine):
        if mine.mapping.rank == 0:
            mine.announce(numbers)
            mine.announce_words({"größe": [1, 2]})
            return numbers, {"größe": [1, 2]}, mine.least(9)
        return mine.listen(), mine.listen_words(), mine.least(9 - mine.mapping.rank)

    for got, words, least in on_ranks(3, 1, tmp_path / "meeting", work):
        assert np.array_equal(got, numbers) and words == {"größe": [1, 2]} and least == 7


def listening():
    return {c.laddr for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def test_ports_are_on_loopback_and_close(tmp_path):
    before, seen = listening(), set()
    gate = threading.Barrier(2)

    def work(mine):
        gate.wait(20)
        seen.update(listening() - before)
        gate.wait(20)

    on_ranks(2, 1, tmp_path / "meeting", work)
    gc.collect()
    assert seen and {address.ip for address in seen} == {"127.0.0.1"}
    assert listening() <= before


def test_a_rank_that_never_comes_ends_at_the_limit(tmp_path):
    with pytest.raises(RuntimeError):
        Communicator(RankMapping(2, 1, 0), tmp_path / "meeting", connect_limit_s=0.5)


def test_a_rank_that_does_not_answer_ends_the_step_at_its_limit(tmp_path):
    done = threading.Event()

    def one(rank):
        mine = Communicator(RankMapping(2, 1, rank), tmp_path / "meeting", connect_limit_s=20, step_limit_s=0.3)
        if rank == 1:
            done.wait(20)
            return
        try:
            with pytest.raises(RuntimeError):
                mine.allreduce(torch.ones(1))
        finally:
            done.set()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))


def test_two_groups_side_by_side(tmp_path):
    def both(mine):
        other = Communicator(RankMapping(2, 1, mine.mapping.rank), tmp_path / "second", connect_limit_s=20)
        totals = [float(group.allreduce(torch.tensor([value]))) for group, value in ((mine, 1.0), (other, 10.0))]
        other.close()
        return totals

    assert on_ranks(2, 1, tmp_path / "first", both) == [[2.0, 20.0]] * 2
