"""Generation: cached equals uncached, limits, samples, and what is counted."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from model.config import ModelConfig
from model.decoder import Decoder
from model.generate import Generation, Generator
from model.kv_cache import FullCache
from model.sampling import SamplingOptions

GREEDY = SamplingOptions(temperature=0)
# Still without chance, but an untrained model no longer says one token over and over.
VARIED = SamplingOptions(temperature=0, repetition_penalty=3.0)
BASE = ModelConfig(vocab_size=31, context_length=24, n_layer=2, n_head=4, n_embd=32)
CONFIGS = {
    "rope": BASE,
    "untied": replace(BASE, tie_embeddings=False),
    "alibi": replace(BASE, position="alibi"),
    "learned": replace(BASE, position="learned"),
    "sinusoidal": replace(BASE, position="sinusoidal"),
    "no positions": replace(BASE, position="none"),
    "grouped": replace(BASE, n_kv_head=2),
    "multi-query": replace(BASE, n_kv_head=1, qk_norm=True, norm="layernorm", mlp="gelu"),
    "yarn": replace(BASE, rope_scaling="yarn", rope_scaling_factor=2.0),
    "windows": replace(BASE, windows=[5, 0], n_kv_head=2),
    "window with sinks": replace(BASE, windows=[4], window_sinks=2),
    "zero sink logit": replace(BASE, sink_logit="zero"),
    "learned sink logit": replace(BASE, sink_logit="learned", output_gate=True),
    "soft-cap": replace(BASE, softcap=5.0, bias=True, mlp="relu2"),
    "prefix": replace(BASE, mask="prefix", prefix=4),
}
EVERY_CONFIG = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing out their work, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(config: ModelConfig, seed: int = 0) -> Decoder:
    """A model with large weights, so that its tokens vary and logits react to every input."""
    torch.manual_seed(seed)
    model = Decoder(replace(config, init_std=0.3)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("sink_logit"):
            torch.nn.init.normal_(parameter)
    return model


def run(model: Decoder, prompt: list[int], n: int = 15, **options) -> Generation:
    settings = {
        name: options.pop(name)
        for name in ("use_cache", "at_limit", "cache", "prefill_chunk", "vocab_size")
        if name in options
    }
    options = {"options": GREEDY} | options
    return Generator(model, **settings).generate(prompt, max_new_tokens=n, **options).run()


def cached_logits(model: Decoder, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits (B, T, V), read in chunks of the given sizes."""
    cache = FullCache(model.config, batch=tokens.shape[0])
    return torch.cat([model(part, cache=cache).logits for part in tokens.split(chunks, 1)], dim=1)


def spy(model: Decoder) -> list[list[list[int]]]:
    """The tokens of every forward pass from now on."""
    read: list[list[list[int]]] = []
    forward = model.forward

    def recording(tokens: torch.Tensor, **options) -> object:
        read.append(tokens.tolist())
        return forward(tokens, **options)

    model.forward = recording  # type: ignore[method-assign]
    return read


# Cached equals uncached


@EVERY_CONFIG
def test_cached_logits_equal_uncached_at_every_position(config: ModelConfig) -> None:
    model = build(config)
    tokens = torch.randint(config.vocab_size, (2, config.context_length))
    with torch.no_grad():
        expected = model(tokens).logits
        for chunks in ([24], [4, 7, 13], [23, 1], [4, *[1] * 20]):
            torch.testing.assert_close(
                cached_logits(model, tokens, chunks), expected, atol=1e-4, rtol=0
            )


@EVERY_CONFIG
def test_greedy_tokens_are_those_of_the_uncached_path(config: ModelConfig) -> None:
    model, prompt = build(config), [3, 1, 4, 1, 5]
    for options in (GREEDY, VARIED):
        expected = run(model, prompt, options=options, use_cache=False).tokens
        for chunk in (None, 1, 2, 100):
            assert run(model, prompt, options=options, prefill_chunk=chunk).tokens == expected
    assert len(set(expected[0])) > 8


@EVERY_CONFIG
def test_a_sliding_cache_equals_sliding_without_one(config: ModelConfig) -> None:
    model, prompt = build(config), [3, 1, 4, 1, 5]
    how = {"options": VARIED, "at_limit": "slide"}
    cached = run(model, prompt, 60, prefill_chunk=5, **how)
    assert cached.tokens == run(model, prompt, 60, use_cache=False, **how).tokens
    assert cached.ends == ["length"]
    assert len(cached.tokens[0]) == 60


def test_the_uncached_path_is_the_plain_model() -> None:
    model, text = build(BASE), [3, 1, 4]
    for token in run(model, list(text), use_cache=False).tokens[0]:
        assert token == model(torch.tensor([text])).logits[0, -1].argmax()
        text.append(token)


def test_sliding_drops_the_older_half_of_a_full_context() -> None:
    model, prompt = build(BASE), list(range(10))
    read = spy(model)
    tokens = run(model, prompt, 40, options=VARIED, at_limit="slide", use_cache=False).tokens[0]
    view = list(prompt)
    for seen, token in zip(read, tokens, strict=True):
        assert seen == [view]
        view = [*(view[12:] if len(view) == 24 else view), token]


def test_with_the_cache_no_token_is_read_twice() -> None:
    model = build(BASE)
    read = spy(model)
    tokens = run(model, [1, 2, 3], 6, num_samples=2, options=SamplingOptions()).tokens
    assert read[0] == [[1, 2, 3]]  # once for both samples
    assert read[1:] == [[[first], [second]] for first, second in zip(*tokens, strict=True)][:-1]


def test_a_sliding_cache_reads_the_kept_half_again() -> None:
    model = build(BASE)
    read = spy(model)
    run(model, [1] * 20, 30, at_limit="slide")
    assert [len(rows[0]) for rows in read] == [20, *[1] * 4, 13, *[1] * 11, 13, *[1] * 11, 13]


@pytest.mark.parametrize("length", [24, 25, 30, 36, 37, 60])
def test_a_long_prompt_slides_like_generated_text(length: int) -> None:
    model = build(BASE)
    whole = [2] + run(model, [2], 80, at_limit="slide").tokens[0]
    again = run(model, whole[:length], 81 - length, at_limit="slide").tokens[0]
    assert again == whole[length:]


def test_a_context_of_one_token_slides() -> None:
    model = build(replace(BASE, context_length=1))
    for use_cache in (True, False):
        assert len(run(model, [1], 5, at_limit="slide", use_cache=use_cache).tokens[0]) == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_work(dtype: torch.dtype) -> None:
    model = build(replace(BASE, n_kv_head=2)).to(dtype)
    assert len(run(model, [1, 2], options=SamplingOptions()).tokens[0]) == 15
    if dtype == torch.float64:
        assert run(model, [1, 2]).tokens == run(model, [1, 2], use_cache=False).tokens


def test_under_autocast_the_cache_has_its_type() -> None:
    model = build(BASE)
    with torch.autocast("cpu", torch.bfloat16):
        assert len(run(model, [1, 2]).tokens[0]) == 15


# The limit of the context


def test_stop_produces_all_that_the_context_allows() -> None:
    model = build(BASE)
    for use_cache in (True, False):
        generation = run(model, [1] * 20, 100, use_cache=use_cache)
        assert len(generation.tokens[0]) == 24 - 20 + 1
        assert generation.ends == ["context"]
    assert len(run(model, [1] * 24, 100).tokens[0]) == 1


def test_error_is_raised_before_the_first_token() -> None:
    model = build(BASE)
    generator = Generator(model, at_limit="error")
    assert len(generator.generate([1] * 20, max_new_tokens=5).run().tokens[0]) == 5
    with pytest.raises(
        ValueError, match=r"=6 does not fit: after a prompt of 20 .* of 24 has room for 5$"
    ):
        generator.generate([1] * 20, max_new_tokens=6)


# Counting


def test_max_new_tokens_counts_new_tokens_only() -> None:
    generation = run(build(BASE), [1] * 10, 7)
    assert len(generation.tokens[0]) == 7
    assert generation.ends == ["length"]


def test_the_report_counts_what_was_produced(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(clock)))
    report = run(build(BASE), [1, 2, 3], 6, num_samples=2).report
    assert (report.prompt_tokens, report.produced_tokens, report.decoded_tokens) == (3, 12, 10)
    assert (report.prefill_seconds, report.decode_seconds) == (1.0, 5.0)
    assert (report.prefill_tokens_per_s, report.decode_tokens_per_s) == (3.0, 2.0)
    assert (
        str(report) == "read 3 tokens in 1.000 s (3 tokens/s), produced 12 in 5.000 s (2 tokens/s)"
    )


def test_an_early_end_is_not_counted_as_produced() -> None:
    model = build(BASE)
    tokens = run(model, [1, 2, 3]).tokens[0]
    generation = run(model, [1, 2, 3], eos_id=tokens[4])
    assert generation.tokens[0] == tokens[: tokens.index(tokens[4])]
    assert generation.report.produced_tokens == len(generation.tokens[0])
    assert generation.ends == ["eos"]


def test_a_single_token_has_no_decode_speed() -> None:
    report = run(build(BASE), [1], 1).report
    assert report.decode_tokens_per_s is None
    assert str(report).endswith("produced 1")


def test_time_spent_by_the_reader_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    generation = Generator(build(BASE)).generate([1], max_new_tokens=5)
    for _ in generation:
        now[0] += 100.0
    assert generation.report.prefill_seconds == generation.report.decode_seconds == 0.0


# Several samples


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("at_limit", ["stop", "slide"])
def test_a_sample_is_the_same_alone_or_beside_others(use_cache: bool, at_limit: str) -> None:
    model = build(BASE).double()  # sums in another order must not tip a draw
    how = {"options": SamplingOptions(), "use_cache": use_cache, "at_limit": at_limit}
    together = run(model, [1, 2], 40, num_samples=4, seed=7, **how).tokens
    alone = [run(model, [1, 2], 40, seed=7 + i, **how).tokens[0] for i in range(4)]
    assert together == alone


def test_samples_differ_from_their_first_token_on() -> None:
    options = SamplingOptions(temperature=100.0)
    tokens = run(build(BASE), [1], 3, num_samples=8, options=options).tokens
    assert len({sample[0] for sample in tokens}) > 4


def test_one_sample_ends_and_the_others_go_on() -> None:
    model = build(BASE)
    options = {"num_samples": 3, "options": SamplingOptions(temperature=2.0), "seed": 1}
    full = run(model, [1], 20, **options).tokens
    eos = full[0][2]
    ended = run(model, [1], 20, eos_id=eos, **options)
    for sample, end, whole in zip(ended.tokens, ended.ends, full, strict=True):
        assert sample == (whole[: whole.index(eos)] if eos in whole else whole)
        assert end == ("eos" if eos in whole else "length")
    assert len(ended.tokens[0]) < 3
    produced = sum(map(len, ended.tokens))
    assert ended.report.produced_tokens == produced
    assert ended.report.decoded_tokens == produced - sum(map(bool, ended.tokens))


def test_a_sample_can_be_stopped_from_outside() -> None:
    generation = Generator(build(BASE)).generate([1], max_new_tokens=6, num_samples=2)
    for step in generation:
        assert len(step) == len({sample for sample, _ in step})
        if len(generation.tokens[0]) == 2:
            generation.stop(0)
            generation.stop(0)
    assert [len(tokens) for tokens in generation.tokens] == [2, 6]
    assert generation.ends == ["stopped", "length"]


# Log-probabilities, bias, penalties


def test_log_probabilities_are_those_of_the_plain_model() -> None:
    model, prompt = build(BASE), [3, 1, 4]
    options = SamplingOptions(temperature=2.0, top_k=9, frequency_penalty=1.0, logit_bias={5: 2.0})
    how = {"options": options, "num_samples": 2, "vocab_size": 29}
    generation = run(model, prompt, 8, logprobs=3, **how)
    for tokens, logprobs in zip(generation.tokens, generation.logprobs, strict=True):
        logits = model(torch.tensor([prompt + tokens])).logits[0, 2:-1, :29]
        expected = logits.log_softmax(-1)
        assert len(logprobs) == len(tokens) == 8
        for row, token, entry in zip(expected, tokens, logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
    assert run(model, prompt, 8, **how).tokens == generation.tokens
    assert run(model, prompt, 8, **how).logprobs == [[], []]


def test_log_probabilities_end_with_the_text() -> None:
    model = build(BASE)
    tokens = run(model, [1, 2, 3]).tokens[0]
    generation = run(model, [1, 2, 3], eos_id=tokens[4], logprobs=0)
    assert len(generation.logprobs[0]) == len(generation.tokens[0]) == tokens.index(tokens[4])


def test_with_every_option_a_sample_is_the_same_alone_or_beside_others() -> None:
    model = build(BASE).double()
    options = SamplingOptions(
        top_k=20,
        top_p=0.95,
        min_p=0.001,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={3: 1.0, 4: -2.0},
    )
    together = run(model, [1, 2], 15, num_samples=3, seed=7, options=options, logprobs=2)
    for i in range(3):
        alone = run(model, [1, 2], 15, seed=7 + i, options=options, logprobs=2)
        assert alone.tokens[0] == together.tokens[i]
        for one, other in zip(alone.logprobs[0], together.logprobs[i], strict=True):
            assert one.logprob == pytest.approx(other.logprob)


def test_a_presence_penalty_leaves_the_prompt_alone_and_forbids_what_was_produced() -> None:
    model = build(BASE)
    first = run(model, [3, 1, 4], 1).tokens[0][0]
    options = SamplingOptions(temperature=0, presence_penalty=1e4)
    tokens = run(model, [3, 1, 4, first], 15, options=options).tokens[0]
    assert len(set(tokens)) == 15
    allowed = run(
        model, [first], 15, options=SamplingOptions(temperature=0, logit_bias={first: 99})
    )
    assert set(allowed.tokens[0]) == {first}


# Nothing leaks


def test_a_call_leaves_nothing_behind_for_the_next() -> None:
    model = build(BASE)
    fresh = run(model, [4, 2]).tokens
    generator = Generator(model)
    generator.generate([9] * 12, max_new_tokens=9, options=GREEDY).run()
    abandoned = generator.generate([5, 6], max_new_tokens=9, options=GREEDY)
    next(abandoned)
    assert generator.generate([4, 2], max_new_tokens=15, options=GREEDY).run().tokens == fresh
    assert len(abandoned.run().tokens[0]) == 9


def test_the_global_random_state_and_gradients_are_left_alone() -> None:
    model = build(BASE)
    before = torch.get_rng_state()
    run(model, [1], options=SamplingOptions())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


# What may be drawn


def test_ids_that_pad_the_vocabulary_are_never_drawn() -> None:
    model = build(BASE)
    with torch.no_grad():
        model.lm_head.weight[20:] += 3 * model.lm_head.weight[:11]
    options = SamplingOptions(temperature=5.0)
    loose = run(model, [1], 20, num_samples=4, options=options).tokens
    assert max(map(max, loose)) >= 20
    strict = run(model, [1], 20, num_samples=4, options=options, vocab_size=20).tokens
    assert max(map(max, strict)) < 20


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_strong_repetition_penalty_forbids_tokens_of_prompt_and_text(use_cache: bool) -> None:
    options = SamplingOptions(temperature=0, repetition_penalty=1e6)
    prompt = [1, 2, 3]
    with_bias = build(replace(BASE, vocab_size=40))
    tokens = run(with_bias, prompt, 12, options=options, use_cache=use_cache).tokens[0]
    assert len(set(prompt + tokens)) == 15


# Requests that cannot be met


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"at_limit": "wrap"}, "at_limit='wrap' is not one of stop, slide, error"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"vocab_size": 32}, "the tokenizer has 32 ids, the model has 31"),
    ],
)
def test_settings_that_cannot_work_are_one_line(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Generator(build(BASE), **settings)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1, 31], {}, "the prompt holds the id 31, the model knows 0 to 30"),
        ([-1], {}, "the id -1"),
        ([1] * 25, {}, "the prompt has 25 tokens, the context holds 24; shorten"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ([1], {"num_samples": 0}, "num_samples=0 must be at least 1"),
        ([1], {"num_samples": 10**12}, "num_samples=1000000000000 of 5 tokens needs .* GiB"),
        ([1], {"seed": -1}, "seed=-1 must be"),
        ([1], {"seed": 2**63}, "seed=9223372036854775808 must be"),
        ([1], {"logprobs": -1}, "logprobs=-1 must be from 0 to the number of ids, 31"),
        ([1], {"logprobs": 32}, "logprobs=32 must be"),
        ([1], {"options": SamplingOptions(logit_bias={31: 1.0})}, "logit_bias names the id 31"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(prompt, options, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        Generator(build(BASE)).generate(prompt, **({"max_new_tokens": 5} | options))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "new", "held"),
    [({}, 5, 5), ({"at_limit": "slide"}, 5, 24), ({"at_limit": "stream"}, 50, 48)],
)
def test_memory_is_counted_as_it_will_be_held(settings: dict, new: int, held: int) -> None:
    generator = Generator(build(BASE), **settings)
    with pytest.raises(ValueError, match=f"num_samples=1000000000000 of {held} tokens needs"):
        generator.generate([1], max_new_tokens=new, num_samples=10**12)


def test_models_that_cannot_generate_are_refused() -> None:
    with pytest.raises(ValueError, match="mask=bidirectional"):
        Generator(build(replace(BASE, mask="bidirectional")))
    prefix = build(replace(BASE, mask="prefix", prefix=14))
    with pytest.raises(ValueError, match=r"the prompt has 5 tokens, fewer than model.prefix=14"):
        Generator(prefix).generate([1] * 5, max_new_tokens=1)
    with pytest.raises(ValueError, match=r"slide goes on with 13 tokens, fewer than .*prefix=14"):
        Generator(prefix, at_limit="slide")
    with pytest.raises(ValueError, match=r"call model.eval\(\)"):
        Generator(build(BASE).train()).generate([1], max_new_tokens=1)
