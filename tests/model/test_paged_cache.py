"""Paged cache: the bits of the full cache, sequences of any length together, blocks in order."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model.decoder import Decoder
from model.kv_cache import FullCache
from model.paged_cache import BlockPool, PagedCache, PagedSequence
from tests.model.tiny import OPTIONS, tiny_config, tiny_model, tiny_tokens

CAN_GENERATE = {name: changes for name, changes in OPTIONS.items() if name != "bidirectional"}
EVERY_OPTION = pytest.mark.parametrize("changes", CAN_GENERATE.values(), ids=CAN_GENERATE)
MIXED = (9, 1, 20, 4)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def new_pool(blocks: int = 24, block_size: int = 4, **changes: Any) -> BlockPool:
    return BlockPool(tiny_config(**changes), blocks=blocks, block_size=block_size)


def filled(model: Decoder, pool: BlockPool, tokens: list[int]) -> PagedSequence:
    """A sequence that has read some tokens alone."""
    sequence = PagedSequence(pool)
    model(torch.tensor([tokens]), cache=PagedCache([sequence]))
    return sequence


def alone(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Logits (V,) after the last token, read without a cache."""
    return model(torch.tensor([tokens])).logits[0, -1]


# Equal to the full cache


@EVERY_OPTION
def test_equal_lengths_give_the_bits_of_the_full_cache(changes) -> None:
    same_bits_as_the_full_cache(tiny_model(**changes), block_size=5)


@pytest.mark.parametrize("block_size", [1, 2, 16, 100])
def test_the_size_of_a_block_changes_nothing(block_size: int) -> None:
    same_bits_as_the_full_cache(tiny_model(), block_size)


def same_bits_as_the_full_cache(model: Decoder, block_size: int) -> None:
    tokens = tiny_tokens(3, 17)
    pool = BlockPool(model.config, blocks=3 * 17, block_size=block_size)
    full = FullCache(model.config, batch=3)
    paged = PagedCache([PagedSequence(pool) for _ in range(3)])
    for part in tokens.split([7, 1, 5, 1, 1, 2], dim=1):
        expected = model(part, cache=full).logits
        assert torch.equal(model(part, cache=paged).logits, expected)
        assert paged.lengths is None
        assert paged.length == full.length


@EVERY_OPTION
def test_mixed_lengths_equal_each_sequence_alone(changes) -> None:
    model, pool = tiny_model(**changes), new_pool(**changes)
    lengths = [max(length, model.config.prefix) for length in MIXED]
    texts = [tiny_tokens(1, length, seed=length)[0].tolist() for length in lengths]
    cache = PagedCache([filled(model, pool, text) for text in texts])
    for n in (1, 3, 1):  # together from here on
        new = tiny_tokens(len(texts), n, seed=n)
        logits = model(new, cache=cache).logits[:, -1]
        for row, text in enumerate(texts):
            text += new[row].tolist()
            torch.testing.assert_close(logits[row], alone(model, text), atol=1e-5, rtol=0)
    assert cache.lengths.tolist() == [length + 5 for length in lengths]
    assert cache.lengths.dtype == torch.int32


def test_what_a_sequence_left_behind_reaches_nobody_not_even_as_nan() -> None:
    model, pool = tiny_model(), new_pool(blocks=8)
    broken = PagedSequence(pool)
    cache = PagedCache([broken])
    cache.extend(32)
    for layer in range(model.config.n_layer):
        cache.append(layer, *torch.full((2, 1, 2, 32, 8), torch.nan))
    broken.release()
    texts = [tiny_tokens(1, length)[0].tolist() for length in (2, 17)]  # parts of a block
    cache = PagedCache([filled(model, pool, text) for text in texts])
    logits = model(torch.tensor([[2], [2]]), cache=cache).logits[:, -1]
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], alone(model, [*text, 2]), atol=1e-5, rtol=0)


# Keys and values themselves, against lists that grow


def test_random_comings_and_goings_keep_every_sequence_apart() -> None:
    generator = torch.Generator().manual_seed(3)

    def number(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    config, pool = tiny_config(), new_pool(blocks=40, block_size=3)
    sequences: list[PagedSequence] = []
    stored: list[torch.Tensor] = []  # (layer, 2, Hkv, length, D) of each
    for _ in range(150):
        if not sequences or (number(3) == 0 and len(sequences) < 5):
            sequences.append(PagedSequence(pool))
            stored.append(torch.empty(config.n_layer, 2, 2, 0, 8))
        if number(5) == 0:
            gone = number(len(sequences))
            sequences.pop(gone).release()
            stored.pop(gone)
        elif number(5) == 0 and len(sequences) < 5:
            source = number(len(sequences))
            length = number(sequences[source].length + 1)
            sequences.append(sequences[source].fork(length))
            stored.append(stored[source][:, :, :, :length])
        chosen = [i for i in range(len(sequences)) if number(2) and sequences[i].length < 15]
        if not chosen:
            continue
        n = 1 + number(5)
        cache = PagedCache([sequences[i] for i in chosen])
        before = [sequences[i].length for i in chosen]
        positions = cache.extend(n)
        assert positions.tolist() == [list(range(start, start + n)) for start in before]
        new = torch.randn(config.n_layer, 2, len(chosen), 2, n, 8, generator=generator)
        for row, i in enumerate(chosen):
            stored[i] = torch.cat([stored[i], new[:, :, row]], dim=3)
        for layer in range(config.n_layer):
            both = torch.stack(cache.append(layer, *new[layer]))  # (2, B, Hkv, S, D)
            assert both.isfinite().all()
            assert both.shape[3] == cache.length
            for row, i in enumerate(chosen):
                expected = stored[i][layer]
                assert torch.equal(both[:, row, :, : expected.shape[2]], expected)
    for sequence in sequences:
        sequence.release()
    assert pool.free == pool.blocks


# Blocks


def test_blocks_are_taken_as_needed_and_all_come_back() -> None:
    pool = new_pool(blocks=10, block_size=4)
    sequences = [PagedSequence(pool), PagedSequence(pool)]
    cache = PagedCache(sequences)
    for n, each in ((1, 1), (3, 1), (1, 2), (8, 4)):
        cache.extend(n)
        assert [len(sequence.blocks) for sequence in sequences] == [each, each]
        assert pool.free == 10 - 2 * each
    assert len({*sequences[0].blocks, *sequences[1].blocks}) == 8
    sequences[0].release()
    assert (pool.free, sequences[0].length, sequences[0].blocks) == (6, 0, [])
    cache.reset()
    assert pool.free == 10
    assert cache.extend(2).tolist() == [[0, 1], [0, 1]]


def test_reserved_blocks_are_used_and_no_others() -> None:
    pool = new_pool(blocks=5, block_size=4)
    sequence = PagedSequence(pool)
    sequence.reserve(17)
    assert pool.free == 0
    cache = PagedCache([sequence])
    cache.extend(17)
    cache.extend(3)
    with pytest.raises(ValueError, match="0 of its 5 blocks of 4 tokens free; 1 are needed"):
        cache.extend(1)


def test_a_full_pool_is_one_line_and_changes_nothing() -> None:
    pool = new_pool(blocks=3, block_size=4)
    first, second = PagedSequence(pool), PagedSequence(pool)
    cache = PagedCache([first, second])
    cache.extend(3)
    before = (list(first.blocks), list(second.blocks))
    with pytest.raises(ValueError, match="has 1 of its 3 blocks of 4 tokens free; 2 are needed"):
        cache.extend(2)
    assert (first.blocks, second.blocks) == before
    assert (first.length, second.length, pool.free, cache.length) == (3, 3, 1, 3)
    assert cache.extend(1).tolist() == [[3], [3]]
    with pytest.raises(ValueError, match="2 are needed"):
        first.reserve(9)
    assert (first.blocks, pool.free) == (before[0], 1)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks=0 must be at least 1"):
        new_pool(blocks=0)
    with pytest.raises(ValueError, match="block_size=-1 must be at least 1"):
        new_pool(block_size=-1)


def test_memory_in_bytes() -> None:
    config = tiny_config()
    pool = BlockPool(config, blocks=7, block_size=4, dtype=torch.bfloat16)
    per_token = config.n_layer * 2 * config.kv_heads * config.head_size * 2
    assert pool.nbytes == 7 * 4 * per_token
    sequence = PagedSequence(pool)
    PagedCache([sequence]).extend(5)
    assert sequence.nbytes == 2 * 4 * per_token
    other = sequence.fork(4)
    cache = PagedCache([sequence, other])
    assert cache.nbytes == 2 * 4 * per_token
    cache.extend(1)
    k = torch.zeros(2, config.kv_heads, 1, config.head_size)
    assert cache.append(0, k, k)[0].dtype == torch.bfloat16


# Sequences that begin alike


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_a_fork_shares_full_blocks_and_goes_its_own_way(length: int) -> None:
    model, pool = tiny_model(), new_pool(blocks=12, block_size=4)
    text = tiny_tokens(1, 10)[0].tolist()
    first = filled(model, pool, text)
    free = pool.free
    second = first.fork(length)
    assert second.blocks[: length // 4] == first.blocks[: length // 4]
    assert pool.free == free - (1 if length % 4 else 0)
    # Both write behind the fork, and neither sees it of the other.
    texts = [text, text[:length]]
    cache = PagedCache([first, second])
    for new in ([3, 5], [8, 1], [2, 2]):
        logits = model(torch.tensor(new)[:, None], cache=cache).logits[:, -1]
        texts = [[*old, token] for old, token in zip(texts, new, strict=True)]
        for row in range(2):
            torch.testing.assert_close(logits[row], alone(model, texts[row]), atol=1e-5, rtol=0)
    first.release()
    logits = model(torch.tensor([[4]]), cache=PagedCache([second])).logits[0, -1]
    torch.testing.assert_close(logits, alone(model, [*texts[1], 4]), atol=1e-5, rtol=0)
    second.release()
    assert pool.free == pool.blocks
