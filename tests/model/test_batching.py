"""Batches of requests: each gets what it would get alone, and memory comes back."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from model.batching import ContinuousBatch, Handle, Request, generate_batch
from model.caches import CacheOptions
from model.decoder import Decoder
from model.generate import Generation, Generator
from model.sampling import SamplingOptions
from tests.model.tiny import OPTIONS, tiny_model, tiny_tokens

# Options that change what a batch has to do; the paged cache is tested with all of them.
CHOSEN = ("plain", "multi_query", "alibi", "learned", "windows", "window_sinks", "prefix")
CHANGES = {name: OPTIONS[name] for name in (*CHOSEN, "all_at_once", "all_with_alibi")}
# Without chance, but an untrained model no longer says one token over and over.
VARIED = SamplingOptions(temperature=0, repetition_penalty=3.0)
WAYS = [
    SamplingOptions(temperature=0),
    VARIED,
    SamplingOptions(),
    SamplingOptions(temperature=2.0, top_k=5),
    SamplingOptions(top_p=0.8, min_p=0.05, repetition_penalty=1.5),
    SamplingOptions(temperature=0, presence_penalty=2.0, logit_bias={3: 1.5, 0: -9.0}),
    SamplingOptions(temperature=1.5, frequency_penalty=0.7, typical_p=0.9),
    SamplingOptions(frequency_penalty=-0.7, repetition_penalty=2.0, logit_bias={5: 2.0}),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing out their work, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return tiny_model()


def text(length: int, seed: int = 1) -> list[int]:
    return tiny_tokens(1, length, seed=seed)[0].tolist()


def alone(model: Decoder, request: Request, **settings: Any) -> Generation:
    """The oracle: a call of its own."""
    return (
        Generator(model, **settings)
        .generate(
            request.prompt,
            max_new_tokens=request.max_new_tokens,
            options=request.options,
            seed=request.seed,
            eos_id=request.eos_id,
            logprobs=request.logprobs,
        )
        .run()
    )


def finish(batch: ContinuousBatch) -> list[Handle]:
    """Run a batch to its end; the handles in the order in which they ended."""
    ended = []
    while batch.running or batch.waiting:
        ended += batch.step().ended
    return ended


def same_as_alone(model: Decoder, handles: list[Handle], **settings: Any) -> None:
    for handle in handles:
        expected = alone(model, handle.request, **settings)
        assert handle.tokens == expected.tokens[0]
        assert handle.end == expected.ends[0]
        for got, wanted in zip(handle.logprobs, expected.logprobs[0], strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [value for _, value in got.top] == pytest.approx(
                [value for _, value in wanted.top], abs=1e-4
            )


# Equal to single calls


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_prompts_of_different_length_get_what_they_get_alone(changes: dict[str, Any]) -> None:
    model = tiny_model(**changes)
    batch = ContinuousBatch(model, max_batch=4, block_size=4)
    handles = [
        batch.submit(
            Request(
                prompt=text(max(length, model.config.prefix), seed=length),
                max_new_tokens=7,
                options=options,
                seed=length,
            )
        )
        for length, options in zip((7, 1, 19, 30, 4), WAYS, strict=False)
    ]
    finish(batch)
    same_as_alone(model, handles)
    assert [len(handle.tokens) for handle in handles] == [7, 7, 7, 3, 7]
    assert batch.free_blocks == batch.blocks


def test_requests_that_come_and_go_at_any_time(model: Decoder) -> None:
    dice = random.Random(7)
    batch = ContinuousBatch(model, max_batch=3, cache_tokens=70, block_size=5, prefill_chunk=4)
    handles: list[Handle] = []
    ended: list[Handle] = []
    produced: dict[Handle, list[int]] = {}
    for _ in range(110):
        if len(handles) < 24 and dice.random() < 0.4:
            request = Request(
                prompt=text(dice.randint(1, 32), seed=dice.randint(1, 3)),
                max_new_tokens=dice.randint(1, 20),
                options=dice.choice(WAYS),
                seed=dice.randint(0, 3),
                eos_id=dice.choice([None, 5]),
                logprobs=dice.choice([None, 0, 3]),
            )
            handles.append(batch.submit(request))
        if handles and dice.random() < 0.05:
            batch.cancel(dice.choice(handles))
        step = batch.step()
        assert batch.running <= 3
        assert 0 <= batch.free_blocks <= batch.blocks == 14
        ended += step.ended
        for handle, token in step.tokens:
            produced.setdefault(handle, []).append(token)
    ended += finish(batch)
    assert batch.free_blocks == batch.blocks
    cancelled = [handle for handle in handles if handle.end == "stopped"]
    assert len(handles) == 24
    assert 0 < len(cancelled) < 10
    assert sorted(map(id, ended + cancelled)) == sorted(map(id, handles))
    same_as_alone(model, ended)
    assert {handle.end for handle in ended} == {"length", "eos", "context"}
    for handle, tokens in produced.items():
        assert handle.tokens[: len(tokens)] == tokens


def test_one_call_for_many_prompts(model: Decoder) -> None:
    prompts = [text(length, seed=length) for length in (9, 2, 31, 9, 1, 16)]
    how = {"max_new_tokens": 8, "options": WAYS[3], "eos_id": 5}
    for chunk in (None, 3):
        generator = Generator(model, vocab_size=15, prefill_chunk=chunk)
        handles = generate_batch(generator, prompts, seed=4, max_batch=4, **how)
        for i, handle in enumerate(handles):
            expected = generator.generate(prompts[i], seed=4 + i, **how).run()
            assert (handle.tokens, handle.end) == (expected.tokens[0], expected.ends[0])
            assert max(handle.tokens, default=0) < 15
    assert generate_batch(generator, [], max_new_tokens=3) == []


def test_padded_ids_are_never_drawn(model: Decoder) -> None:
    batch = ContinuousBatch(model, vocab_size=3)
    options = SamplingOptions(temperature=50)
    prompts = [text(3), text(5)]
    handles = [
        batch.submit(Request(prompt=prompt, max_new_tokens=25, options=options))
        for prompt in prompts
    ]
    finish(batch)
    assert {token for handle in handles for token in handle.tokens} == {0, 1, 2}


# Room


def test_a_request_waits_until_there_is_room_for_all_it_may_need(model: Decoder) -> None:
    batch = ContinuousBatch(model, max_batch=8, cache_tokens=40, block_size=4)
    long = batch.submit(Request(prompt=text(10), max_new_tokens=15, options=VARIED))  # 24 tokens
    wide = batch.submit(Request(prompt=text(15, 2), max_new_tokens=4, options=VARIED))  # 18
    short = batch.submit(Request(prompt=text(3, 3), max_new_tokens=2, options=VARIED))  # 4
    batch.step()
    assert (batch.running, batch.waiting) == (1, 2)  # nobody overtakes
    assert batch.free_blocks == 10 - 6
    ended = finish(batch)
    assert ended[0] is long
    same_as_alone(model, [long, wide, short])


def test_what_can_never_fit_is_refused_at_once(model: Decoder) -> None:
    batch = ContinuousBatch(model, cache_tokens=19, block_size=4)
    batch.submit(Request(prompt=text(10), max_new_tokens=7))
    with pytest.raises(ValueError, match="needs room for 17, the cache holds 16"):
        batch.submit(Request(prompt=text(10), max_new_tokens=8))
    assert batch.waiting == 1


def test_equal_prompts_are_read_once_and_share_their_full_blocks() -> None:
    model = tiny_model()
    read = []
    forward = model.forward

    def recording(tokens: torch.Tensor, **options: Any) -> object:
        read.append(tuple(tokens.shape))
        return forward(tokens, **options)

    model.forward = recording  # type: ignore[method-assign]
    batch = ContinuousBatch(model, max_batch=4, block_size=4)
    prompt = text(10)
    handles = [
        batch.submit(Request(prompt=prompt, max_new_tokens=6 - i, options=WAYS[2], seed=i))
        for i in range(4)
    ]
    batch.step()
    assert read == [(1, 10)]
    assert batch.blocks - batch.free_blocks == 4 + 2 + 2 + 1
    finish(batch)
    del model.forward
    same_as_alone(model, handles)
    assert batch.free_blocks == batch.blocks


def test_memory_in_bytes(model: Decoder) -> None:
    config = model.config
    per_token = config.n_layer * 2 * config.kv_heads * config.head_size * 4
    assert ContinuousBatch(model, cache_tokens=50, block_size=8).cache_nbytes == 48 * per_token
    # By default every row has room for a whole context, in whole blocks.
    batch = ContinuousBatch(model, max_batch=3, block_size=10)
    assert batch.cache_nbytes == 3 * 40 * per_token


# Ends


def test_why_a_request_ends(model: Decoder) -> None:
    eos = alone(model, Request(prompt=text(4), max_new_tokens=3, options=VARIED)).tokens[0][2]
    batch = ContinuousBatch(model)
    requests = {
        "length": Request(prompt=text(4), max_new_tokens=1, options=VARIED),
        "eos": Request(prompt=text(4), max_new_tokens=9, options=VARIED, eos_id=eos),
        "context": Request(prompt=text(32), max_new_tokens=9, options=VARIED),
    }
    handles = {end: batch.submit(request) for end, request in requests.items()}
    finish(batch)
    for end, handle in handles.items():
        assert handle.end == end
    assert [len(handle.tokens) for handle in handles.values()] == [1, 2, 1]


def test_cancelling_frees_memory_at_once(model: Decoder) -> None:
    batch = ContinuousBatch(model, max_batch=2)
    requests = [Request(prompt=text(4, i), max_new_tokens=9, options=VARIED) for i in range(3)]
    first, second, third = map(batch.submit, requests)
    batch.step()
    batch.step()
    free = batch.free_blocks
    batch.cancel(first)
    assert batch.free_blocks == free + 1
    batch.cancel(third)
    assert (batch.running, batch.waiting) == (1, 0)
    assert (first.end, third.end) == ("stopped", "stopped")
    assert len(first.tokens) == 2
    assert finish(batch) == [second]
    batch.cancel(second)
    assert second.end == "length"
    same_as_alone(model, [second])
    assert batch.free_blocks == batch.blocks


def test_a_failing_model_leaves_a_batch_that_can_be_emptied() -> None:
    model = tiny_model()
    batch = ContinuousBatch(model)

    def failing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    good = batch._forward
    first = batch.submit(Request(prompt=text(4), max_new_tokens=9))
    batch.step()
    batch._forward = failing
    second = batch.submit(Request(prompt=text(5), max_new_tokens=9))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            batch.step()
    batch.cancel(first)
    with pytest.raises(RuntimeError, match="out of memory"):
        batch.step()
    batch.cancel(second)
    assert batch.free_blocks == batch.blocks
    batch._forward = good
    third = batch.submit(Request(prompt=text(5), max_new_tokens=9, options=VARIED))
    finish(batch)
    same_as_alone(model, [third])


# Errors


def test_bad_requests_are_one_line_and_change_nothing(model: Decoder) -> None:
    batch = ContinuousBatch(model, at_limit="error")
    for request, message in (
        (Request(prompt=[], max_new_tokens=1), "the prompt is empty"),
        (Request(prompt=[1, 17], max_new_tokens=1), "the id 17, the model knows 0 to 16"),
        (
            Request(prompt=text(33), max_new_tokens=1),
            "has 33 tokens, the context holds 32; shorten it",
        ),
        (Request(prompt=[1], max_new_tokens=0), "max_new_tokens=0 must be at least 1"),
        (Request(prompt=[1], max_new_tokens=33), "has room for 32"),
        (Request(prompt=[1], max_new_tokens=1, seed=-1), "seed=-1 must be"),
        (Request(prompt=[1], max_new_tokens=1, logprobs=18), "logprobs=18 must be from 0 to"),
        (
            Request(prompt=[1], max_new_tokens=1, options=SamplingOptions(logit_bias={17: 1})),
            "logit_bias names the id 17, tokens have ids from 0 to 16",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            batch.submit(request)
        assert "\n" not in str(error.value)
    assert batch.waiting == 0
    assert batch.step() == ([], [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch": 0}, "max_batch=0 must be at least 1"),
        ({"block_size": 0}, "block_size=0 must be at least 1"),
        ({"max_batch": 10**12}, r"\(max_batch=1000000000000\) needs .* GiB for keys and values"),
        ({"cache_tokens": 10**13}, "cache_tokens=10000000000000 .* GiB"),
        ({"cache_tokens": 15}, "cache_tokens=15 must hold at least a block of 16"),
        ({"at_limit": "slide"}, "at_limit=slide is for one prompt at a time"),
        ({"at_limit": "wrap"}, "at_limit='wrap' is not one of"),
        ({"prefill_chunk": 0}, "prefill_chunk=0 must be at least 1"),
        ({"vocab_size": 18}, "the tokenizer has 18 ids, the model has 17"),
    ],
)
def test_bad_options_are_one_line(model: Decoder, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ContinuousBatch(model, **options)


def test_a_batch_needs_the_cache(model: Decoder) -> None:
    with pytest.raises(ValueError, match="a batch needs the cache"):
        generate_batch(Generator(model, use_cache=False), [[1]], max_new_tokens=1)
    for kind in ("int8", "int4"):
        with pytest.raises(ValueError, match=f"not cache={kind}"):
            generate_batch(Generator(model, cache=CacheOptions(kind=kind)), [[1]], max_new_tokens=1)


def test_a_batch_has_the_weights_of_the_generator(model: Decoder) -> None:
    generator = Generator(model, weights="int8")
    generator.step.model.lm_head.weight.neg_()  # so that the difference is one of tokens
    how = {"max_new_tokens": 20, "options": VARIED}
    prompts = [text(9), text(4)]
    for prompt, handle in zip(prompts, generate_batch(generator, prompts, **how), strict=True):
        assert handle.tokens == generator.generate(prompt, **how).run().tokens[0]
        assert handle.tokens != Generator(model).generate(prompt, **how).run().tokens[0]
