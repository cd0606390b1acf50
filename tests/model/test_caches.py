"""Every cache behind one protocol: exact ones equal no cache, all of them generate."""

from dataclasses import replace

import pytest
import torch

from model.caches import CacheOptions, check_cache, logit_error, make_cache
from model.decoder import Decoder
from model.generate import Generator
from model.quantised_cache import QuantisedCache
from model.sampling import SamplingOptions
from tests.model.slow_stream import SlowStream
from tests.model.test_generate import BASE, CONFIGS, VARIED, build, run

INT8 = CacheOptions(kind="int8", sinks=2, group=4)
INT4 = CacheOptions(kind="int4", sinks=2, group=4)
EVICTING = CacheOptions(kind="evicting", sinks=2, budget=9)
STREAMING = {
    name: config
    for name, config in CONFIGS.items()
    if config.position not in ("learned", "sinusoidal")
}
PROMPT = [3, 1, 4, 1, 5]


@torch.no_grad()
def read(model: Decoder, tokens: torch.Tensor, chunks: list[int], **options) -> torch.Tensor:
    """Logits (B, T, V) through the cache of these options, in chunks of the given sizes."""
    cache = make_cache(model.config, CacheOptions(), batch=tokens.shape[0], **options)
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(chunks, 1)], dim=1)


# Exact within the context


@pytest.mark.parametrize("name", STREAMING)
def test_a_streaming_cache_equals_no_cache_within_the_context(name: str) -> None:
    model = build(STREAMING[name])
    tokens = torch.randint(BASE.vocab_size, (2, 24))
    with torch.no_grad():
        expected = model(tokens).logits
    for chunks in ([24], [4, *[1] * 20]):
        actual = read(model, tokens, chunks, stream=True)
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", STREAMING)
def test_greedy_tokens_of_a_stream_are_those_of_the_uncached_path(name: str) -> None:
    model = build(STREAMING[name])
    expected = run(model, PROMPT, 15, options=VARIED, use_cache=False).tokens[0]
    # 30 more tokens do not fit, but what fits comes out the same.
    generation = run(model, PROMPT, 30, options=VARIED, at_limit="stream", prefill_chunk=2)
    assert generation.tokens[0][:15] == expected
    assert generation.ends == ["length"]
    assert len(generation.tokens[0]) == 30


@pytest.mark.parametrize("kind", [INT8, INT4, EVICTING])
def test_inexact_caches_are_exact_while_nothing_is_lost(kind: CacheOptions) -> None:
    model = build(replace(BASE, n_kv_head=2))
    tokens = torch.randint(31, (1, 6))
    with torch.no_grad():
        expected = model(tokens).logits
        cache = make_cache(model.config, replace(kind, sinks=6))
        actual = torch.cat([model(part, cache=cache).logits for part in tokens.split(1, 1)], 1)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


# Streams that do not end


@pytest.mark.parametrize(
    ("name", "sinks"), [("rope", 0), ("rope", 4), ("alibi", 1), ("learned sink logit", 1)]
)
def test_a_stream_goes_on_as_its_definition_says(name: str, sinks: int) -> None:
    model = build(CONFIGS[name]).double()
    tokens = run(model, PROMPT, 70, at_limit="stream", cache=CacheOptions(sinks=sinks)).tokens[0]
    slow = SlowStream(model, 24, sinks)
    logits = slow.all_logits(torch.tensor([PROMPT + tokens[:-1]]))[0, len(PROMPT) - 1 :]
    assert tokens == logits.argmax(-1).tolist()


def test_of_a_long_prompt_a_stream_reads_the_beginning_and_the_end() -> None:
    model = build(BASE)
    prompt = [(7 * i) % 31 for i in range(70)]
    shortened = prompt[:3] + prompt[-21:]
    how = {"at_limit": "stream", "cache": CacheOptions(sinks=3), "options": VARIED}
    assert run(model, prompt, 50, **how).tokens == run(model, shortened, 50, **how).tokens
    without = {"at_limit": "stream", "cache": CacheOptions(sinks=0), "options": VARIED}
    assert (
        run(model, prompt, 50, **without).tokens == run(model, prompt[-24:], 50, **without).tokens
    )


def test_a_stream_takes_constant_memory_and_none_too_much() -> None:
    model = build(BASE)
    full = 2 * 2 * 4 * 8 * 4  # bytes of one token: 2 layers, keys and values, 4 heads of 8 floats
    generation = Generator(model, at_limit="stream").generate(PROMPT, max_new_tokens=200)
    assert generation.cache_bytes == 0
    sizes = {generation.cache_bytes for _ in generation}
    assert sizes == {(2 * 24 + 4) * full}
    short = Generator(model, at_limit="stream").generate(PROMPT, max_new_tokens=10).run()
    assert short.cache_bytes == (5 + 10 - 1) * full


# Several samples, repeated calls, other types


@pytest.mark.parametrize(
    "how",
    [
        {"at_limit": "stream"},
        {"cache": INT8, "at_limit": "slide"},
        {"cache": INT4, "at_limit": "slide"},
        {"cache": EVICTING, "at_limit": "slide"},
        {"cache": INT8},
        {"cache": INT4},
        {"cache": EVICTING},
    ],
)
def test_a_sample_is_the_same_alone_or_beside_others(how: dict) -> None:
    model = build(replace(BASE, n_kv_head=2)).double()
    how = {"options": SamplingOptions(), "prefill_chunk": 4} | how
    together = run(model, PROMPT, 40, num_samples=2, seed=7, **how).tokens
    assert together == [run(model, PROMPT, 40, seed=7 + i, **how).tokens[0] for i in range(2)]
    assert together[0] != together[1]
    assert len(together[0]) == (40 if "at_limit" in how else 20)


@pytest.mark.parametrize("kind", [INT8, INT4, EVICTING])
def test_inexact_caches_stop_at_the_context(kind: CacheOptions) -> None:
    generation = run(build(BASE), PROMPT, 60, cache=kind)
    assert generation.ends == ["context"]
    assert generation.cache_bytes < run(build(BASE), PROMPT, 60).cache_bytes


@pytest.mark.parametrize(
    "how", [{"at_limit": "stream"}, {"cache": INT8}, {"cache": INT4}, {"cache": EVICTING}]
)
def test_under_autocast_the_cache_has_its_type(how: dict) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert len(run(build(BASE), [1, 2], 15, **how).tokens[0]) == 15


# What an inexact cache costs


def test_the_error_is_the_largest_difference_and_the_mean_divergence() -> None:
    model = build(BASE)
    tokens = torch.randint(31, (2, 20))
    error = logit_error(model, QuantisedCache(BASE, batch=2, sinks=1, group=2), tokens, singly=6)
    with torch.no_grad():
        exact = model(tokens).logits[:, 14:]
        cache = QuantisedCache(BASE, batch=2, sinks=1, group=2)
        parts = [model(part, cache=cache).logits for part in tokens.split([14, *[1] * 6], 1)]
    actual = torch.cat(parts[1:], dim=1)
    assert error.tokens == 12
    assert error.max_abs == pytest.approx((actual - exact).abs().max().item(), rel=1e-3, abs=1e-5)
    p, q = exact.double().softmax(-1), actual.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1).mean().item()
    assert error.mean_kl == pytest.approx(kl, rel=1e-2)
    assert str(error).endswith("nats, over 12 tokens")


def test_a_generator_measures_what_its_cache_costs() -> None:
    model = build(BASE)
    text = [(5 * i) % 31 for i in range(40)]
    assert Generator(model).cache_error(text) is None
    assert Generator(model, cache=INT4).cache_error([1]) is None
    fine, middle, coarse = (
        Generator(model, cache=kind).cache_error(text) for kind in (INT8, INT4, EVICTING)
    )
    assert 0 < fine.mean_kl < middle.mean_kl < coarse.mean_kl
    assert fine.tokens == 23  # all of the 24 that fit the context, but for the first


# What cannot work


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "itn8"}, "'itn8' is not one of full, int8, int4, evicting; did you mean 'int8'"),
        ({"sinks": -1}, "sinks=-1 must be at least 0"),
        ({"group": 0}, "group=0 must be at least 1"),
        ({"kind": "evicting"}, "cache=evicting needs a budget"),
        ({"budget": 8}, "budget=8 has no effect with cache=full"),
        ({"budget": 8, "kind": "int4"}, "budget=8 has no effect with cache=int4"),
    ],
)
def test_options_that_cannot_work_are_one_line(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        CacheOptions(**options)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"position": "learned"}, {"at_limit": "stream"}, r"model\.position=learned cannot stream"),
        ({}, {"at_limit": "stream", "cache": CacheOptions(sinks=24)}, "sinks=24 must be .* the 24"),
        ({}, {"at_limit": "stream", "cache": INT8}, "at_limit=stream .* not cache=int8"),
        ({}, {"at_limit": "stream", "use_cache": False}, "at_limit=stream does not go without"),
        ({}, {"at_limit": "stream", "cache": INT4}, "at_limit=stream .* not cache=int4"),
        ({}, {"cache": INT8, "use_cache": False}, "cache=int8 does not go without a cache"),
        ({}, {"cache": INT4, "use_cache": False}, "cache=int4 does not go without a cache"),
        ({}, {"cache": INT4, "compiled": True}, "is for the full cache, not for cache=int4"),
        ({"head_dim": 7, "position": "none"}, {"cache": INT4}, "the head size 7 must be even"),
        ({"position": "alibi"}, {"cache": EVICTING}, r"model\.position=alibi cannot evict"),
        ({"windows": [5]}, {"cache": EVICTING}, r"model\.windows=\[5\] cannot evict"),
    ],
)
def test_a_generator_refuses_what_cannot_work_before_it_starts(changes, settings, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Generator(build(replace(BASE, **changes)), **settings)
    assert "\n" not in str(error.value)


def test_quantised_keys_and_values_need_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine for which 4 bits are little enough, but 8 bits are too many."""
    of_8_bits = 2 * 2 * 4 * 8 * 24  # 2 layers, keys and values, 4 heads of 8 channels, 24 tokens
    memory = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": of_8_bits // 2}
    monkeypatch.setattr("model.caches.os.sysconf", memory.__getitem__)
    model = build(BASE)
    Generator(model, cache=INT4).check([1], max_new_tokens=24)
    for kind in (INT8, CacheOptions()):
        with pytest.raises(ValueError, match=r"num_samples=1 of 24 tokens needs .* GiB"):
            Generator(model, cache=kind).check([1], max_new_tokens=24)
    memory["SC_PHYS_PAGES"] -= 1
    with pytest.raises(ValueError, match=r"num_samples=1 of 24 tokens needs .* GiB"):
        Generator(model, cache=INT4).check([1], max_new_tokens=24)


def test_checking_allocates_nothing_and_agrees_with_making() -> None:
    huge = replace(BASE, context_length=2**50, position="none")
    check_cache(huge, CacheOptions(), stream=True)
    check_cache(huge, EVICTING)
    with pytest.raises(ValueError, match="cannot evict"):
        make_cache(replace(BASE, windows=[3]), EVICTING)
