"""Hashes identify content: they are secret, of fixed size, and differ wherever keys and values differ."""

import pytest

from quire.kv.prefix_cache.content_hash import ContentHasher, ContentKey, HashChain, token_bytes


def test_two_engines_never_agree_on_a_hash():
    first, second = ContentHasher(), ContentHasher()
    assert first.child(b"", b"tokens") != second.child(b"", b"tokens")
    assert first.root(b"tenant") != second.root(b"tenant")
    assert first.media(b"cat") != second.media(b"cat")


def test_a_hash_has_sixteen_bytes_and_depends_on_what_is_hashed():
    hasher = ContentHasher()
    hashes = [hasher.root(b""), hasher.root(b"tenant"), hasher.child(b"", b""), hasher.child(b"", b"tenant")]
    assert [len(block_hash) for block_hash in hashes] == [16] * 4
    assert len(set(hashes)) == 4, "a first block's parent is not the hash of any block"


def test_an_item_stands_for_a_negative_number_of_63_independent_bits():
    hasher = ContentHasher()
    numbers = [int.from_bytes(hasher.media(bytes([i, j])), "little") for i in range(16) for j in range(16)]
    columns = list(zip(*(f"{number:064b}" for number in numbers), strict=True))
    assert set(columns[0]) == {"1"}
    assert len(set(columns)) == 64, "no bit is constant, or a copy of another one"


def test_a_chain_hashes_each_block_once_in_a_sequences_life():
    calls = []

    class Counting(ContentHasher):
        def child(self, parent, tokens):
            calls.append(tokens)
            return super().child(parent, tokens)

    chain = HashChain(Counting(), 4)
    tokens = list(range(40))
    for _ in range(3):
        for num_blocks in range(11):
            chain.extend(num_blocks, tokens)
    assert len(calls) == 10
    fork = chain.fork()
    fork.extend(10, tokens)
    assert fork.block(9) == chain.block(9)
    assert len(calls) == 10


def test_a_chain_recognizes_only_hashes_of_blocks_that_it_has():
    chain = HashChain(ContentHasher(), 4)
    chain.extend(2, list(range(8)))
    hashes = [chain.block(index)[0] for index in range(2)]
    assert [chain.has(index, block_hash) for index, block_hash in enumerate(hashes)] == [True, True]
    assert not chain.has(0, hashes[1])
    assert not chain.has(2, hashes[1]), "a third block has not been hashed"


@pytest.mark.parametrize(("start", "end"), [(0, 4), (4, 8), (5, 8), (8, 10), (0, 5)])
def test_an_item_replaces_its_placeholder_token_and_nothing_else(start, end):
    hasher, tokens, items = ContentHasher(), list(range(10)), {4: b"cat", 8: b"dog"}
    chain = HashChain(hasher, 4, ContentKey(media=tuple(items.items())))
    expected = [hasher.media(items[i]) if i in items else token_bytes([tokens[i]]) for i in range(start, end)]
    assert chain.content(start, end, tokens) == b"".join(expected)


def test_a_chain_goes_on_from_hashes_that_were_computed_elsewhere() -> None:
    tokens, hasher = list(range(12)), ContentHasher()
    whole, adopting = HashChain(hasher, 4), HashChain(hasher, 4)
    whole.extend(3, tokens)
    adopting.adopt(whole.blocks()[:2], whole.content(0, 12, tokens))
    adopting.extend(3, tokens)
    assert adopting.blocks() == whole.blocks()
    assert [adopting.block(i) for i in range(3)] == [whole.block(i) for i in range(3)]
