"""The step that produces a token: compiled equals eager, one compilation, 8 bits within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from model.ahead_of_time import AheadOfTime
from model.caches import CacheOptions
from model.config import ModelConfig
from model.decode import DecodeStep, _views
from model.decode_linear import Int8Linear, RowsLinear, with_linear_layers
from model.decoder import Decoder
from model.generate import Generator
from model.kv_cache import FullCache
from model.sampling import SamplingOptions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # on loading the compiler

BASE = ModelConfig(vocab_size=31, context_length=16, n_layer=1, n_head=4, n_kv_head=2, n_embd=32)
CONFIGS = {
    "grouped": BASE,
    "multi-head": replace(BASE, n_kv_head=None, norm="layernorm", mlp="gelu", bias=True),
    "alibi": replace(BASE, position="alibi"),
    "learned": replace(BASE, position="learned", tie_embeddings=False),
    "sinusoidal": replace(BASE, position="sinusoidal"),
    "no positions": replace(BASE, position="none", softcap=5.0),
    "window": replace(BASE, windows=[5], window_sinks=2),
    "yarn": replace(BASE, rope_scaling="yarn", rope_scaling_factor=2.0, qk_norm=True),
    "sink logit": replace(BASE, sink_logit="learned", output_gate=True),
    "prefix": replace(BASE, mask="prefix", prefix=3),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(replace(config, init_std=0.3)).eval()


def compiled_cases(step: DecodeStep) -> int:
    """How many pieces of machine code a step uses."""
    return len(step._ahead_of_time._ready)


def round_to_8_bits(model: Decoder) -> None:
    """Give the linear layers the weights that 8 bits stand for."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            packed = Int8Linear(module)
            weight = packed.weight[:, : packed.width] * packed.scale.float()[:, None]
            module.weight = torch.nn.Parameter(weight)


@torch.inference_mode()
def check_compiled_equals_eager(
    config: ModelConfig, fixed_shapes=False, rows=1, weights="full"
) -> None:
    """Every length from the shortest prompt to the last place, against one uncached pass."""
    model = build(config)
    tokens = torch.randint(config.vocab_size, (rows, config.context_length))
    step = DecodeStep(model, compiled=True, fixed_shapes=fixed_shapes, weights=weights)
    if weights == "int8":
        round_to_8_bits(model)
    uncached = model(tokens).logits
    for read in (max(config.prefix, 1), 7):
        cache = FullCache(config, batch=rows)
        model(tokens[:, :read], cache=cache)
        for place in range(read, config.context_length):
            logits = step(tokens[:, place : place + 1], cache)
            torch.testing.assert_close(logits, uncached[:, place], rtol=0, atol=1e-4)
    assert fixed_shapes or compiled_cases(step) == 1


def test_one_compilation_serves_every_length_and_equals_the_uncached_pass():
    check_compiled_equals_eager(CONFIGS["grouped"])


@pytest.mark.slow
@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_compiled_step_equals_the_uncached_pass_for(config, fixed_shapes):
    check_compiled_equals_eager(config, fixed_shapes)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 12, 33])
@pytest.mark.parametrize("name", ["grouped", "multi-head", "sink logit"])
def test_the_compiled_step_of_several_rows_equals_the_uncached_pass(name, rows):
    check_compiled_equals_eager(CONFIGS[name], rows=rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "multi-head"])
@pytest.mark.parametrize("rows", [1, 5])
def test_compiled_8_bits_of_few_rows_are_rounded_nowhere_else(name, rows):
    config = replace(CONFIGS[name], tie_embeddings=False)
    check_compiled_equals_eager(config, rows=rows, weights="int8")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_fixed_shapes_mean_the_same_as_views(config, monkeypatch):
    """The same functions as above, run as they are: what a GPU compiles is checked here too."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    check_compiled_equals_eager(config, fixed_shapes=True)


def test_a_compiled_generator_slides_as_the_eager_one_does_and_compiles_once():
    model = build(BASE)
    options = SamplingOptions(temperature=0, repetition_penalty=3.0)
    fast = Generator(model, at_limit="slide", compiled=True)
    slow = Generator(model, at_limit="slide", use_cache=False)
    for prompt in ([9], [1, 2, 3], [4, 5, 6, 7, 8]):
        request = {"max_new_tokens": 40, "options": options}
        expected = slow.generate(prompt, **request).run().tokens
        assert fast.generate(prompt, **request).run().tokens == expected
    assert compiled_cases(fast.step) == 1


def test_a_compiled_generator_streams_as_the_eager_one_does():
    """Far enough for the window to move through the memory and back to its front several times."""
    model = build(BASE)
    options = SamplingOptions(temperature=0, repetition_penalty=3.0)
    found = [
        Generator(model, at_limit="stream", compiled=compiled)
        .generate([1, 2, 3], max_new_tokens=100, options=options, num_samples=samples)
        .run()
        .tokens
        for samples in (1, 2)
        for compiled in (False, True)
    ]
    assert found[0] == found[1]
    assert found[2] == found[3] == [found[0][0]] * 2


@torch.inference_mode()
def test_one_step_serves_batches_and_memories_of_several_sizes_in_any_order():
    """Checks of the compiler are left out for cases that have passed them, and only for those."""
    model = build(BASE)
    step = DecodeStep(model, compiled=True)
    cases = [(1, 12, 3), (2, 12, 4), (1, 16, 5), (2, 12, 3), (1, 12, 6)]
    for batch, capacity, read in cases:
        tokens = torch.randint(31, (batch, capacity))
        uncached = model(tokens).logits
        cache = FullCache(BASE, batch=batch, capacity=capacity)
        model(tokens[:, :read], cache=cache)
        for place in range(read, capacity):
            logits = step(tokens[:, place : place + 1], cache)
            torch.testing.assert_close(logits, uncached[:, place], rtol=0, atol=1e-4)
    assert compiled_cases(step) == 3


@torch.inference_mode()
def test_tokens_may_be_laid_out_otherwise():
    model = build(BASE)
    step = DecodeStep(model, compiled=True)
    tokens = torch.randint(31, (2, 8))
    uncached = model(tokens).logits
    for column in (
        lambda t, at: t[:, at : at + 1],
        lambda t, at: t[:, at : at + 1].contiguous(),
        lambda t, at: t[:, at : at + 1].int(),
    ):
        cache = FullCache(BASE, batch=2)
        model(tokens[:, :4], cache=cache)
        for place in range(4, 8):
            logits = step(column(tokens, place), cache)
            torch.testing.assert_close(logits, uncached[:, place], rtol=0, atol=1e-4)
    assert compiled_cases(step) == 1


@torch.inference_mode()
def test_what_the_model_refuses_is_refused_when_called_directly_too():
    model = build(BASE)
    step = DecodeStep(model, compiled=True)
    cache = FullCache(BASE, capacity=24)
    token = torch.ones(1, 1, dtype=torch.int64)
    for _ in range(16):
        step(token, cache)
    with pytest.raises(ValueError, match=r"longer than model\.context_length=16"):
        step(token, cache)
    assert cache.length == 16


@torch.inference_mode()
def test_tokens_of_another_number_of_sequences_are_refused_before_anything_is_changed():
    step = DecodeStep(build(BASE), compiled=True)
    cache = FullCache(BASE, batch=2)
    for shape in ((1, 1), (3, 1), (2, 2)):
        with pytest.raises(ValueError, match=r"reads one token of each sequence .* \(2, 1\)"):
            step(torch.ones(shape, dtype=torch.int64), cache)
    assert cache.length == 0


@torch.inference_mode()
def test_who_stops_the_compiler_finds_the_cache_as_it_was(monkeypatch):
    def interrupted(self, case, tensors, example):
        raise KeyboardInterrupt

    monkeypatch.setattr(AheadOfTime, "for_case", interrupted)
    step, cache = DecodeStep(build(BASE), compiled=True), FullCache(BASE)
    with pytest.raises(KeyboardInterrupt):
        step(torch.ones(1, 1, dtype=torch.int64), cache)
    assert cache.length == 0


@torch.inference_mode()
def test_replaced_parameters_are_refused_instead_of_read_no_more():
    model = build(BASE)
    step = DecodeStep(model, compiled=True)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    with pytest.raises(ValueError, match=r"parameters were replaced .*: make a new Generator"):
        step(torch.ones(1, 1, dtype=torch.int64), FullCache(BASE))


@torch.inference_mode()
def test_what_to_call_is_looked_up_once_for_a_cache_with_equal_settings(monkeypatch):
    asked = []

    def for_case(self, case, tensors, example):
        asked.append(case)
        return partial(_views, self._module)

    monkeypatch.setattr(AheadOfTime, "for_case", for_case)
    model = build(BASE)
    step = DecodeStep(model, compiled=True)
    token = torch.ones(1, 1, dtype=torch.int64)
    first, second = FullCache(BASE), FullCache(BASE)
    for cache, threads, expected in [
        (first, 1, 1),
        (first, 1, 1),
        (first, 2, 2),
        (second, 2, 3),
        (first, 2, 4),
        (first, 1, 5),
    ]:
        torch.set_num_threads(threads)
        step(token, cache)
        assert len(asked) == expected
    assert len(set(asked)) == 2  # one for each number of threads


@pytest.mark.parametrize("weights", ["full", "int8"])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_autocast_reaches_replaced_layers(compiled, weights):
    model = build(replace(BASE, bias=True))
    generator = Generator(model, compiled=compiled, weights=weights)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        generation = generator.generate([1, 2, 3], max_new_tokens=6).run()
    assert len(generation.tokens[0]) == 6


def test_a_window_that_moves_is_read_by_views_whatever_the_shapes(monkeypatch):
    """Its memory holds places never written, and more of them than the model has positions."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    for config in (BASE, replace(BASE, position="alibi")):
        model = build(config)
        generator = Generator(model, at_limit="stream", compiled=True)
        generator.step = DecodeStep(model, compiled=True, fixed_shapes=True)
        options = SamplingOptions(temperature=0)
        request = {"max_new_tokens": 60, "options": options}
        expected = Generator(model, at_limit="stream").generate([1, 2], **request).run().tokens
        assert generator.generate([1, 2], **request).run().tokens == expected


@pytest.mark.slow
def test_a_context_of_two_tokens_streams_compiled():
    model = build(replace(BASE, context_length=2))
    options, request = SamplingOptions(temperature=0), {"max_new_tokens": 20}
    found = [
        Generator(model, at_limit="stream", compiled=compiled, cache=CacheOptions(sinks=1))
        .generate([1], options=options, **request)
        .run()
        .tokens
        for compiled in (False, True)
    ]
    assert found[0] == found[1]


def test_compiling_needs_the_cache():
    with pytest.raises(ValueError, match="use_cache=False"):
        Generator(build(BASE), use_cache=False, compiled=True)


class Adapted(torch.nn.Linear):
    """A linear layer with something added."""

    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize("make", [Int8Linear, RowsLinear])
def test_layers_that_compute_something_else_are_not_replaced(make):
    model = build(BASE)
    mlp = model.blocks[0].mlp
    hooked = torch.nn.Linear(32, 32)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    mlp.hooked, mlp.adapted, mlp.plain = hooked, Adapted(32, 32), torch.nn.Linear(32, 32)
    twin = with_linear_layers(model, make).blocks[0].mlp
    x = torch.randn(3, 32)
    assert torch.equal(twin.hooked(x), hooked(x))
    assert torch.equal(twin.adapted(x), mlp.adapted(x))
    assert isinstance(twin.plain, make)


# --- 8 bits ---------------------------------------------------------------------------------------


def test_a_model_in_8_bits_says_nearly_the_same_and_is_used_for_prompts_too():
    model = build(replace(BASE, init_std=0.02))
    tokens = torch.randint(31, (1, 12))
    step = DecodeStep(model, weights="int8")
    with torch.inference_mode():
        exact = model(tokens).logits
        near = step.model(tokens).logits
        cache = FullCache(model.config)
        step.model(tokens[:, :-1], cache=cache)
        last = step(tokens[:, -1:], cache)
    assert 0 < (near - exact).abs().max() < 0.05 * exact.abs().max()
    torch.testing.assert_close(last, near[:, -1], rtol=0.02, atol=0.02 * near.abs().max().item())
    generated = Generator(model, weights="int8").generate([1, 2, 3], max_new_tokens=5).run()
    assert len(generated.tokens[0]) == 5


@pytest.mark.parametrize("weights", ["int4", "full "])
def test_unknown_weights_are_refused(weights):
    with pytest.raises(ValueError, match="is not one of full, int8"):
        Generator(build(BASE), weights=weights)


def test_8_bits_on_another_device_are_refused():
    with pytest.raises(ValueError, match="on a CPU only, the model is on meta"):
        DecodeStep(build(BASE).to("meta"), weights="int8")
