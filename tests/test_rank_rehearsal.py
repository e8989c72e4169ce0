"""Ranks that do not take part in every step are found without waiting, and scripts in which they would not are pointed at."""

from __future__ import annotations

import json
import threading

import pytest
import torch
from engines import TOKENS_PER_BLOCK, prompt_of, quiet
from hypothesis import given, settings
from hypothesis import strategies as st
from trtllm_workshop.notebook_commands import check_notebook_commands
from trtllm_workshop.rank_check import check_rank_code
from trtllm_workshop.rank_rehearsal import WouldHang, rehearse
from trtllm_workshop.reference.build import build_engine
from trtllm_workshop.reference.configs import BuildConfig, PluginConfig
from trtllm_workshop.reference.convert import convert_checkpoint
from trtllm_workshop.reference.convert_plan import Sharding
from trtllm_workshop.reference.engine import load_engine

pytestmark = pytest.mark.usefixtures("one_thread")

# Rehearsals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchanges_give_every_rank_the_same(size):
    def program(rank):
        mine = torch.tensor([[rank.rank + 1.0, 10.0]])
        total = rank.allreduce(mine)
        rank.barrier()
        return total, rank.allgather(mine), rank.broadcast("plan" if rank.rank == 0 else None), mine

    results = rehearse(program, size)
    for number, (total, gathered, plan, mine) in enumerate(results):
        assert total.tolist() == [[size * (size + 1) / 2, 10.0 * size]]
        assert gathered.tolist() == [[value for rank in range(size) for value in (rank + 1.0, 10.0)]]
        assert plan == "plan" and mine.tolist() == [[number + 1.0, 10.0]], "a rank's own tensor was changed"


def test_P101_a_rank_that_returns_early_is_named():
    """What a web application does that calls the engine on rank 0 alone: the other rank never comes."""

    def program(rank):
        rank.allreduce(torch.ones(3))
        if rank.rank != 0:
            return
        rank.allreduce(torch.ones(3))

    with pytest.raises(WouldHang) as caught:
        rehearse(program, 2)
    said = str(caught.value)
    assert "rank 0 waits in its exchange 2, allreduce of shape [3]" in said and "rank 1 ended after 1 exchanges" in said


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            lambda rank: rank.allreduce(torch.ones(2)),
            lambda rank: rank.allgather(torch.ones(2)),
            "allgather of shape [2]",
        ),
        (lambda rank: rank.allreduce(torch.ones(2)), lambda rank: rank.allreduce(torch.ones(3)), "shape [3]"),
        (lambda rank: rank.barrier(), lambda rank: rank.broadcast(1), "broadcast"),
    ],
)
def test_P101_ranks_at_different_exchanges_are_named(first, second, said):
    with pytest.raises(WouldHang, match="same order") as caught:
        rehearse(lambda rank: (first if rank.rank == 0 else second)(rank), 2)
    assert "rank 0 waits" in str(caught.value) and "rank 1 waits" in str(caught.value) and said in str(caught.value)


def test_P101_an_error_on_one_rank_is_the_cause_of_the_others_waiting():
    def program(rank):
        if rank.rank == 1:
            raise ValueError("no such file")
        rank.barrier()

    with pytest.raises(WouldHang, match=r"rank 1 raised ValueError \(no such file\)") as caught:
        rehearse(program, 3)
    assert isinstance(caught.value.__cause__, ValueError)


def test_an_error_that_nobody_waited_for_comes_out_as_it_is():
    def program(rank):
        rank.barrier()
        raise KeyError(rank.rank)

    with pytest.raises(KeyError):
        rehearse(program, 2)
    with pytest.raises(ValueError, match="0 ranks"):
        rehearse(program, 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.sampled_from(["allreduce", "allgather", "barrier"]), max_size=5), min_size=2, max_size=3))
def test_P101_a_hang_is_found_exactly_when_the_ranks_disagree(plans):
    def program(rank):
        for kind in plans[rank.rank]:
            getattr(rank, kind)(*([] if kind == "barrier" else [torch.ones(1)]))
        return len(plans[rank.rank])

    if all(plan == plans[0] for plan in plans):
        assert rehearse(program, len(plans)) == [len(plans[0])] * len(plans)
    else:
        with pytest.raises(WouldHang):
            rehearse(program, len(plans))


def test_P101_every_rank_of_a_real_engine_has_to_take_every_step(engines, tmp_path):
    """Two ranks of a built engine: with both the logits agree; without rank 1 the first allreduce would never end."""
    checkpoint = convert_checkpoint(
        engines.hf(), tmp_path / "checkpoint", dtype="float32", sharding=Sharding(2), say=quiet
    ).folder
    plugins = PluginConfig(tokens_per_block=TOKENS_PER_BLOCK)
    config = BuildConfig(max_batch_size=1, max_seq_len=32, plugin_config=plugins)
    folder = build_engine(checkpoint, config, tmp_path / "engine", log=quiet)
    ids, count, one_at_a_time = torch.tensor(prompt_of(5)), 5, threading.Lock()

    def program(rank, lazy=None):
        with one_at_a_time:  # torch.export.load is not made for threads
            engine = load_engine(folder, torch.device("cpu"), rank.rank, rank)
        pool = torch.zeros(
            engine.layers, 2, TOKENS_PER_BLOCK, 2, engine.kv_heads, engine.pretrained_config["head_size"]
        )
        if rank.rank == lazy:
            return None
        given = {
            "input_ids": ids,
            "position_ids": torch.arange(count),
            "last_token_ids": torch.tensor([count - 1]),
        }
        numbers = [torch.tensor([value], dtype=kind) for value, kind in ((count, torch.int64), (0, torch.int32))]
        cache = (torch.arange(count), torch.zeros(1, 1, dtype=torch.int64), *numbers)
        lengths = torch.tensor([count], dtype=torch.int32)
        with torch.inference_mode():
            return engine.run(
                *(given[name] for name in engine.input_names if name in given), pool, *cache, lengths, lengths
            )

    first, second = rehearse(program, 2)
    assert first.shape[-1] == 512 and torch.equal(first, second)
    with pytest.raises(WouldHang, match=r"rank 0 waits in its exchange 1, allreduce of shape \[5, 64\]; rank 1 ended"):
        rehearse(lambda rank: program(rank, lazy=1), 2)


# Scripts --------------------------------------------------------------------------------------------------------------

HEAD = "import os\nrank = int(os.environ['OMPI_COMM_WORLD_RANK'])\n"


def found(source: str) -> list[str]:
    return [str(problem) for problem in check_rank_code(source)]


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "answer = runner.generate(ids)\nif rank == 0:\n    print(answer)\n",
        HEAD + "answer = runner.generate(ids)\nif not rank:\n    print(answer)\n",
        HEAD + "for ids in prompts:\n    answer = runner.generate(ids)\n    if rank != 0:\n        continue\n",
        HEAD + "comm.barrier()\nif rank != 0:\n    raise SystemExit\n",
        "print('no ranks here')\nfor rank in range(3):\n    print(rank)\n",
    ],
)
def test_P101_scripts_in_which_all_ranks_take_part(source):
    assert found(source) == []


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("answer = runner.generate(ids)\nprint(answer)\n", "line 4: print() on other ranks than 0"),
        ("if rank:\n    print('here')\n", "line 4: print() on other ranks than 0"),
        ("def show(text):\n    print(text)\n", "line 4: print() on other ranks"),
        ("import sys\nsys.stdout.write('x')\n", "line 4: write() on other ranks"),
        ("if rank == 0:\n    answer = runner.generate(ids)\n", "only rank 0 comes to generate()"),
        ("if rank != 0:\n    comm.barrier()\n", "rank 0 does not come to barrier()"),
        ("if rank > 0:\n    raise SystemExit\nrunner.generate(ids)\n", "line 4: some ranks leave here"),
        ("def serve():\n    if rank != 0:\n        return\n    x = comm.allreduce(1)\n", "allreduce() of line 6"),
        ("while True:\n    if rank == 0:\n        break\n    comm.broadcast(None)\n", "some ranks leave here"),
        ("if rank != 0:\n    sys.exit(0)\ntry:\n    comm.barrier()\nfinally:\n    pass\n", "barrier() of line 6"),
    ],
)
def test_P101_a_script_in_which_a_rank_is_missing_or_prints(body, said):
    (text,) = found(HEAD + body)
    assert said in text


@pytest.mark.parametrize(
    "line",
    [
        "rank = int(os.environ.get('OMPI_COMM_WORLD_RANK', 0))",
        "rank = tensorrt_llm.mpi_rank()",
        "rank = MPI.COMM_WORLD.Get_rank()",
        "rank: int = torch.distributed.get_rank()",
    ],
)
def test_P101_ways_to_ask_for_the_rank(line):
    assert len(found(f"import os\n{line}\nprint('hello')\n")) == 1


def test_P101_a_script_in_a_notebook_is_read_too(tmp_path):
    script = "%%writefile ranks.py\n" + HEAD + "if rank == 0:\n    runner.generate(ids)\n"
    cells = [{"cell_type": "code", "source": script, "metadata": {}}]
    path = tmp_path / "lesson.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    (text,) = check_notebook_commands(path)
    assert text.startswith("cell 0, error: line 5: only rank 0 comes to generate()")
