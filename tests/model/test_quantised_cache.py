"""The caches of 8 and 4 bits: what is stored where, how far off it may be, how many bytes."""

import pytest
import torch

from model.caches import logit_error
from model.kv_cache import FullCache
from model.quantised_cache import QuantisedCache, pack, quantise, unpack
from tests.model.tiny import OPTIONS, tiny_config, tiny_model, tiny_tokens

CONFIG = tiny_config(n_layer=2)  # 2 key/value heads of 8 channels, context 32
SEVERAL = ["plain", "yarn", "alibi", "learned", "windows", "all_at_once", "all_with_alibi"]
LARGEST = {8: 127, 4: 7}

both = pytest.mark.parametrize("bits", [8, 4])


def kv(n: int, batch: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Keys with one channel far from zero, and values with one large token."""
    k, v = torch.randn(2, batch, 2, n, 8, dtype=dtype)
    k[..., 3] += 20
    v[:, :, n // 2] *= 50
    return [k, v]


def filled(chunks: list[int], **options) -> tuple[QuantisedCache, list[list[torch.Tensor]]]:
    """A cache after these chunks, and the keys and values of each layer as they were given."""
    cache = QuantisedCache(CONFIG, batch=2, **options)
    given: list[list[torch.Tensor]] = [[] for _ in range(CONFIG.n_layer)]
    for n in chunks:
        cache.extend(n)
        for layer in range(CONFIG.n_layer):
            new = kv(n, dtype=options.get("dtype", torch.float32))
            old = given[layer]
            given[layer] = (
                new if not old else [torch.cat(pair, 2) for pair in zip(old, new, strict=True)]
            )
            cache.append(layer, *new)
    return cache, given


def half_steps(keys: torch.Tensor, values: torch.Tensor, sinks: int, group: int, bits: int):
    """Half a step of the scale for every element, element by element and in plain loops."""
    bounds = torch.zeros_like(keys), torch.zeros_like(values)
    whole = (keys.shape[2] - sinks) // group if keys.shape[2] > sinks else 0
    for g in range(whole):
        tokens = range(sinks + g * group, sinks + (g + 1) * group)
        for b in range(keys.shape[0]):
            for h in range(keys.shape[1]):
                for d in range(keys.shape[3]):
                    largest = max(abs(keys[b, h, t, d].item()) for t in tokens)
                    for t in tokens:
                        bounds[0][b, h, t, d] = largest / LARGEST[bits] / 2
                for t in tokens:
                    bounds[1][b, h, t] = values[b, h, t].abs().max().item() / LARGEST[bits] / 2
    return bounds


@both
@pytest.mark.parametrize("chunks", [[23], [1] * 23, [2, 9, 12]])
@pytest.mark.parametrize(("sinks", "group"), [(4, 6), (0, 5), (3, 2), (40, 4), (4, 32)])
def test_every_element_is_off_by_half_a_step_at_most(chunks, sinks, group, bits) -> None:
    cache, given = filled(chunks, bits=bits, sinks=sinks, group=group)
    cache.extend(1)
    for layer, stored in enumerate(given):
        new = kv(1)
        read = cache.append(layer, *new)
        for actual, old, newest, bound in zip(
            read, stored, new, half_steps(*stored, sinks, group, bits), strict=True
        ):
            assert actual.shape[2] == 24
            assert actual[:, :, -1:].equal(newest)
            off = (actual[:, :, :-1] - old).abs()
            assert (off <= bound * (1 + 1e-4)).all()  # so 0 where it is stored as it is
            if bound.any():  # and what should be quantised is
                assert (off / bound)[bound > 0].mean() > 0.2


@both
def test_scales_are_per_channel_for_keys_and_per_token_for_values(bits: int) -> None:
    """One large channel or token costs its neighbours nothing, and itself half a step."""
    cache, [[keys, values], _] = filled([26], bits=bits, sinks=2, group=8)
    finer = LARGEST[bits] / 127
    cache.extend(1)
    read_keys, read_values = cache.append(0, *kv(1))
    off = (read_keys[:, :, 2:26] - keys[:, :, 2:26]).abs()
    assert off[..., 3].max() * finer > 0.04  # around 20 of 127 steps to 24
    assert off[..., [0, 1, 2, 4, 5, 6, 7]].max() * finer < 0.02
    off = (read_values[:, :, 2:26] - values[:, :, 2:26]).abs()
    assert off[:, :, 11].max() * finer > 0.1  # the token 13 is 50 times the others
    assert off[:, :, [*range(11), *range(12, 24)]].max() * finer < 0.02


@both
@pytest.mark.parametrize(("sinks", "group"), [(4, 6), (0, 5), (3, 32)])
@pytest.mark.parametrize("chunks", [[1] * 30, [7] * 4, [3, 20, 1, 6]])
def test_a_chunk_that_fills_a_group_still_sees_what_was_stored_before(
    chunks, sinks, group, bits
) -> None:
    cache = QuantisedCache(CONFIG, bits=bits, batch=2, sinks=sinks, group=group)
    before = [torch.empty(2, 2, 0, 8), torch.empty(2, 2, 0, 8)]
    for n in chunks:
        cache.extend(n)
        new = kv(n)
        read = cache.append(0, *new)
        bounds = half_steps(*before, sinks, group, bits)
        for actual, old, newest, bound in zip(read, before, new, bounds, strict=True):
            old_part, new_part = actual.split([old.shape[2], n], dim=2)
            assert ((old_part - old).abs() <= bound * (1 + 1e-4)).all()
            assert new_part.equal(newest)
        before = [torch.cat(pair, 2) for pair in zip(before, new, strict=True)]


@both
def test_a_chunk_sees_itself_as_it_is(bits: int) -> None:
    cache = QuantisedCache(CONFIG, bits=bits, batch=2, group=4)
    cache.extend(20)
    k, v = kv(20)
    keys, values = cache.append(0, k, v)
    assert keys.equal(k)
    assert values.equal(v)


@both
def test_zeros_and_tiny_numbers_stay_finite(bits: int) -> None:
    for x in (torch.zeros(2, 3), torch.full((2, 3), 1e-45), torch.full((2, 3), -3e38)):
        integers, scale = quantise(x, -1, bits)
        back = integers * scale
        assert back.isfinite().all()
        torch.testing.assert_close(back, x, rtol=1e-5, atol=1e-44)


def test_packing_keeps_every_pair_of_integers_in_half_the_bytes() -> None:
    integers = torch.cartesian_prod(torch.arange(-8, 8), torch.arange(-8, 8)).to(torch.int8)
    assert pack(integers).unique().numel() == 256
    assert unpack(pack(integers)).equal(integers)
    several = torch.randint(-7, 8, (2, 3, 10), dtype=torch.int8)
    assert pack(several).shape == (2, 3, 5)
    assert pack(several).dtype == torch.int8
    assert unpack(pack(several)).equal(several)


@both
def test_bytes_are_those_of_integers_scales_and_full_precision(bits: int) -> None:
    layers, heads, D, sinks, group, groups = 2, 2, 8, 4, 6, 4
    room = {"batch": 3, "capacity": 4 + 4 * 6 + 2, "dtype": torch.bfloat16}
    cache = QuantisedCache(CONFIG, bits=bits, sinks=sinks, group=group, **room)
    integers = 2 * groups * group * D * bits // 8
    scales = 4 * groups * (D + group)
    full = 2 * 2 * (sinks + group) * D
    assert cache.nbytes == layers * 3 * heads * (integers + scales + full)
    config = tiny_config(context_length=1024, head_dim=64)
    ratio = QuantisedCache(config, bits=bits).nbytes / FullCache(config).nbytes
    assert bits / 32 < ratio < bits / 32 + 0.07


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_keys_and_values_come_in_the_type_they_went(dtype: torch.dtype, bits: int) -> None:
    cache, _ = filled([30], bits=bits, group=8, dtype=dtype)
    cache.extend(1)
    assert all(x.dtype == dtype for x in cache.append(0, *kv(1, dtype=dtype)))


@both
def test_a_shorter_cache_holds_less_than_a_group(bits: int) -> None:
    cache, given = filled([3], bits=bits, capacity=4, sinks=4, group=32)
    cache.extend(1)
    assert cache.append(1, *kv(1))[0][:, :, :3].equal(given[1][0])
    with pytest.raises(ValueError, match="holds 4 of at most 4 tokens; 1 more do not fit"):
        cache.extend(1)


@both
def test_every_sequence_can_begin_with_the_content_of_one_and_be_reset(bits: int) -> None:
    model = tiny_model()
    tokens = tiny_tokens(1, 32)
    how = {"bits": bits, "sinks": 2, "group": 8}
    single = QuantisedCache(model.config, capacity=21, **how)
    many = QuantisedCache(model.config, batch=3, **how)
    with torch.no_grad():
        model(tiny_tokens(3, 30, seed=5), cache=many)
        many.reset()
        model(tokens[:, :21], cache=single)
        many.copy_from(single)
        beside = [
            model(token.expand(3, 1), cache=many).logits for token in tokens[:, 21:].split(1, 1)
        ]
        alone = QuantisedCache(model.config, **how)
        model(tokens[:, :21], cache=alone)
        for token, logits in zip(tokens[:, 21:].split(1, 1), beside, strict=True):
            expected = model(token, cache=alone).logits.expand(3, -1, -1)
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@both
@pytest.mark.parametrize("option", SEVERAL)
def test_logits_stay_close(option: str, bits: int) -> None:
    model = tiny_model(**OPTIONS[option])
    cache = QuantisedCache(model.config, bits=bits, batch=2, group=4)
    error = logit_error(model, cache, tiny_tokens(2, 32))
    scale = model(tiny_tokens(2, 32)).logits.std().item()
    coarser = 127 / LARGEST[bits]
    assert 0 < error.max_abs < 0.1 * scale * coarser
    assert 0 < error.mean_kl < 1e-3 * coarser


@both
def test_what_stays_in_full_precision_costs_nothing(bits: int) -> None:
    model = tiny_model()
    for options in ({"sinks": 32}, {"sinks": 0, "group": 32}):
        cache = QuantisedCache(model.config, bits=bits, **options)
        assert logit_error(model, cache, tiny_tokens(1, 32)).max_abs < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
        ({"group": 0}, "group=0 must be at least 1"),
        ({"bits": 5}, "bits=5 is not one of 8, 4"),
    ],
)
def test_options_that_cannot_work_are_one_line(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        QuantisedCache(CONFIG, **options)


def test_an_odd_head_size_has_8_bits_but_not_4() -> None:
    config = tiny_config(position="none", head_dim=7)
    model = tiny_model(position="none", head_dim=7)
    cache = QuantisedCache(config, batch=2, group=4)
    assert logit_error(model, cache, tiny_tokens(2, 32)).max_abs > 0
    with pytest.raises(ValueError, match="the head size 7 must be even for cache=int4") as error:
        QuantisedCache(config, bits=4)
    assert "\n" not in str(error.value)
