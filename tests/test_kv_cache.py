"""The paged KV cache's bookkeeping, under random use: who owns what, what can be found again, what is given away."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trtllm_workshop.reference.kv_cache import KvCacheManager, OutOfBlocks

TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


def check_tree(manager: KvCacheManager) -> None:
    """What can be found is what can be reached, block after block, from the beginning of a text."""
    found, branch = {}, [manager._root]
    for node in branch:
        for tokens, child in node.children.items():
            assert child.parent is node and child.tokens == tokens and len(tokens) == manager.tokens_per_block
            found[child.block] = child
            branch.append(child)
    assert found == manager._nodes, "each findable block can be reached, once"
    assert set(manager._cached) <= set(found) and not set(manager._empty) & set(found)


class KvCacheMachine(RuleBasedStateMachine):
    """Requests come, grow, compute and go at random.

    `content` is what lies in the pool: for every slot all tokens up to and including its own, as they were computed. A
    prefix that the manager claims to have found must lie in the slots that it names.
    """

    @initialize(blocks=st.integers(1, 12), size=st.integers(1, 5), reuse=st.booleans())
    def start(self, blocks, size, reuse):
        self.manager = KvCacheManager(blocks, size, enable_block_reuse=reuse)
        self.texts: dict[int, list[int]] = {}  # all tokens of a request
        self.computed: dict[int, int] = {}  # how many of them are in the cache
        self.content: list[tuple[int, ...] | None] = [None] * (blocks * size)
        self.next_id = 0

    def owner(self, data) -> int:
        return data.draw(st.sampled_from(sorted(self.texts)))

    @rule(text=TEXTS, more=st.integers(0, 12))
    def add(self, text, more):
        manager, new = self.manager, self.next_id
        self.next_id += 1
        fit, order = manager.fit(text, len(text) + more), list(manager._cached)
        assert list(manager._cached) == order, "asking changes nothing"
        free = manager.free_blocks
        cached = manager.add_sequence(new, text)
        assert cached == fit.cached_tokens and cached % manager.tokens_per_block == 0
        assert cached < len(text), "the last token must be computed for its logits"
        assert cached == 0 or manager.enable_block_reuse
        for position, slot in enumerate(manager.slots(new, 0, cached)):
            assert self.content[slot] == tuple(text[: position + 1]), "what was found is this text's beginning"
        self.texts[new], self.computed[new] = text, cached
        if fit.free_blocks <= free:
            manager.reserve(new, len(text) + more)
            assert manager.free_blocks == free - fit.free_blocks, "it needs what `fit` said"
        else:
            with pytest.raises(OutOfBlocks, match=rf"request {new} needs \d+ more blocks .* {manager.free_blocks} of"):
                manager.reserve(new, len(text) + more)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def add_twice(self, data):
        owner = self.owner(data)
        before, stats = list(self.manager.blocks(owner)), self.manager.stats()
        with pytest.raises(ValueError, match="already owns blocks"):
            self.manager.add_sequence(owner, [1])
        assert self.manager.blocks(owner) == before and self.manager.stats() == stats

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.integers(0, 15))
    def grow(self, data, more):
        owner = self.owner(data)
        tokens = len(self.texts[owner]) + more
        before = list(self.manager.blocks(owner))
        need, free = max(0, self.manager.blocks_for(tokens) - len(before)), self.manager.free_blocks
        if need > free:
            with pytest.raises(OutOfBlocks):
                self.manager.reserve(owner, tokens)
            assert self.manager.blocks(owner) == before and self.manager.free_blocks == free, "a refusal takes nothing"
        else:
            self.manager.reserve(owner, tokens)
            assert self.manager.blocks(owner)[: len(before)] == before and self.manager.free_blocks == free - need

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=6), keep=st.booleans())
    def compute(self, data, more, keep):
        """Write tokens into the request's blocks, and say so or not."""
        owner = self.owner(data)
        room = len(self.manager.blocks(owner)) * self.manager.tokens_per_block
        text = self.texts[owner] = self.texts[owner] + more
        end = min(room, len(text))
        for position in range(self.computed[owner], end):
            self.content[self.manager.slots(owner, position, 1)[0]] = tuple(text[: position + 1])
        self.computed[owner] = max(self.computed[owner], end)
        if keep:
            self.manager.commit(owner, text[: self.computed[owner]])

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), keep=st.booleans())
    def remove(self, data, keep):
        owner = self.owner(data)
        text, computed = self.texts.pop(owner), self.computed.pop(owner)
        if keep:
            self.manager.commit(owner, text[:computed])
        self.manager.remove_sequence(owner)
        self.manager.remove_sequence(owner)  # twice is harmless
        with pytest.raises(KeyError):
            self.manager.blocks(owner)
        size = self.manager.tokens_per_block
        if keep and self.manager.enable_block_reuse and computed >= size:
            assert self.manager.fit([*text[:computed], 0], 1).cached_tokens == computed // size * size, "found again"

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def commit_too_much(self, data):
        owner = self.owner(data)
        room = len(self.manager.blocks(owner)) * self.manager.tokens_per_block
        with pytest.raises(ValueError, match="which cannot hold the"):
            self.manager.commit(owner, [0] * (room + self.manager.tokens_per_block))

    @invariant()
    def every_block_is_in_one_place_and_references_add_up(self):
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        owned = [block for owner in self.texts for block in manager.blocks(owner)]
        assert [owned.count(block) for block in range(manager.num_blocks)] == manager._references
        places = [*set(owned), *manager._empty, *manager._cached]
        assert sorted(places) == list(range(manager.num_blocks)), "every block is in exactly one place"
        stats = manager.stats()
        assert (stats.maxNumBlocks, stats.tokensPerBlock) == (manager.num_blocks, manager.tokens_per_block)
        assert (stats.freeNumBlocks, stats.usedNumBlocks) == (manager.free_blocks, len(set(owned)))
        assert manager.enable_block_reuse or len(owned) == len(set(owned)), "without reuse nothing is shared"

    @invariant()
    def what_can_be_found_hangs_together(self):
        if not hasattr(self, "manager"):
            return
        check_tree(self.manager)

    @invariant()
    def slots_that_are_written_belong_to_one_request(self):
        if hasattr(self, "manager"):
            slots = []
            for owner, computed in self.computed.items():
                room = len(self.manager.blocks(owner)) * self.manager.tokens_per_block
                slots += self.manager.slots(owner, computed, room - computed)
                for position, slot in enumerate(self.manager.slots(owner, 0, computed)):
                    assert self.content[slot] == tuple(self.texts[owner][: position + 1]), "content was overwritten"
            assert len(slots) == len(set(slots))


TestKvCache = KvCacheMachine.TestCase
TestKvCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(tokens=st.integers(0, 10**6), per_block=st.integers(1, 512))
def test_blocks_for_is_the_quotient_rounded_up(tokens, per_block):
    blocks = KvCacheManager(1, per_block).blocks_for(tokens)
    assert (blocks - 1) * per_block < tokens <= blocks * per_block or tokens == blocks == 0


@pytest.mark.parametrize(("blocks", "per_block"), [(0, 32), (4, 0), (-1, 32)])
def test_an_impossible_pool_is_refused_with_its_numbers(blocks, per_block):
    with pytest.raises(ValueError, match=rf"not {blocks} blocks of {per_block} tokens; raise KvCacheConfig.max_tokens"):
        KvCacheManager(blocks, per_block)


def run(manager: KvCacheManager, request_id: int, tokens: list[int], room: int = 0) -> int:
    """Add a request and compute its tokens."""
    cached = manager.add_sequence(request_id, tokens)
    manager.reserve(request_id, max(room, len(tokens)))
    manager.commit(request_id, tokens)
    return cached


def test_a_shared_prefix_is_stored_once_and_counted():
    manager = KvCacheManager(num_blocks=8, tokens_per_block=4)
    text = list(range(100, 110))
    assert run(manager, 1, text) == 0
    assert run(manager, 2, [*text[:8], 7, 7, 7]) == 8
    assert manager.blocks(1)[:2] == manager.blocks(2)[:2] and manager.blocks(1)[2] != manager.blocks(2)[2]
    stats = manager.stats()
    assert (stats.usedNumBlocks, stats.freeNumBlocks) == (4, 4)
    assert (stats.reusedBlocks, stats.missedBlocks, stats.allocTotalBlocks, stats.allocNewBlocks) == (2, 4, 4, 4)
    assert stats.cacheHitRate == pytest.approx(1 / 3)
    manager.remove_sequence(1)
    assert manager.stats().usedNumBlocks == 3, "the shared blocks have an owner left"


def test_equal_tokens_after_another_beginning_are_another_block():
    manager = KvCacheManager(num_blocks=8, tokens_per_block=2)
    run(manager, 1, [1, 1, 5, 5, 9])
    assert manager.fit([2, 2, 5, 5, 9], 5).cached_tokens == 0
    assert manager.fit([5, 5, 9], 3).cached_tokens == 0
    assert manager.fit([1, 1, 5, 5, 8], 5).cached_tokens == 4


def test_a_prompt_that_is_cached_completely_still_computes_its_last_block():
    manager = KvCacheManager(num_blocks=8, tokens_per_block=4)
    run(manager, 1, list(range(8)))
    assert manager.fit(list(range(8)), 8).cached_tokens == 4
    assert manager.fit(list(range(9)), 9).cached_tokens == 8


def test_blocks_are_given_away_by_their_last_use_and_the_end_of_a_text_first():
    manager = KvCacheManager(num_blocks=4, tokens_per_block=2)
    first, second = [1, 1, 2, 2], [3, 3, 4, 4]
    for number, text in enumerate([first, second]):
        run(manager, number, text)
        manager.remove_sequence(number)
    manager.add_sequence(9, [*first, 0])  # used again: now the second text is the older one
    manager.remove_sequence(9)
    manager.add_sequence(10, [8])
    manager.reserve(10, 2)
    assert manager.fit([*second, 0], 1).cached_tokens == 2, "only its end was given away"
    assert manager.fit([*first, 0], 1).cached_tokens == 4
    stats = manager.stats()
    assert (stats.allocTotalBlocks, stats.allocNewBlocks) == (5, 4), "the fifth block was not empty"


def test_two_requests_that_compute_the_same_text_at_once_keep_their_own_blocks():
    manager = KvCacheManager(num_blocks=7, tokens_per_block=2)
    short, long = [1, 1, 2, 2], [1, 1, 2, 2, 3, 3]
    for number, text in ((1, short), (2, long)):
        manager.add_sequence(number, text)
        manager.reserve(number, len(text))
    manager.commit(1, short)
    manager.commit(2, long)
    assert not set(manager.blocks(1)) & set(manager.blocks(2))
    assert manager.fit([*long, 0], 1).cached_tokens == 6, "the longer one goes on where the shorter one ends"
    manager.remove_sequence(1)
    manager.add_sequence(3, [7] * 8)
    manager.reserve(3, 8)  # takes the last empty blocks and those of request 1, the prefix of what 2 made findable
    assert manager.fit([*long, 0], 1).cached_tokens == 0, "a block without its prefix is not found"
    check_tree(manager)
    manager.commit(2, long)
    manager.remove_sequence(2)
    assert manager.fit([*long, 0], 1).cached_tokens == 6, "its own blocks are found in their place"
    assert manager.free_blocks == 3


def test_a_request_that_lost_its_findable_prefix_offers_its_own_blocks_again():
    manager = KvCacheManager(num_blocks=6, tokens_per_block=2)
    for number in (1, 2):
        manager.add_sequence(number, [1, 1])
        manager.reserve(number, 2 if number == 1 else 4)
    manager.commit(1, [1, 1])
    manager.commit(2, [1, 1])
    manager.remove_sequence(1)
    manager.add_sequence(3, [7] * 8)
    manager.reserve(3, 8)  # request 1's block is given away
    assert manager.fit([1, 1, 0], 1).cached_tokens == 0
    manager.commit(2, [1, 1, 2, 2])
    assert manager.fit([1, 1, 2, 2, 0], 1).cached_tokens == 4


def test_without_reuse_nothing_is_found_and_nothing_is_counted_as_missed():
    manager = KvCacheManager(num_blocks=8, tokens_per_block=2, enable_block_reuse=False)
    run(manager, 1, [1, 2, 3, 4])
    manager.remove_sequence(1)
    assert run(manager, 2, [1, 2, 3, 4]) == 0
    stats = manager.stats()
    assert (stats.reusedBlocks, stats.missedBlocks, stats.cacheHitRate) == (0, 0, 0.0)
    assert stats.allocNewBlocks == stats.allocTotalBlocks == 4
