"""The ranks of an engine in threads of one process, connected by a barrier: what they compute, without processes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from trtllm_workshop.reference.engine import Engine, load_engine

LIMIT = 60  # seconds; a rank that fails must not leave the others waiting for ever


@dataclass
class Group:
    """Tensor-parallel ranks that meet at a barrier."""

    size: int
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.barrier, self.given = threading.Barrier(self.size, timeout=LIMIT), [torch.empty(0)] * self.size

    def exchange(self, rank: int, x: torch.Tensor, name: str) -> list[torch.Tensor]:
        self.given[rank] = x
        if rank == 0:
            self.calls.append(name)
        self.barrier.wait()
        everything = list(self.given)
        self.barrier.wait()
        return everything


@dataclass
class ThreadCommunicator:
    """One rank's end of a group."""

    group: Group
    rank: int
    capturable: bool = False

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.group.exchange(self.rank, x, "allreduce")).sum(0)

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.group.exchange(self.rank, x, "allgather"), dim=-1)


class RankThreads:
    """All ranks of an engine folder, each with its own KV pool; block b of a request is block b of the pool."""

    def __init__(self, folder: Path, tp: int = 1, pp: int = 1, blocks: int = 24) -> None:
        self.tp, self.pp = tp, pp
        self.groups = [Group(tp) for _ in range(pp)]
        self.engines: list[Engine] = [
            load_engine(folder, torch.device("cpu"), rank, self._communicator(rank)) for rank in range(tp * pp)
        ]
        self.pools = [self._pool(engine, blocks) for engine in self.engines]

    def _communicator(self, rank: int) -> ThreadCommunicator | None:
        if self.tp * self.pp == 1:
            return None
        return ThreadCommunicator(self.groups[rank // self.tp], rank % self.tp)

    @staticmethod
    def _pool(engine: Engine, blocks: int) -> torch.Tensor:
        per_block, head_size = (
            engine.build_config["plugin_config"]["tokens_per_block"],
            engine.pretrained_config["head_size"],
        )
        shape = (engine.layers, blocks, per_block, 2, engine.kv_heads, head_size)
        return torch.zeros(shape, dtype=engine.kv_cache_dtype)

    @torch.inference_mode()
    def step(self, ids: Sequence[int], start: int = 0) -> torch.Tensor:
        """One step of one request: `ids` behind `start` cached tokens; [len(ids), vocabulary] float32 logits.

        All tensor-parallel ranks of the last stage must return the same.
        """
        count, total = len(ids), start + len(ids)
        per_block = self.pools[0].shape[2]
        positions = torch.arange(start, total)
        kind = torch.tensor([1 if count == 1 and start else 0], dtype=torch.int32)
        lengths = (torch.tensor([total]), kind, torch.tensor([count], dtype=torch.int32))
        cache = (
            positions,
            torch.arange(-(-total // per_block))[None],
            *lengths,
            torch.tensor([total], dtype=torch.int32),
        )
        given: dict[str, Any] = {
            "input_ids": torch.tensor(list(ids)),
            "position_ids": positions,
            "last_token_ids": torch.arange(count),
        }
        for stage in range(self.pp):
            members = range(stage * self.tp, (stage + 1) * self.tp)
            with ThreadPoolExecutor(self.tp) as threads:
                outputs = list(threads.map(lambda rank: self._run(rank, given, cache), members))
            assert all(torch.equal(output, outputs[0]) for output in outputs), "the ranks of a stage disagree"
            given["hidden_states_input"] = outputs[0]
        return outputs[0].float()

    def _run(self, rank: int, given: dict[str, Any], cache: tuple[torch.Tensor, ...]) -> torch.Tensor:
        engine = self.engines[rank]
        named = [given[name] for name in engine.input_names if name in given]
        return engine.run(*named, self.pools[rank], *cache)

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """[prompt + answer, vocabulary]: the prompt in one step, then a step for each token of the answer."""
        rows = [self.step(prompt)]
        rows += [self.step([token], len(prompt) + index) for index, token in enumerate(answer)]
        return torch.cat(rows)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The most likely token, `count` times."""
        made = [int(self.step(prompt)[-1].argmax())]
        while len(made) < count:
            made.append(int(self.step(made[-1:], len(prompt) + len(made) - 1)[-1].argmax()))
        return made
