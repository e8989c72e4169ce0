"""The paged KV cache's bookkeeping: which blocks belong to which request. Policy only, no tensors.

Vocabulary as in TensorRT-LLM: the cache is a pool of equal blocks of `tokens_per_block` tokens; a request owns a list of
blocks, in order; a block is either free or owned by exactly one request.
"""

from __future__ import annotations

from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


@dataclass(frozen=True)
class KvCacheStats:
    """Block counts under TensorRT-LLM's own names (`kvCacheStats` of the iteration statistics)."""

    maxNumBlocks: int
    freeNumBlocks: int
    usedNumBlocks: int
    tokensPerBlock: int


@dataclass
class KvCacheManager:
    """Hands out blocks of the pool.

    Args:
        num_blocks: blocks in the pool.
        tokens_per_block: tokens that one block holds.

    Raises:
        ValueError: when either is below 1.
    """

    num_blocks: int
    tokens_per_block: int
    _free: list[int] = field(init=False, repr=False)
    _owned: dict[int, list[int]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.tokens_per_block < 1:
            raise ValueError(
                f"a KV cache needs at least one block of at least one token, not {self.num_blocks} blocks of "
                f"{self.tokens_per_block} tokens; raise KvCacheConfig.max_tokens or free_gpu_memory_fraction"
            )
        # Last in, first out: a block that was just freed is the one most likely to be in the processor's cache.
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill: the quotient, rounded up."""
        return -(-tokens // self.tokens_per_block)

    def can_hold(self, tokens: int) -> bool:
        """Whether a new request of `tokens` tokens in total fits into the free blocks."""
        return self.blocks_for(tokens) <= len(self._free)

    def add_sequence(self, request_id: int, tokens: int) -> list[int]:
        """Reserve the blocks of a new request that will hold at most `tokens` tokens.

        Raises:
            OutOfBlocks: when too few blocks are free; nothing is reserved then.
            ValueError: when the request already owns blocks.
        """
        if request_id in self._owned:
            raise ValueError(f"request {request_id} already owns blocks; remove it before it is added again")
        need = self.blocks_for(tokens)
        if need > len(self._free):
            raise OutOfBlocks(
                f"request {request_id} needs {need} blocks for {tokens} tokens, {len(self._free)} are free"
            )
        self._owned[request_id] = [self._free.pop() for _ in range(need)]
        return self._owned[request_id]

    def blocks(self, request_id: int) -> list[int]:
        """The blocks of a request, in order.

        Raises:
            KeyError: when the request owns none.
        """
        return self._owned[request_id]

    def remove_sequence(self, request_id: int) -> None:
        """Give all blocks of a request back. Unknown requests are left alone, so ending one twice is harmless."""
        self._free.extend(reversed(self._owned.pop(request_id, [])))

    def slots(self, request_id: int, start: int, count: int) -> list[int]:
        """Where tokens `start` … `start + count - 1` of a request lie: block * tokens_per_block + position inside."""
        owned, per_block = self._owned[request_id], self.tokens_per_block
        return [owned[i // per_block] * per_block + i % per_block for i in range(start, start + count)]

    def stats(self) -> KvCacheStats:
        free = len(self._free)
        return KvCacheStats(self.num_blocks, free, self.num_blocks - free, self.tokens_per_block)
