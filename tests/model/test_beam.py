"""Beam search against every text there is, and against a slow search written down plainly."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from model.beam import Beam, beam_search, score_of
from model.caches import CacheOptions
from model.decoder import Decoder
from model.generate import Generator
from model.sampling import SamplingOptions
from tests.model.tiny import tiny_model

SHAPES = {
    "grouped": {},
    "multi-query with windows": {"n_kv_head": 1, "windows": [3, 0]},
    "window with sinks": {"windows": [3], "window_sinks": 2},
    "alibi": {"position": "alibi"},
    "learned positions": {"position": "learned"},
    "prefix": {"mask": "prefix", "prefix": 3},
}
PROMPT = [2, 0, 1]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing out their work, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def log_p(model: Decoder, texts: list[list[int]], known: int | None = None) -> torch.Tensor:
    """Log-probabilities (len(texts), V) of the token after each text, without a cache."""
    with torch.no_grad():
        logits = model(torch.tensor(texts)).logits[:, -1, :known]
    return logits.double().log_softmax(-1)


def every_text(model: Decoder, eos_id: int | None, length: int) -> dict[tuple[int, ...], float]:
    """Log-probability of each text that ends with the end token or has `length` tokens."""
    texts: dict[tuple[int, ...], float] = {}
    going = {(): 0.0}
    for _ in range(length):
        continued = {}
        rows = log_p(model, [PROMPT + list(text) for text in going]).tolist()
        for (text, before), row in zip(going.items(), rows, strict=True):
            for token, value in enumerate(row):
                (texts if token == eos_id else continued)[*text, token] = before + value
        going = continued
    return texts | going


def plain_search(
    model: Decoder, width: int, length: int, *, eos_id: int | None, known: int
) -> list[tuple[list[int], float]]:
    """The search as its definition says, one text at a time: (tokens, log-probability)."""
    ended: list[tuple[list[int], float]] = []
    going: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(length):
        candidates = [
            ([*text, token], before + value)
            for text, before in going
            for token, value in enumerate(log_p(model, [PROMPT + text], known)[0].tolist())
        ]
        candidates.sort(key=lambda candidate: -candidate[1])
        best = candidates[: width - len(ended)]
        ended += [candidate for candidate in best if candidate[0][-1] == eos_id]
        going = [candidate for candidate in best if candidate[0][-1] != eos_id]
    return ended + going


def texts_of(beams: list[Beam], eos_id: int | None) -> list[tuple[int, ...]]:
    """Tokens of each beam, with the end token where it came."""
    return [(*beam.tokens, *([eos_id] if beam.end == "eos" else [])) for beam in beams]


@pytest.mark.parametrize("eos_id", [None, 0])
@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0])
def test_with_room_for_every_text_the_search_is_exact(
    eos_id: int | None, length_penalty: float
) -> None:
    model = tiny_model(vocab_size=3)
    expected = every_text(model, eos_id, 4)
    beams = beam_search(
        Generator(model),
        PROMPT,
        num_beams=3**4,
        max_new_tokens=4,
        length_penalty=length_penalty,
        eos_id=eos_id,
    )
    found = texts_of(beams, eos_id)
    assert len(found) == len(expected) == (81 if eos_id is None else 31)
    assert set(found) == set(expected)
    for text, beam in zip(found, beams, strict=True):
        assert beam.logprob == pytest.approx(expected[text], abs=1e-4)
        assert beam.score == pytest.approx(expected[text] / len(text) ** length_penalty, abs=1e-4)
    assert [beam.score for beam in beams] == sorted((beam.score for beam in beams), reverse=True)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_cached_and_uncached_are_the_search_written_down_plainly(shape: dict) -> None:
    model = tiny_model(**shape).double()
    for eos_id, width in itertools.product((None, 5), (2, 5)):
        expected = plain_search(model, width, 6, eos_id=eos_id, known=13)
        expected.sort(key=lambda text: -score_of(text[1], len(text[0]), 1.0))
        for use_cache in (True, False):
            generator = Generator(model, use_cache=use_cache, vocab_size=13, prefill_chunk=3)
            how = {"num_beams": width, "max_new_tokens": 6, "eos_id": eos_id}
            beams = beam_search(generator, PROMPT, **how)
            assert texts_of(beams, eos_id) == [tuple(text) for text, _ in expected]
            assert [beam.logprob for beam in beams] == pytest.approx([p for _, p in expected])


def test_some_of_those_searches_end_early() -> None:
    ends = set()
    for eos_id in range(13):
        beams = beam_search(
            Generator(tiny_model()), PROMPT, num_beams=5, max_new_tokens=6, eos_id=eos_id
        )
        assert len(beams) == 5
        ends |= {beam.end for beam in beams}
    assert ends == {"eos", "length"}


@pytest.mark.parametrize("eos_id", [None, 3, 7, 11])
def test_one_beam_is_greedy(eos_id: int | None) -> None:
    generator = Generator(tiny_model())
    greedy = generator.generate(
        PROMPT, max_new_tokens=20, options=SamplingOptions(temperature=0), eos_id=eos_id
    ).run()
    (beam,) = beam_search(generator, PROMPT, num_beams=1, max_new_tokens=20, eos_id=eos_id)
    assert beam.tokens == greedy.tokens[0]
    assert beam.end == greedy.ends[0]


def test_with_the_cache_no_token_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads = tiny_model(), []
    forward = model.forward

    def recording(tokens: torch.Tensor, **options) -> object:
        reads.append(tuple(tokens.shape))
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", recording)
    beam_search(Generator(model), PROMPT, num_beams=4, max_new_tokens=5)
    assert reads == [(1, 3), *[(4, 1)] * 4]


def test_the_search_ends_with_the_context() -> None:
    model = tiny_model(context_length=8)
    for use_cache in (True, False):
        generator = Generator(model, use_cache=use_cache)
        beams = beam_search(generator, PROMPT, num_beams=3, max_new_tokens=50)
        assert {len(beam.tokens) for beam in beams} == {8 - 3 + 1}
        assert {beam.end for beam in beams} == {"context"}


def test_a_huge_length_penalty_is_a_number() -> None:
    assert score_of(-3.0, 1, 1e300) == -3.0
    assert score_of(-3.0, 2, 1e300) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams=0 must be at least 1"),
        ({"length_penalty": -0.5}, "length_penalty=-0.5 must be 0"),
        ({"length_penalty": float("nan")}, "length_penalty=nan"),
        ({"length_penalty": float("inf")}, "length_penalty=inf"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
    ],
)
def test_a_search_that_cannot_work_is_one_line(options: dict, message: str) -> None:
    options = {"num_beams": 2, "max_new_tokens": 3} | options
    with pytest.raises(ValueError, match=message) as error:
        beam_search(Generator(tiny_model()), PROMPT, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [
        ({"at_limit": "slide"}, "at_limit=slide"),
        ({"at_limit": "stream"}, "at_limit=stream"),
        ({"cache": CacheOptions(kind="int8")}, "cache=int8"),
        ({"cache": CacheOptions(kind="int4")}, "cache=int4"),
    ],
)
def test_a_generator_that_lets_go_of_tokens_is_refused(settings: dict, refused: str) -> None:
    generator = Generator(tiny_model(), **settings)
    with pytest.raises(ValueError, match=f"{refused} does not go with beam search; choose"):
        beam_search(generator, PROMPT, num_beams=2, max_new_tokens=3)
