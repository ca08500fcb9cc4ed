"""The free queue, reference counts and the prefix cache of KV blocks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from law_runs import assert_pool
from tiers import examples

from workbench.scheduler.block_pool import BlockPool, extend_block_hashes
from workbench.trace.laws import LawError


def hashes(token_ids, block_size=4):
    chain: list[bytes] = []
    extend_block_hashes(chain, token_ids, len(token_ids) // block_size, block_size)
    return chain


def test_block_0_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.num_free_blocks == 4
    assert pool.get_new_blocks(4) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="cannot allocate 1 KV blocks, 0 of 4 are free"):
        pool.get_new_blocks(1)


def test_blocks_without_a_hash_go_to_the_head_last_block_first():
    pool = BlockPool(8)
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(2)
    pool.free_blocks(first)
    pool.free_blocks(second)
    assert pool.free_queue == [5, 4, 3, 2, 1, 6, 7]


def test_blocks_with_a_hash_go_to_the_tail_last_block_first():
    pool = BlockPool(8)
    table = pool.get_new_blocks(4)
    for block, digest in zip(table[:3], hashes(range(12))):
        pool.cache(block, digest)
    pool.free_blocks(table)
    assert pool.free_queue == [4, 5, 6, 7, 3, 2, 1]


def test_a_freed_block_can_be_found_until_it_is_handed_out_again():
    pool = BlockPool(4)
    chain = hashes(range(8))
    table = pool.get_new_blocks(2)
    for block, digest in zip(table, chain):
        pool.cache(block, digest)
    pool.free_blocks(table)
    assert pool.get_cached_blocks(chain) == table
    assert pool.get_new_blocks(2) == [3, 2], "the end of the prefix goes before its beginning"
    assert pool.get_cached_blocks(chain) == [1]


def test_a_hit_takes_a_free_block_out_of_the_queue():
    pool = BlockPool(6)
    chain = hashes(range(8))
    table = pool.get_new_blocks(2)
    for block, digest in zip(table, chain):
        pool.cache(block, digest)
    pool.free_blocks(table)
    hits = pool.get_cached_blocks(chain)
    assert pool.num_free_among(hits) == 2
    pool.touch(hits)
    assert pool.num_free_among(hits) == 0 and pool.free_queue == [3, 4, 5]
    pool.touch(hits)
    assert [pool.ref_count(block) for block in hits] == [2, 2]
    pool.free_blocks(hits)
    assert pool.num_free_blocks == 3
    assert_pool(pool, [hits])


def test_the_first_published_of_equal_blocks_is_found():
    pool = BlockPool(5)
    (digest,) = hashes(range(4))
    first, second = pool.get_new_blocks(2)
    pool.cache(second, digest)
    pool.cache(first, digest)
    assert pool.get_cached_blocks([digest]) == [second]
    pool.evict(second)
    assert pool.get_cached_blocks([digest]) == [first]
    pool.evict(first)
    assert pool.get_cached_blocks([digest]) == []


def test_a_hash_depends_on_everything_before_the_block():
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[:1] == hashes([1, 2, 3, 4, 9, 9, 9, 9])[:1]
    assert hashes([1, 1, 1, 1] * 2)[0] != hashes([1, 1, 1, 1] * 2)[1]
    assert hashes([1, 256]) != hashes([256, 1], block_size=2)


def test_hashes_are_extended_not_computed_again():
    chain = hashes(range(8))
    extended = chain.copy()
    extend_block_hashes(extended, list(range(12)), 3, 4)
    assert extended[:2] == chain and extended == hashes(range(12))


def test_a_copy_is_independent():
    pool = BlockPool(6)
    chain = hashes(range(8))
    table = pool.get_new_blocks(2)
    pool.cache(table[0], chain[0])
    clone = pool.copy()
    clone.cache(table[1], chain[0])
    clone.free_blocks(table)
    clone.get_new_blocks(1)
    assert pool.get_cached_blocks(chain) == [table[0]] and pool.free_queue == [3, 4, 5]
    assert_pool(pool, [table])


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([[1]], "2 are free and 1 held of 4"),
        ([[1, 2], [2]], "block 2 counts 1 reference, held by 2 tables"),
        ([[0, 1, 2]], "block 0 is handed out"),
        ([[1, 2, 3]], "2 are free and 3 held of 4"),
    ],
)
def test_the_laws_see_wrong_tables(tables, message):
    pool = BlockPool(5)
    pool.get_new_blocks(2)
    with pytest.raises(LawError, match=message):
        assert_pool(pool, tables)


def test_the_laws_see_a_block_shared_without_a_hash():
    pool = BlockPool(5)
    table = pool.get_new_blocks(1)
    pool.touch(table)
    with pytest.raises(LawError, match="block 1 is shared and is not in the prefix cache"):
        assert_pool(pool, [table, table])


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 5)), max_size=60))
def test_random_use_keeps_the_books(actions):
    """Prompts of four kinds come and go; each takes what is cached of it and publishes all of it."""
    pool = BlockPool(12)
    tables: list[list[int]] = []
    for action, kind, num_blocks in actions:
        if action == 0 and tables:
            pool.free_blocks(tables.pop(kind % len(tables)))
        else:
            chain = hashes([kind] * 4 * num_blocks)
            hits = pool.get_cached_blocks(chain)
            if num_blocks - len(hits) + pool.num_free_among(hits) <= pool.num_free_blocks:
                pool.touch(hits)
                fresh = pool.get_new_blocks(num_blocks - len(hits))
                for block, digest in zip(fresh, chain[len(hits) :]):
                    pool.cache(block, digest)
                tables.append(hits + fresh)
        assert_pool(pool, tables)
