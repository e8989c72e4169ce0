"""The paged KV cache's bookkeeping, under random use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trtllm_workshop.reference.kv_cache import KvCacheManager, OutOfBlocks


class KvCacheMachine(RuleBasedStateMachine):
    """Adds and removes sequences at random; the model is a dictionary of who owns how many tokens."""

    @initialize(blocks=st.integers(1, 20), per_block=st.integers(1, 9))
    def start(self, blocks, per_block):
        self.manager, self.model, self.next_id = KvCacheManager(blocks, per_block), {}, 0

    @rule(tokens=st.integers(1, 60))
    def add(self, tokens):
        need = -(-tokens // self.manager.tokens_per_block)
        free = self.manager.stats().freeNumBlocks
        assert self.manager.can_hold(tokens) == (need <= free)
        if need > free:
            with pytest.raises(OutOfBlocks, match=rf"request {self.next_id} needs {need} blocks .* {free} are free"):
                self.manager.add_sequence(self.next_id, tokens)
            assert self.manager.stats().freeNumBlocks == free, "a refusal reserves nothing"
            with pytest.raises(KeyError):
                self.manager.blocks(self.next_id)
        else:
            assert len(self.manager.add_sequence(self.next_id, tokens)) == need
            self.model[self.next_id] = tokens
        self.next_id += 1

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def add_twice(self, data):
        owner = data.draw(st.sampled_from(sorted(self.model)))
        before = list(self.manager.blocks(owner))
        with pytest.raises(ValueError, match="already owns blocks"):
            self.manager.add_sequence(owner, 1)
        assert self.manager.blocks(owner) == before

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def remove(self, data):
        owner = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[owner]
        self.manager.remove_sequence(owner)
        self.manager.remove_sequence(owner)  # twice is harmless

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def slots(self, data):
        owner = data.draw(st.sampled_from(sorted(self.model)))
        total, size = self.model[owner], self.manager.tokens_per_block
        start = data.draw(st.integers(0, total - 1))
        slots = self.manager.slots(owner, start, total - start)
        blocks = self.manager.blocks(owner)
        assert [slot % size for slot in slots] == [position % size for position in range(start, total)]
        assert [slot // size for slot in slots] == [blocks[position // size] for position in range(start, total)]

    @invariant()
    def no_block_is_lost_or_shared(self):
        if not hasattr(self, "manager"):
            return
        owned = [block for owner in self.model for block in self.manager.blocks(owner)]
        free = list(self.manager._free)
        assert sorted(owned + free) == list(range(self.manager.num_blocks)), "every block is in exactly one place"
        stats = self.manager.stats()
        assert (stats.maxNumBlocks, stats.freeNumBlocks, stats.usedNumBlocks, stats.tokensPerBlock) == (
            self.manager.num_blocks,
            len(free),
            len(owned),
            self.manager.tokens_per_block,
        )
        for owner, tokens in self.model.items():
            blocks = len(self.manager.blocks(owner)) * self.manager.tokens_per_block
            assert tokens <= blocks < tokens + self.manager.tokens_per_block, "enough, and not a block more"

    @invariant()
    def slots_of_all_requests_are_apart(self):
        if hasattr(self, "manager"):
            slots = [slot for owner, tokens in self.model.items() for slot in self.manager.slots(owner, 0, tokens)]
            assert len(slots) == len(set(slots))


TestKvCache = KvCacheMachine.TestCase
TestKvCache.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(tokens=st.integers(0, 10**6), per_block=st.integers(1, 512))
def test_blocks_for_is_the_quotient_rounded_up(tokens, per_block):
    blocks = KvCacheManager(1, per_block).blocks_for(tokens)
    assert (blocks - 1) * per_block < tokens <= blocks * per_block or tokens == blocks == 0


@pytest.mark.parametrize(("blocks", "per_block"), [(0, 32), (4, 0), (-1, 32)])
def test_an_impossible_pool_is_refused_with_its_numbers(blocks, per_block):
    with pytest.raises(ValueError, match=rf"not {blocks} blocks of {per_block} tokens; raise KvCacheConfig.max_tokens"):
        KvCacheManager(blocks, per_block)
