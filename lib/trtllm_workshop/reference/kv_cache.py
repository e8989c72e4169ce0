"""The paged KV cache's bookkeeping: which blocks hold whose tokens, and what can be used again. No tensors here.

Vocabulary as in TensorRT-LLM: the cache is a pool of equal blocks of `tokens_per_block` tokens; a request owns a list of
blocks, in order. With block reuse, a full block stays findable after its request has ended, and a later request whose
tokens begin with the same tokens owns the same block instead of computing it again. So a block is in one of three places:

* owned by one or several requests (its reference count says how many),
* cached: owned by nobody, still findable, and given away only when nothing else is free, least recently used first,
* empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class OutOfBlocks(RuntimeError):
    """More blocks were asked for than are free."""


@dataclass(frozen=True)
class KvCacheStats:
    """Block counts under TensorRT-LLM's own names (`kvCacheStats` of the iteration statistics).

    Attributes:
        maxNumBlocks: blocks in the pool.
        freeNumBlocks: blocks that nobody owns; cached ones are among them, for they can be given away at any time.
        usedNumBlocks: blocks that requests own.
        tokensPerBlock: tokens that one block holds.
        allocTotalBlocks: blocks given out so far.
        allocNewBlocks: those of them that were empty; the others threw cached content away.
        reusedBlocks: blocks that requests found in the cache when they were added.
        missedBlocks: blocks of added requests that were not found. Both stay 0 without block reuse.
        cacheHitRate: reusedBlocks / (reusedBlocks + missedBlocks), 0 before the first request.
    """

    maxNumBlocks: int
    freeNumBlocks: int
    usedNumBlocks: int
    tokensPerBlock: int
    allocTotalBlocks: int = 0
    allocNewBlocks: int = 0
    reusedBlocks: int = 0
    missedBlocks: int = 0
    cacheHitRate: float = 0.0


class Fit(NamedTuple):
    """What a request that is not added yet would find and need."""

    cached_tokens: int  # tokens that it need not compute
    free_blocks: int  # of the blocks that are free now, how many it would take away


@dataclass(eq=False)
class _Node:
    """A findable block. Its place in the tree is its identity: its own tokens, and its parent's identity before them.

    Keys and values of a token depend on all tokens before it, so equal tokens alone do not make two blocks equal. The
    tokens themselves are compared (they are dictionary keys), never only a hash.
    """

    block: int
    tokens: tuple[int, ...] = ()
    parent: _Node | None = None
    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)


@dataclass
class _Sequence:
    """The blocks of one request, and how far they have been made findable."""

    blocks: list[int]
    node: _Node  # the tree's node for the last committed block; the root for none
    committed: int  # full blocks that were committed


@dataclass
class KvCacheManager:
    """Hands out blocks of the pool and finds the ones that hold a prefix already.

    Args:
        num_blocks: blocks in the pool.
        tokens_per_block: tokens that one block holds.
        enable_block_reuse: whether full blocks are shared and stay findable.

    Raises:
        ValueError: when a number is below 1.
    """

    num_blocks: int
    tokens_per_block: int
    enable_block_reuse: bool = True
    _empty: list[int] = field(init=False, repr=False)
    _cached: OrderedDict[int, None] = field(init=False, repr=False, default_factory=OrderedDict)  # oldest use first
    _references: list[int] = field(init=False, repr=False)
    _nodes: dict[int, _Node] = field(init=False, repr=False, default_factory=dict)
    _sequences: dict[int, _Sequence] = field(init=False, repr=False, default_factory=dict)
    _counts: dict[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.tokens_per_block < 1:
            raise ValueError(
                f"a KV cache needs at least one block of at least one token, not {self.num_blocks} blocks of "
                f"{self.tokens_per_block} tokens; raise KvCacheConfig.max_tokens or free_gpu_memory_fraction"
            )
        # Last in, first out: a block that was just freed is the one most likely to be in the processor's cache.
        self._empty = list(range(self.num_blocks - 1, -1, -1))
        self._references = [0] * self.num_blocks
        self._root = _Node(block=-1)
        self._counts = dict.fromkeys(("allocTotalBlocks", "allocNewBlocks", "reusedBlocks", "missedBlocks"), 0)

    @property
    def free_blocks(self) -> int:
        """Blocks that can be given out now: the empty ones and the cached ones that nobody owns."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens fill: the quotient, rounded up."""
        return -(-tokens // self.tokens_per_block)

    def fit(self, token_ids: Sequence[int], tokens: int) -> Fit:
        """What a new request with these first tokens would find, and need in order to hold `tokens` tokens in total.

        Nothing changes, not even the order in which cached blocks are given away.
        """
        found = self._longest_prefix(token_ids)
        in_use = sum(1 for node in found if self._references[node.block])
        return Fit(len(found) * self.tokens_per_block, self.blocks_for(tokens) - in_use)

    def add_sequence(self, request_id: int, token_ids: Sequence[int]) -> int:
        """Add a request, which from now on owns the blocks of the longest cached prefix of its tokens.

        Returns:
            How many tokens these blocks hold: a multiple of tokens_per_block, and less than all tokens, because the
            last one must be computed for its logits.

        Raises:
            ValueError: when the request was added before.
        """
        if request_id in self._sequences:
            raise ValueError(f"request {request_id} already owns blocks; remove it before it is added again")
        found = self._longest_prefix(token_ids)
        for node in found:
            if not self._references[node.block]:
                del self._cached[node.block]
            self._references[node.block] += 1
        blocks = [node.block for node in found]
        self._sequences[request_id] = _Sequence(blocks, found[-1] if found else self._root, len(found))
        if self.enable_block_reuse:
            self._counts["reusedBlocks"] += len(found)
            self._counts["missedBlocks"] += self.blocks_for(len(token_ids)) - len(found)
        return len(found) * self.tokens_per_block

    def reserve(self, request_id: int, tokens: int) -> None:
        """Give a request the blocks that it lacks to hold `tokens` tokens in total.

        Raises:
            OutOfBlocks: when too few blocks are free; nothing is taken then.
            KeyError: when the request is unknown.
        """
        blocks = self._sequences[request_id].blocks
        need = self.blocks_for(tokens) - len(blocks)
        if need > self.free_blocks:
            raise OutOfBlocks(
                f"request {request_id} needs {need} more blocks to hold {tokens} tokens, {self.free_blocks} of "
                f"{self.num_blocks} are free; end or pause another request first"
            )
        for _ in range(need):
            block = self._take()
            self._references[block] = 1
            blocks.append(block)

    def commit(self, request_id: int, token_ids: Sequence[int]) -> None:
        """Make the full blocks of a request findable.

        Args:
            request_id: the request.
            token_ids: its first tokens, all of which are computed and in the cache.

        Raises:
            KeyError: when the request is unknown.
            ValueError: when these are more tokens than its blocks hold.
        """
        sequence, size = self._sequences[request_id], self.tokens_per_block
        full = len(token_ids) // size
        if full > len(sequence.blocks):
            raise ValueError(
                f"request {request_id} owns {len(sequence.blocks)} blocks of {size} tokens, which cannot hold the "
                f"{len(token_ids)} tokens to commit; reserve them first"
            )
        if not self.enable_block_reuse:
            return
        if not self._findable(sequence.node):
            # The prefix was another request's block of the same content, given away since: start again from the root.
            sequence.node, sequence.committed = self._root, 0
        if full <= sequence.committed:
            return
        node = sequence.node
        for index in range(sequence.committed, full):
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            child = node.children.get(tokens)
            if child is None:
                # A block that was findable elsewhere in the tree is not: its whole branch was cut when its parent went.
                block = sequence.blocks[index]
                child = node.children[tokens] = self._nodes[block] = _Node(block, tokens, node)
            # Otherwise another request computed the same tokens at the same time; its block stays the findable one.
            node = child
        sequence.node, sequence.committed = node, full

    def blocks(self, request_id: int) -> list[int]:
        """The blocks of a request, in order. The list grows in place with `reserve`; do not change it.

        Raises:
            KeyError: when the request is unknown.
        """
        return self._sequences[request_id].blocks

    def slots(self, request_id: int, start: int, count: int) -> list[int]:
        """Where tokens `start` … `start + count - 1` of a request lie: block * tokens_per_block + position inside."""
        owned, size = self._sequences[request_id].blocks, self.tokens_per_block
        return [owned[i // size] * size + i % size for i in range(start, start + count)]

    def remove_sequence(self, request_id: int) -> None:
        """Give all blocks of a request back. Unknown requests are left alone, so ending one twice is harmless.

        Findable blocks become cached, the last one first: the end of a text is given away before its beginning, which
        more requests have in common.
        """
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        for block in reversed(sequence.blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._nodes:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def stats(self) -> KvCacheStats:
        """Counts of now, and of everything since the start."""
        free, looked_up = self.free_blocks, self._counts["reusedBlocks"] + self._counts["missedBlocks"]
        return KvCacheStats(
            maxNumBlocks=self.num_blocks,
            freeNumBlocks=free,
            usedNumBlocks=self.num_blocks - free,
            tokensPerBlock=self.tokens_per_block,
            cacheHitRate=self._counts["reusedBlocks"] / looked_up if looked_up else 0.0,
            **self._counts,
        )

    def _longest_prefix(self, token_ids: Sequence[int]) -> list[_Node]:
        """The findable blocks of the longest prefix, which leaves at least one token to compute."""
        found: list[_Node] = []
        if not self.enable_block_reuse:
            return found
        node, size = self._root, self.tokens_per_block
        for start in range(0, len(token_ids) - size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def _findable(self, node: _Node) -> bool:
        return node is self._root or self._nodes.get(node.block) is node

    def _take(self) -> int:
        """An empty block; where there is none, the cached block whose last use is longest ago."""
        self._counts["allocTotalBlocks"] += 1
        if not self._empty:
            self._forget(self._nodes[next(iter(self._cached))])
        else:
            self._counts["allocNewBlocks"] += 1
        return self._empty.pop()

    def _forget(self, node: _Node) -> None:
        """Make a block and everything behind it unfindable: without its prefix no block can be reached any more.

        What nobody owns becomes empty. A block that a request owns stays with that request.
        """
        assert node.parent is not None
        del node.parent.children[node.tokens]
        branch = [node]
        for gone in branch:
            branch.extend(gone.children.values())
            del self._nodes[gone.block]
            if not self._references[gone.block]:
                del self._cached[gone.block]
        self._empty.extend(gone.block for gone in branch if not self._references[gone.block])
