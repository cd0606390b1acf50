"""The full cache: places, positions, views and reuse."""

import pytest
import torch

from model.config import ModelConfig
from model.kv_cache import FullCache

CONFIG = ModelConfig(vocab_size=11, context_length=8, n_layer=3, n_head=4, n_kv_head=2, n_embd=16)


def kv(batch: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (batch, CONFIG.kv_heads, n, CONFIG.head_size)
    return torch.randn(shape), torch.randn(shape)


def test_what_is_appended_comes_back_in_order_for_each_layer() -> None:
    cache = FullCache(CONFIG, batch=2)
    stored = []
    for n in (3, 1, 4):
        cache.extend(n)
        stored.append([kv(2, n) for _ in range(CONFIG.n_layer)])
        for layer, (k, v) in enumerate(stored[-1]):
            keys, values = cache.append(layer, k, v)
            assert torch.equal(keys, torch.cat([step[layer][0] for step in stored], dim=2))
            assert torch.equal(values, torch.cat([step[layer][1] for step in stored], dim=2))
    assert cache.length == cache.capacity == 8
    assert cache.lengths is None


def test_positions_go_on_where_the_last_ones_ended() -> None:
    cache = FullCache(CONFIG, batch=2)
    assert cache.extend(3).tolist() == [[0, 1, 2]] * 2
    positions = cache.extend(2)
    assert positions.tolist() == [[3, 4]] * 2
    assert positions.dtype == torch.int64


def test_the_keys_are_views_of_memory_allocated_once() -> None:
    cache = FullCache(CONFIG)
    pointers = set()
    for _ in range(8):
        cache.extend(1)
        keys, values = cache.append(1, *kv(1, 1))
        pointers.add((keys.data_ptr(), values.data_ptr()))
    assert len(pointers) == 1


def test_beyond_the_capacity_is_one_line_and_changes_nothing() -> None:
    cache = FullCache(CONFIG, capacity=5)
    cache.extend(4)
    with pytest.raises(ValueError, match="holds 4 of at most 5 tokens; 2 more do not fit"):
        cache.extend(2)
    assert cache.length == 4
    assert cache.extend(1).tolist() == [[4]]


def test_reset_forgets_and_keeps_the_memory() -> None:
    cache = FullCache(CONFIG)
    cache.extend(8)
    before, _ = cache.append(0, *kv(1, 8))
    cache.reset()
    assert cache.length == 0
    assert cache.extend(2).tolist() == [[0, 1]]
    k, v = kv(1, 2)
    keys, values = cache.append(0, k, v)
    assert torch.equal(keys, k)
    assert torch.equal(values, v)
    assert keys.data_ptr() == before.data_ptr()


def test_size_and_type() -> None:
    cache = FullCache(CONFIG, batch=3, capacity=5, dtype=torch.bfloat16)
    layers, keys_and_values, bytes_each = 3, 2, 2
    assert cache.nbytes == layers * keys_and_values * 3 * 2 * 5 * 4 * bytes_each
    cache.extend(1)
    assert cache.append(0, *kv(3, 1))[0].dtype == torch.bfloat16


def test_every_sequence_can_begin_with_the_content_of_one() -> None:
    single, many = FullCache(CONFIG, capacity=2), FullCache(CONFIG, batch=3)
    single.extend(2)
    stored = [kv(1, 2) for _ in range(CONFIG.n_layer)]
    for layer, (k, v) in enumerate(stored):
        single.append(layer, k, v)
    many.copy_from(single)
    assert many.extend(1).tolist() == [[2]] * 3
    for layer, (k, v) in enumerate(stored):
        keys, values = many.append(layer, *kv(3, 1))
        assert torch.equal(keys[:, :, :2], k.expand(3, -1, -1, -1))
        assert torch.equal(values[:, :, :2], v.expand(3, -1, -1, -1))
    keys[0].zero_()
    assert keys[1].any()


def test_sequences_can_go_on_from_one_another() -> None:
    cache = FullCache(CONFIG, batch=3)
    cache.extend(4)
    stored = [kv(3, 4) for _ in range(CONFIG.n_layer)]
    for layer, (k, v) in enumerate(stored):
        cache.append(layer, k, v)
    rows = torch.tensor([2, 0, 2])
    cache.reorder(rows)
    cache.extend(1)
    for layer, (k, v) in enumerate(stored):
        new_k, new_v = kv(3, 1)
        keys, values = cache.append(layer, new_k, new_v)
        assert torch.equal(keys, torch.cat([k[rows], new_k], dim=2))
        assert torch.equal(values, torch.cat([v[rows], new_v], dim=2))


def test_going_back_forgets_the_last_tokens_only() -> None:
    cache = FullCache(CONFIG, batch=2)
    cache.extend(5)
    k, v = kv(2, 5)
    cache.append(1, k, v)
    cache.truncate(3)
    assert cache.length == 3
    assert cache.extend(2).tolist() == [[3, 4]] * 2
    new_k, new_v = kv(2, 2)
    keys, values = cache.append(1, new_k, new_v)
    assert torch.equal(keys, torch.cat([k[:, :, :3], new_k], dim=2))
    assert torch.equal(values, torch.cat([v[:, :, :3], new_v], dim=2))


def test_places_not_used_yet_are_finite(monkeypatch):
    """Attention that reads the whole memory gives them no weight, and 0 times NaN is NaN."""
    nan = float("nan")  # what memory may hold that nobody has written to
    monkeypatch.setattr(torch, "empty", lambda shape, **kind: torch.full(shape, nan, **kind))
    cache = FullCache(CONFIG)
    assert all(memory.isfinite().all() for memory in (*cache.keys, *cache.values))
