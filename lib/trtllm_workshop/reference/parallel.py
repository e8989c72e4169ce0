"""What the ranks of one engine tell each other: sums, pieces of logits, hidden states, and what to do next.

The process groups are made directly and belong to one `Communicator`, not to the process: two engines that are split over
ranks can live side by side in one notebook. They find each other through a file, so no port has a number that somebody
has to choose. Gloo listens on the loopback address alone, on ports that the system gives and that close with the group.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from trtllm_workshop.checkpoint import RankMapping

# A rank whose partners do not answer within a step gives up after this many seconds.
STEP_LIMIT_S = 120.0
# Between steps the ranks after 0 wait as long as nobody asks anything; rank 0 waits for nobody longer than a step.
FOREVER = timedelta(days=365)
# Integers that a message sends at once; a longer one sends its length first and the rest after.
FIRST_PIECE = 1024


def backend_for(device: torch.device, ranks: int) -> str:
    """`nccl` where every rank has a GPU of its own, else `gloo`."""
    own_gpu = device.type == "cuda" and torch.cuda.device_count() >= ranks and dist.is_nccl_available()
    return "nccl" if own_gpu else "gloo"


def device_of(rank: int, kind: str) -> torch.device:
    """The rank's device: GPUs are given out in turn, so with too few of them ranks share one."""
    return torch.device("cuda", rank % torch.cuda.device_count()) if kind == "cuda" else torch.device("cpu")


class Communicator:
    """One rank's connections to the others.

    Args:
        mapping: the rank's place, see `RankMapping`.
        meeting: a file that does not exist yet, the same for all ranks of one host; the ranks find each other through it.
        device: where the rank's tensors are. With gloo those of a GPU travel over the host.
        backend: `gloo` or `nccl`; by default what `backend_for` says. Step plans always travel over gloo.
        connect_limit_s: seconds to wait for the other ranks now.
        step_limit_s: seconds to wait for another rank within a step.

    Raises:
        RuntimeError: when the others do not come in time (also from every method, when one has ended).
    """

    def __init__(
        self,
        mapping: RankMapping,
        meeting: str | Path,
        device: torch.device | None = None,
        backend: str | None = None,
        connect_limit_s: float = 120.0,
        step_limit_s: float = STEP_LIMIT_S,
    ) -> None:
        self.mapping, self.world_size = mapping, mapping.tp_size * mapping.pp_size
        self.device = device or torch.device("cpu")
        self.backend = backend or backend_for(self.device, self.world_size)
        connecting, limit, place = timedelta(seconds=connect_limit_s), timedelta(seconds=step_limit_s), mapping.rank
        store = dist.FileStore(str(meeting), self.world_size)
        store.set_timeout(connecting)
        self._control = _gloo(store, "control", place, self.world_size, (connecting, FOREVER if place else limit))
        self._tp: Any = None
        self._world: Any = None
        if mapping.tp_size > 1:
            name = f"tp{mapping.pp_rank}"
            self._tp = self._data_group(store, name, mapping.tp_rank, mapping.tp_size, (connecting, limit))
        if mapping.pp_size > 1:
            self._world = self._data_group(store, "pp", place, self.world_size, (connecting, limit))
        self._store: Any = store

    def _data_group(self, store: Any, name: str, rank: int, size: int, limits: tuple[timedelta, timedelta]) -> Any:
        if self.backend == "gloo":
            return _gloo(store, name, rank, size, limits)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limits[1]
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, size, options)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may record what is exchanged: not when it travels over the host."""
        return self.backend == "nccl"

    @property
    def sharing_device(self) -> int:
        """How many ranks take their memory from where this one takes it."""
        devices = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return -(-self.world_size // devices)

    def allreduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the tensor-parallel ranks' x, same shape and type on all of them.

        Over gloo 16-bit values are summed in float32 and rounded once.
        """
        if self._tp is None:
            return x
        if self.backend == "nccl":
            total = x.contiguous().clone()
            self._tp.allreduce([total]).wait()
            return total
        total = x.detach().to("cpu", torch.float32, copy=True).contiguous()
        self._tp.allreduce([total]).wait()
        return total.to(x.device, x.dtype)

    def allgather(self, x: torch.Tensor) -> torch.Tensor:
        """[…, n] of each tensor-parallel rank -> […, n * tp_size] on all of them, in rank order."""
        if self._tp is None:
            return x
        mine = self._outgoing(x)
        pieces = [torch.empty_like(mine) for _ in range(self.mapping.tp_size)]
        self._tp.allgather([pieces], [mine]).wait()
        return torch.cat([self._incoming(piece, x.dtype) for piece in pieces], dim=-1)

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send a tensor to a rank, which must know its shape and type (pipeline stages)."""
        self._world.send([self._outgoing(x)], to, 0).wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """The tensor that `source` sends; on this rank's device."""
        place = self.device if self.backend == "nccl" else torch.device("cpu")
        raw = self._bytes(torch.empty(tuple(shape), dtype=dtype, device=place))
        self._world.recv([raw], source, 0).wait()
        return self._incoming(raw, dtype)

    def _outgoing(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().contiguous()
        return self._bytes(x if self.backend == "nccl" else x.cpu())

    def _bytes(self, x: torch.Tensor) -> torch.Tensor:
        # Gloo has no send for some types; what only travels may travel as bytes.
        return x if self.backend == "nccl" else x.view(torch.uint8)

    def _incoming(self, raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return raw if self.backend == "nccl" else raw.view(dtype).to(self.device)

    def announce(self, numbers: np.ndarray) -> None:
        """On rank 0: tell integers (int64) to all other ranks, which `listen`."""
        first = torch.zeros(FIRST_PIECE, dtype=torch.int64)
        first[0] = len(numbers)
        whole = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        head = whole[: FIRST_PIECE - 1]
        first[1 : 1 + len(head)] = head
        self._from_leader(first)
        if len(whole) > len(head):
            self._from_leader(whole[len(head) :].clone())

    def listen(self) -> np.ndarray:
        """On the other ranks: what rank 0 announces next, as long as that takes."""
        first = torch.zeros(FIRST_PIECE, dtype=torch.int64)
        self._from_leader(first)
        count, head = int(first[0]), first[1:]
        if count <= len(head):
            return head[:count].numpy()
        rest = torch.zeros(count - len(head), dtype=torch.int64)
        self._from_leader(rest)
        return torch.cat((head, rest)).numpy()

    def _from_leader(self, x: torch.Tensor) -> None:
        self._control.broadcast(x, 0).wait()

    def announce_words(self, words: Any) -> None:
        """On rank 0: tell all others something that JSON can hold."""
        self.announce(np.frombuffer(json.dumps(words).encode(), dtype=np.uint8).astype(np.int64))

    def listen_words(self) -> Any:
        """On the other ranks: what `announce_words` tells."""
        return json.loads(self.listen().astype(np.uint8).tobytes())

    def least(self, number: int) -> int:
        """The smallest number that any rank gives; all ranks must ask."""
        found = torch.tensor([number], dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        self._control.allreduce([found], options).wait()
        return int(found)

    def abort(self) -> None:
        """End what waits on the device for a rank that is gone. Gloo needs no help: its connections break by themselves."""
        for group in (self._tp, self._world):
            if group is not None and self.backend == "nccl":
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def close(self) -> None:
        """Give up all connections and ports. Safe to call twice."""
        if self._store is not None and self.backend == "nccl":
            self.abort()
        self._control = self._tp = self._world = self._store = None


def _gloo(store: Any, name: str, rank: int, size: int, limits: tuple[timedelta, timedelta]) -> Any:
    """A group over loopback; `limits` are how long to wait for the others now, and later in each exchange."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = limits[0]
    group = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, options)
    group._set_default_timeout(limits[1])
    return group
