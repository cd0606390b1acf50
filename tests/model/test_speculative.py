"""Speculative decoding loses nothing: the same greedy tokens, exactly the same distribution."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import model.speculative as speculative
from model.caches import CacheOptions
from model.decoder import Decoder
from model.drafts import LookUp, look_up
from model.generate import Generator
from model.sampling import SamplingOptions, distribution
from model.speculative import SpeculativeGeneration, keep_or_correct, speculate
from model.text_stream import collect_texts
from tests.model.tiny import tiny_model

GREEDY = SamplingOptions(temperature=0)
# Still without chance, but an untrained model no longer says one token over and over.
VARIED = SamplingOptions(temperature=0, repetition_penalty=1.5, frequency_penalty=0.5)
SHAPES = {
    "grouped": {},
    "multi-query with windows": {"n_kv_head": 1, "windows": [3, 0]},
    "window with sinks": {"windows": [4], "window_sinks": 2},
    "alibi": {"position": "alibi"},
    "learned positions": {"position": "learned"},
    "prefix": {"mask": "prefix", "prefix": 5},
}
PROMPT = [3, 1, 4, 1, 3]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing out their work, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def another_model(**changes) -> Decoder:
    """A smaller model with the same ids, and nothing else in common with `tiny_model()`."""
    torch.manual_seed(5)
    shape = {"n_layer": 1, "n_head": 2, "n_kv_head": None, "n_embd": 16, "position": "alibi"}
    other = Decoder(tiny_model(**shape | changes).config).eval()
    return other.to(torch.float64) if changes.get("dtype") == torch.float64 else other


def close_model(model: Decoder) -> Decoder:
    """A model that often, not always, agrees with another."""
    other = Decoder(model.config).eval()
    other.load_state_dict(model.state_dict())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return other.to(model.embed.weight.dtype)


def run(
    model: Decoder, draft: Decoder | LookUp, n: int = 20, *, use_cache: bool = True, **options
) -> SpeculativeGeneration:
    proposer = draft if isinstance(draft, LookUp) else Generator(draft, use_cache=use_cache)
    how = {"options": GREEDY, "max_new_tokens": n} | options
    return speculate(Generator(model, use_cache=use_cache), PROMPT, draft=proposer, **how).run()


def record_lengths(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each forward pass reads from now on."""
    lengths: list[int] = []
    forward = model.forward

    def recording(tokens: torch.Tensor, **options) -> object:
        lengths.append(tokens.shape[1])
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", recording)
    return lengths


# Greedy tokens are those of plain decoding


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_tokens_are_those_of_plain_decoding(shape: dict) -> None:
    model = tiny_model(**shape)
    for options in (GREEDY, VARIED):
        plain = Generator(model).generate(PROMPT, max_new_tokens=14, options=options).run()
        for draft in (close_model(model), another_model(), LookUp(3)):
            guessed = run(model, draft, 14, options=options, draft_tokens=3)
            assert guessed.tokens == plain.tokens
            assert guessed.ends == ["length"]


@pytest.mark.parametrize("draft_tokens", [1, 2, 7, 100])
def test_the_number_of_drafted_tokens_changes_nothing(draft_tokens: int) -> None:
    model = tiny_model()
    plain = Generator(model).generate(PROMPT, max_new_tokens=14, options=VARIED).run()
    draft = close_model(model)
    assert run(model, draft, 14, options=VARIED, draft_tokens=draft_tokens).tokens == plain.tokens


def test_the_drafts_are_accepted_sometimes_always_and_never() -> None:
    model = tiny_model()
    for draft, low, high in (
        (model, 1.0, 1.0),
        (close_model(model), 0.2, 0.99),
        (another_model(), 0.0, 0.2),
    ):
        report = run(model, draft, options=VARIED).report
        assert low <= report.accepted_tokens / report.drafted_tokens <= high


def test_drawn_tokens_are_the_same_with_and_without_caches() -> None:
    model = tiny_model(dtype=torch.float64)
    options = SamplingOptions(temperature=1.5, top_p=0.95, repetition_penalty=1.2)
    how = {"options": options, "num_samples": 2, "draft_tokens": 3}
    for draft in (close_model(model), LookUp(1)):
        cached = run(model, draft, 16, **how)
        assert 0 < cached.report.accepted_tokens < cached.report.drafted_tokens
        assert cached.tokens == run(model, draft, 16, use_cache=False, **how).tokens


def test_a_chunk_of_the_prompt_sees_those_before_it_without_a_cache() -> None:
    model = tiny_model()
    how = {"max_new_tokens": 12, "options": VARIED}
    settings = {"use_cache": False, "prefill_chunk": 2}
    generator = Generator(model, **settings)
    plain = generator.generate(PROMPT, **how).run()
    for draft in (Generator(close_model(model), **settings), LookUp(3)):
        assert speculate(generator, PROMPT, draft=draft, **how).run().tokens == plain.tokens


def test_no_token_is_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    model, draft = tiny_model(), tiny_model()
    read, draft_read = record_lengths(model, monkeypatch), record_lengths(draft, monkeypatch)
    report = run(model, draft, 12, draft_tokens=3).report
    assert read == [5, 4, 4, 3]  # the prompt, then the last token and what was drafted
    # The draft model reads the prompt and the first token, then what it draws: the last draft of
    # a round is read in the next, with the token behind it.
    assert draft_read == [6, 1, 1, 2, 1, 1, 2, 1]
    assert (report.model_calls, report.drafted_tokens, report.accepted_tokens) == (4, 8, 8)
    monkeypatch.undo()
    read = record_lengths(model, monkeypatch)
    report = run(model, another_model(), 12, draft_tokens=3).report
    assert report.accepted_tokens < 3
    assert sum(read) == 5 + (report.model_calls - 1) + report.drafted_tokens


# Drawn tokens have exactly the model's distribution


class ScriptedChance:
    """Takes the choices of a path, then always the first; notes the probability and the others."""

    def __init__(self, path: tuple[int, ...]):
        self.path = path
        self.taken: tuple[int, ...] = ()
        self.probability = 1.0
        self.others: list[tuple[int, ...]] = []

    def accept(self, probability: float) -> bool:
        yes = min(probability, 1.0)
        return bool(self._choose([(1, yes), (0, 1 - yes)]))

    def draw(self, probabilities: torch.Tensor) -> int:
        assert probabilities.sum() == pytest.approx(1)
        return self._choose(list(enumerate(probabilities.tolist())))

    def _choose(self, outcomes: list[tuple[int, float]]) -> int:
        possible = [outcome for outcome in outcomes if outcome[1] > 0]
        place = len(self.taken)
        choice = self.path[place] if place < len(self.path) else 0
        if place >= len(self.path):
            self.others += [(*self.taken, other) for other in range(1, len(possible))]
        self.taken += (choice,)
        value, probability = possible[choice]
        self.probability *= probability
        return value


def outputs(
    start: Callable[[], SpeculativeGeneration], monkeypatch: pytest.MonkeyPatch
) -> Counter[tuple[int, ...]]:
    """Probability of each output: the sum over every path that chance can take to it."""
    total: Counter[tuple[int, ...]] = Counter()
    paths: list[tuple[int, ...]] = [()]
    while paths:
        chance = ScriptedChance(paths.pop())
        monkeypatch.setattr(speculative, "Chance", lambda _, chance=chance: chance)
        generation = start().run()
        total[tuple(generation.tokens[0])] += chance.probability
        paths += chance.others
    return total


def remember(model: Decoder) -> Decoder:
    """Let a model without a cache answer from memory what it has answered before."""
    forward, answers = model.forward, {}

    def remembering(tokens: torch.Tensor, *, cache: None, only_last: bool) -> object:
        key = (*tokens[0].tolist(), only_last)
        if key not in answers:
            answers[key] = forward(tokens, only_last=only_last)
        return answers[key]

    model.forward = remembering  # type: ignore[method-assign]
    return model


def own_distribution(
    model: Decoder, prompt: list[int], length: int, options: SamplingOptions, eos_id: int | None
) -> Counter[tuple[int, ...]]:
    """Probability of each text when tokens are drawn one at a time, occurrences counted anew."""
    total: Counter[tuple[int, ...]] = Counter()
    going: dict[tuple[int, ...], float] = {(): 1.0}
    ids = range(model.config.vocab_size)
    for _ in range(length):
        continued: dict[tuple[int, ...], float] = {}
        for text, before in going.items():
            with torch.no_grad():
                logits = Decoder.forward(model, torch.tensor([prompt + list(text)])).logits[:, -1]
            seen = torch.tensor([[token in (*prompt, *text) for token in ids]])
            counts = torch.tensor([[float(text.count(token)) for token in ids]])
            for token, p in enumerate(distribution(logits, options, seen, counts)[0].tolist()):
                if token == eos_id:
                    total[text] += before * p
                elif p > 0:
                    continued[*text, token] = before * p
        going = continued
    return total + Counter(going)


DRAWN = SamplingOptions(temperature=0.8)
PENALISED = SamplingOptions(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, logit_bias={1: 0.5}
)


@pytest.mark.parametrize(
    ("draft", "vocab_size", "options", "eos_id"),
    [
        ("unrelated", 3, DRAWN, None),
        ("close", 3, DRAWN, 2),
        ("look-up", 3, DRAWN, None),
        ("short context", 2, DRAWN, None),
        ("close", 3, SamplingOptions(temperature=1.2, top_k=2), None),
        ("unrelated", 3, SamplingOptions(temperature=1.5, top_p=0.6), None),
        ("unrelated", 3, SamplingOptions(typical_p=0.7), None),
        ("unrelated", 2, PENALISED, None),
        ("close", 2, PENALISED, 1),
        ("look-up", 3, PENALISED, 2),
        ("unrelated", 3, SamplingOptions(temperature=0, frequency_penalty=2.0), None),
    ],
)
def test_the_probability_of_every_output_is_the_models_own(
    monkeypatch: pytest.MonkeyPatch,
    draft: str,
    vocab_size: int,
    options: SamplingOptions,
    eos_id: int | None,
) -> None:
    model = tiny_model(vocab_size=vocab_size, n_layer=1, dtype=torch.float64)
    prompt, length = [0, 1, 0, 1], 4
    proposer: Generator | LookUp = LookUp(2)
    if draft != "look-up":
        proposer = Generator(remember(make_draft(draft, model)), use_cache=False)
    generator = Generator(remember(model), use_cache=False)

    def start() -> SpeculativeGeneration:
        how = {"draft": proposer, "draft_tokens": 2, "options": options, "eos_id": eos_id}
        return speculate(generator, prompt, max_new_tokens=length, **how)

    expected = own_distribution(model, prompt, length, options, eos_id)
    found = outputs(start, monkeypatch)
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    assert set(found) == set(expected)
    for text, p in expected.items():
        assert found[text] == pytest.approx(p, abs=1e-10)


def make_draft(kind: str, model: Decoder) -> Decoder:
    if kind == "close":
        return close_model(model)
    changes = {"context_length": 6} if kind == "short context" else {}
    return another_model(vocab_size=model.config.vocab_size, **changes).double()


def test_draws_with_real_chance_follow_the_distribution() -> None:
    """Chi-square over all 27 texts of three tokens; 54.05 is exceeded once in a thousand tests."""
    model = tiny_model(vocab_size=3, n_layer=1)
    expected = own_distribution(model, [0, 1], 3, DRAWN, None)
    generator = Generator(remember(model), use_cache=False)
    draft = Generator(remember(another_model(vocab_size=3)), use_cache=False)
    n = 700
    how = {"draft": draft, "draft_tokens": 1, "options": DRAWN, "num_samples": n, "seed": 11}
    drawn = Counter(map(tuple, speculate(generator, [0, 1], max_new_tokens=3, **how).run().tokens))
    assert len(expected) == 27
    assert sum((drawn[text] - n * p) ** 2 / (n * p) for text, p in expected.items()) < 54.05


def test_a_token_is_kept_or_drawn_from_what_is_missing() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    certain = ScriptedChance(())
    assert keep_or_correct(0, p, q, certain) == 0
    assert not certain.others
    corrected = ScriptedChance((1, 0))
    assert keep_or_correct(2, p, q, corrected) == 0
    assert corrected.probability == pytest.approx((1 - 0.2 / 0.6) * 0.3 / 0.4)


def test_equal_up_to_rounding_is_drawn_from_the_models_own() -> None:
    p, q = torch.tensor([0.5, 0.5]), torch.tensor([0.5, 0.5 + 1e-7])
    assert keep_or_correct(1, p, q, ScriptedChance((1, 1))) == 1


# Prompt look-up


@pytest.mark.parametrize(
    ("text", "ngram", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 3, [9, 1, 2, 3]),
        ([1, 2, 8, 5, 2, 7, 1, 2], 2, [8, 5, 2, 7]),  # two tokens agree, later only one
        ([1, 2, 8, 5, 2, 7, 1, 2], 1, [7, 1, 2]),  # the latest
        ([4, 4, 4], 2, [4]),
        ([4, 4, 4], 5, [4]),
        ([1, 2, 3], 3, []),
        ([1], 3, []),
    ],
)
def test_look_up_proposes_what_followed_the_longest_agreement(
    text: list[int], ngram: int, expected: list[int]
) -> None:
    assert look_up(text, ngram, 4) == expected[:4]
    assert look_up(text, ngram, 1) == expected[:1]


def test_a_repeated_text_is_looked_up() -> None:
    model = tiny_model()
    said_again = SamplingOptions(temperature=0, logit_bias={7: 100})
    report = run(model, LookUp(), 20, options=said_again, draft_tokens=3).report
    assert report.accepted_tokens == report.drafted_tokens > 8


def test_ids_that_pad_the_vocabulary_are_neither_proposed_nor_drawn() -> None:
    model, prompt = tiny_model(), [16, 3, 16, 5, 16]
    how = {"max_new_tokens": 12, "options": SamplingOptions(temperature=9.0), "num_samples": 3}
    for draft in (LookUp(1), Generator(tiny_model(vocab_size=30), vocab_size=6)):
        generation = speculate(Generator(model, vocab_size=6), prompt, draft=draft, **how).run()
        assert max(map(max, generation.tokens)) < 6


# Samples, ends, what is counted


def test_a_sample_is_the_same_alone_or_with_others() -> None:
    model = tiny_model(dtype=torch.float64)
    draft = close_model(model)
    how = {"options": SamplingOptions(temperature=1.2), "logprobs": 2}
    together = run(model, draft, 12, num_samples=3, seed=7, **how)
    assert len(set(map(tuple, together.tokens))) == 3
    for i in range(3):
        alone = run(model, draft, 12, seed=7 + i, **how)
        assert alone.tokens[0] == together.tokens[i]
        assert [entry.logprob for entry in alone.logprobs[0]] == pytest.approx(
            [entry.logprob for entry in together.logprobs[i]]
        )


def test_a_draft_that_agrees_up_to_rounding_makes_samples_depend_on_no_other() -> None:
    model = tiny_model()
    options = SamplingOptions(temperature=1.5, top_p=0.95)
    for seed in range(5):
        together = run(model, model, 20, num_samples=3, seed=seed, options=options)
        for i in range(3):
            alone = run(model, model, 20, seed=seed + i, options=options)
            assert alone.tokens[0] == together.tokens[i]


def test_samples_of_a_prompt_that_is_all_prefix() -> None:
    model = tiny_model(mask="prefix", prefix=5)
    assert len(PROMPT) == 5
    tokens = run(model, LookUp(), 8, num_samples=2).tokens
    assert tokens[0] == tokens[1]


def test_log_probabilities_are_those_of_plain_decoding() -> None:
    model = tiny_model()
    plain = Generator(model).generate(PROMPT, max_new_tokens=9, options=GREEDY, logprobs=2).run()
    guessed = run(model, close_model(model), 9, logprobs=2)
    assert len(guessed.logprobs[0]) == 9
    for one, other in zip(guessed.logprobs[0], plain.logprobs[0], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_an_end_token_ends_the_text_wherever_it_comes() -> None:
    model = tiny_model()
    for eos_id in range(model.config.vocab_size):
        how = {"max_new_tokens": 8, "options": VARIED, "eos_id": eos_id}
        plain = Generator(model).generate(PROMPT, **how).run()
        guessed = speculate(Generator(model), PROMPT, draft=Generator(model), **how).run()
        assert guessed.tokens == plain.tokens
        assert guessed.ends == plain.ends
        assert guessed.report.produced_tokens == plain.report.produced_tokens
        assert guessed.report.decoded_tokens == plain.report.decoded_tokens


@pytest.mark.parametrize("n", [28, 50])
def test_the_context_ends_the_text_as_in_plain_decoding(n: int) -> None:
    model = tiny_model()
    plain = Generator(model).generate(PROMPT, max_new_tokens=n, options=GREEDY).run()
    guessed = run(model, model, n, draft_tokens=4)
    assert guessed.tokens == plain.tokens
    assert guessed.ends == plain.ends == ["length" if n == 28 else "context"]


def test_a_draft_model_with_a_short_context_helps_while_it_can() -> None:
    model = tiny_model(position="none")
    short = Decoder(tiny_model(position="none", context_length=10).config).eval()
    short.load_state_dict(model.state_dict())
    generation = run(model, short, 20, draft_tokens=3)
    assert generation.tokens == run(model, model, 20).tokens
    # It reads 10 tokens at most, so the last it can propose is the sixth new one; the first and
    # the fifth are the model's own.
    assert generation.report.drafted_tokens == generation.report.accepted_tokens == 4


class Letters:
    """Token i is the i-th letter."""

    def step(self, token_id: int) -> str:
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        return ""


def test_texts_stream_and_stop_as_in_plain_decoding() -> None:
    model = tiny_model()
    how = {"max_new_tokens": 12, "options": VARIED}
    whole = collect_texts(Generator(model).generate(PROMPT, **how), Letters)[0]
    for stop in (whole[3:5], whole[8], "no such text"):
        generation = speculate(Generator(model), PROMPT, draft=Generator(model), **how)
        assert collect_texts(generation, Letters, [stop]) == [whole.partition(stop)[0]]
    assert len(whole) == 12


def test_one_sample_can_be_stopped_and_another_skipped() -> None:
    model = tiny_model()
    how = {"max_new_tokens": 8, "num_samples": 3}
    generation = speculate(Generator(model), PROMPT, draft=Generator(model), **how)
    for step in generation:
        assert len(step) == 1
        if len(generation.tokens[0]) == 3:
            generation.stop(0)
            generation.stop(1)
    assert [len(tokens) for tokens in generation.tokens] == [3, 0, 8]
    assert generation.ends == ["stopped", "stopped", "length"]


def test_the_report_says_what_guessing_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: float(next(clock)))
    model = tiny_model()
    report = run(model, model, 12, draft_tokens=3).report
    assert report.tokens_per_call == 12 / 4
    assert str(report) == (
        "read 5 tokens in 1.000 s (5 tokens/s), produced 12 in 3.000 s (4 tokens/s); "
        "8 of 8 drafted tokens accepted (100%), 3.00 tokens per call of the model"
    )
    report = run(model, LookUp(), 1).report
    assert str(report).endswith("produced 1; no tokens drafted, 1.00 tokens per call of the model")


# Requests that cannot be met


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft_tokens": 0}, "draft_tokens=0 must be at least 1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be at least 1"),
        ({"logprobs": 18}, "logprobs=18 must be from 0"),
        ({"seed": -1}, "seed=-1 must be"),
        (
            {"options": SamplingOptions(logit_bias={17: 1.0})},
            "logit_bias names the id 17, tokens have ids from 0 to 16",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        run(tiny_model(), LookUp(), **options)
    assert "\n" not in str(error.value)


def test_drafts_that_cannot_work_are_one_line() -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=r"lookup=0 must be at least 1 token"):
        LookUp(0)
    with pytest.raises(ValueError, match=r"the draft model knows 9 ids, the model 17: they must"):
        run(model, tiny_model(vocab_size=9))
    with pytest.raises(ValueError, match=r"fewer than the draft's model.prefix=6"):
        run(model, tiny_model(mask="prefix", prefix=6))
    with pytest.raises(ValueError, match=r"the draft model is in training mode"):
        run(model, tiny_model().train())
    sliding = Generator(model, at_limit="slide")
    with pytest.raises(ValueError, match=r"at_limit=slide does not go with speculative decoding"):
        speculate(sliding, PROMPT, draft=LookUp(), max_new_tokens=3)
    with pytest.raises(ValueError, match=r"at_limit=slide does not go with a draft model"):
        speculate(Generator(model), PROMPT, draft=sliding, max_new_tokens=3)
    for kind in ("int8", "int4"):
        inexact = Generator(model, cache=CacheOptions(kind=kind))
        with pytest.raises(ValueError, match=f"cache={kind} does not go with speculative decoding"):
            speculate(inexact, PROMPT, draft=LookUp(), max_new_tokens=3)
    unknown = Generator(tiny_model(vocab_size=30), vocab_size=17)
    with pytest.raises(ValueError, match=r"holds the id 20, the draft model knows 0 to 16"):
        speculate(unknown, [20], draft=Generator(model), max_new_tokens=3)
