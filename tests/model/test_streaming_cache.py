"""The streaming cache against its definition, far past its capacity; memory, limits, refusals."""

import copy
from typing import Any

import pytest
import torch

from model.decoder import Decoder
from model.kv_cache import FullCache
from model.streaming_cache import StreamingCache
from tests.model.slow_stream import SlowStream
from tests.model.tiny import OPTIONS, tiny_config, tiny_model, tiny_tokens

CHANGES: dict[str, dict[str, Any]] = {
    "rope": {},
    "multi-query": {"n_kv_head": 1, "qk_norm": True},
    "linear": OPTIONS["linear"],
    "ntk": OPTIONS["ntk"],
    "yarn": OPTIONS["yarn"],
    "alibi": {"position": "alibi"},
    "none": {"position": "none"},
    "learned sink logit": {"sink_logit": "learned", "output_gate": True},
    "windows": {"windows": [3, 0]},
    "soft-cap": {"softcap": 5.0, "bias": True, "norm": "layernorm"},
}
FIRST_TOKENS: dict[str, dict[str, Any]] = {
    "window sinks": {"windows": [4], "window_sinks": 2},
    "prefix": {"mask": "prefix", "prefix": 3},
}


def model_of(**changes: Any) -> Decoder:
    return tiny_model(**({"init_std": 0.3} | changes))


@torch.no_grad()
def streamed(model: Decoder, cache: StreamingCache, tokens: torch.Tensor, first: int):
    """Logits (B, T, V), the first chunk of the given size, then token by token."""
    chunks = [first] + [1] * (tokens.shape[1] - first)
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(chunks, 1)], dim=1)


def check_against_definition(
    changes: dict[str, Any], sinks: int, capacity: int, *, first: int = 1, batch: int = 1
) -> None:
    model = model_of(context_length=capacity, **changes)
    tokens = tiny_tokens(batch, 6 * capacity + 2)
    cache = StreamingCache(model.config, batch=batch, sinks=sinks)
    actual = streamed(model, cache, tokens, first)
    slow = SlowStream(copy.deepcopy(model).double(), capacity, sinks)
    expected = slow.all_logits(tokens, first)
    torch.testing.assert_close(actual.double(), expected, atol=1e-4, rtol=0)
    assert actual[0].argmax(-1).unique().numel() > 3


@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_far_past_the_capacity_it_equals_rotating_every_key_anew(name: str, sinks: int) -> None:
    check_against_definition(CHANGES[name], sinks, capacity=6)


@pytest.mark.parametrize("capacity", [1, 2, 5])
@pytest.mark.parametrize("sinks", [0, 1, 4])
def test_small_capacities(capacity: int, sinks: int) -> None:
    if sinks < capacity:
        check_against_definition({}, sinks, capacity, batch=2)


@pytest.mark.parametrize("name", FIRST_TOKENS)
def test_first_tokens_with_a_role_of_their_own_stay(name: str) -> None:
    check_against_definition(FIRST_TOKENS[name], sinks=3, capacity=7, first=3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype: torch.dtype) -> None:
    model = model_of(context_length=9).to(dtype)
    tokens = tiny_tokens(1, 60)
    cache = StreamingCache(model.config, dtype=dtype)
    actual = streamed(model, cache, tokens, first=4)
    slow = SlowStream(copy.deepcopy(model).double(), 9, 4)
    expected = slow.all_logits(tokens)
    if dtype == torch.float64:
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    else:
        assert (actual.double() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("chunks", [[12], [5, 4, 3], [1] * 12])
@pytest.mark.parametrize("name", ["rope", "alibi", *FIRST_TOKENS])
def test_within_the_capacity_it_is_a_full_cache(name: str, chunks: list[int]) -> None:
    changes = (CHANGES | FIRST_TOKENS)[name]
    model = model_of(context_length=12, **changes)
    if model.config.prefix and chunks[0] < model.config.prefix:
        chunks = [3] + [1] * 9
    tokens = tiny_tokens(2, 12)
    caches = FullCache(model.config, batch=2), StreamingCache(model.config, batch=2)
    with torch.no_grad():
        for part in tokens.split(chunks, 1):
            one, other = (model(part, cache=cache).logits for cache in caches)
            assert one.equal(other)


def test_memory_is_constant_and_attention_reads_one_piece_of_it() -> None:
    config = tiny_config(context_length=8)
    cache = StreamingCache(config, batch=3, sinks=2, dtype=torch.bfloat16)
    layers, keys_and_values, bytes_each = 2, 2, 2
    assert cache.nbytes == layers * keys_and_values * 3 * 2 * (16 + 2) * 8 * bytes_each
    memory = [(k.data_ptr(), v.data_ptr()) for k, v in zip(cache.keys, cache.values, strict=True)]
    for _ in range(50):
        positions = cache.extend(1)
        assert positions.tolist() == [[cache.end - 1]] * 3
        assert cache.length == cache.end - cache.begin <= 8
        for layer in range(layers):
            new = torch.randn(3, 2, 1, 8, dtype=torch.bfloat16)
            keys, values = cache.append(layer, new, -new)
            assert keys.data_ptr() == cache.keys[layer][:, :, cache.begin :].data_ptr()
            assert keys.shape == values.shape == (3, 2, cache.length, 8)
            assert keys[:, :, -1:].equal(new)
            assert values[:, :, -1:].equal(-new)
    assert memory == [
        (k.data_ptr(), v.data_ptr()) for k, v in zip(cache.keys, cache.values, strict=True)
    ]


def test_values_are_those_of_sinks_and_window() -> None:
    cache = StreamingCache(tiny_config(context_length=8, n_layer=1), sinks=3)
    for t in range(70):
        cache.extend(1)
        _, values = cache.append(0, torch.randn(1, 2, 1, 8), torch.full((1, 2, 1, 8), float(t)))
    assert values[0, 1, :, 5].tolist() == [0, 1, 2, 65, 66, 67, 68, 69]


def test_a_key_is_turned_back_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, moves = [], []
    move = StreamingCache._move_to_front
    monkeypatch.setattr(
        StreamingCache, "_move_to_front", lambda cache: (moves.append(len(read)), move(cache))
    )
    cache = StreamingCache(tiny_config(context_length=8), sinks=2)
    for token in range(100):
        cache.extend(1)
        read.append(token)
    # A key stays for 6 tokens, and the window moves every 8.
    assert moves == list(range(16, 100, 8))


def test_every_sequence_can_begin_with_the_content_of_one() -> None:
    model = model_of(context_length=8)
    tokens = tiny_tokens(1, 40)
    for read in (8, 21):
        single = StreamingCache(model.config, sinks=2)
        streamed(model, single, tokens[:, :read], min(read, 8))
        many = StreamingCache(model.config, batch=3, sinks=2)
        many.copy_from(single)
        alone = streamed(model, single, tokens[:, read:], 1)
        beside = streamed(model, many, tokens[:, read:].expand(3, -1), 1)
        torch.testing.assert_close(beside, alone.expand(3, -1, -1), atol=1e-5, rtol=0)


def test_reset_forgets_the_sinks_too() -> None:
    model = model_of(context_length=8)
    cache = StreamingCache(model.config, sinks=2)
    streamed(model, cache, tiny_tokens(1, 30), 5)
    cache.reset()
    assert cache.length == 0
    tokens = tiny_tokens(1, 30, seed=7)
    again = streamed(model, cache, tokens, 4)
    assert again.equal(streamed(model, StreamingCache(model.config, sinks=2), tokens, 4))


def test_several_tokens_beyond_the_capacity_are_refused_and_change_nothing() -> None:
    cache = StreamingCache(tiny_config(context_length=8))
    cache.extend(7)
    with pytest.raises(ValueError, match="holds 7 of 8 tokens; 2 more do not fit at once"):
        cache.extend(2)
    assert cache.length == 7
    cache.extend(1)
    cache.extend(1)
    with pytest.raises(ValueError, match="holds 8 of 8 tokens; 3 more do not fit at once"):
        cache.extend(3)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"position": "learned"}, {}, r"model\.position=learned cannot stream"),
        ({"position": "sinusoidal"}, {}, r"model\.position=sinusoidal cannot stream"),
        ({}, {"sinks": -1}, "sinks=-1 must be at least 0 and below the 32 tokens"),
        ({}, {"sinks": 8, "capacity": 8}, "sinks=8 must be at least 0 and below the 8 tokens"),
        ({}, {"capacity": 33}, r"capacity=33 is above model\.context_length=32"),
        ({"mask": "prefix", "prefix": 6}, {}, r"first model\.prefix=6 tokens must stay: sinks=4"),
        ({"windows": [9], "window_sinks": 2}, {"sinks": 1}, r"model\.window_sinks=2 .* sinks=1"),
    ],
)
def test_what_cannot_stream_is_one_line(changes, options, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        StreamingCache(tiny_config(**changes), **options)
    assert "\n" not in str(error.value)
