"""Each filter on its own, their order, and the draw."""

import math

import pytest
import torch

from model.sampling import (
    Occurrences,
    SamplingOptions,
    add_bias,
    choose,
    distribution,
    draw,
    keep_first,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    keep_typical,
    penalise_counts,
    penalise_repetition,
    token_logprobs,
)

INF = float("inf")


def logits_of(*masses: float) -> torch.Tensor:
    return torch.tensor([masses]).log()


def kept(logits: torch.Tensor) -> list[int]:
    return torch.isfinite(logits[0]).nonzero().flatten().tolist()


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# Filters


def test_what_a_filter_removes_is_minus_infinity_and_the_rest_is_unchanged() -> None:
    logits = torch.randn(3, 20)
    for filtered in (
        keep_top_k(logits, 5),
        keep_top_p(logits, 0.5),
        keep_min_p(logits, 0.3),
        keep_typical(logits, 0.5),
    ):
        removed = filtered == -INF
        assert removed.any()
        assert torch.equal(filtered[~removed], logits[~removed])


def test_top_k_keeps_exactly_k_even_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]])
    assert len(kept(keep_top_k(logits, 2))) == 2
    assert set(kept(keep_top_k(logits, 2))) < {1, 2, 3}
    assert kept(keep_top_k(logits, 4)) == [1, 2, 3, 4]


@pytest.mark.parametrize("k", [5, 6, 1000])
def test_top_k_of_the_whole_vocabulary_and_more_changes_nothing(k: int) -> None:
    logits = torch.randn(2, 5)
    assert torch.equal(keep_top_k(logits, k), logits)


@pytest.mark.parametrize("k", [None, 0])
def test_top_k_none_and_zero_are_off(k: int | None) -> None:
    logits = torch.randn(2, 5)
    options = SamplingOptions(top_k=k)
    torch.testing.assert_close(distribution(logits, options), logits.softmax(-1))


@pytest.mark.parametrize(
    ("p", "expected"), [(0.3, [2]), (0.5, [2]), (0.51, [1, 2]), (0.8, [1, 2]), (0.81, [0, 1, 2])]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_p(p: float, expected: list[int]) -> None:
    assert kept(keep_top_p(logits_of(0.125, 0.3, 0.5, 0.075), p)) == expected


def test_top_p_always_keeps_the_likeliest() -> None:
    assert kept(keep_top_p(logits_of(0.2, 0.5, 0.3), 1e-9)) == [1]


@pytest.mark.parametrize(("p", "expected"), [(1.0, [2]), (0.59, [1, 2]), (0.2, [0, 1, 2])])
def test_min_p_is_a_share_of_the_likeliest(p: float, expected: list[int]) -> None:
    assert kept(keep_min_p(logits_of(0.125, 0.3, 0.5, 0.075), p)) == expected


def typical_by_definition(p: list[float], mass: float) -> set[int]:
    """Tokens sorted by | -log p - H |, taken until their probabilities reach the mass."""
    entropy = sum(-x * math.log(x) for x in p if x)
    order = sorted((i for i in range(len(p)) if p[i]), key=lambda i: abs(-math.log(p[i]) - entropy))
    kept: set[int] = set()
    while sum(p[i] for i in kept) < mass and len(kept) < len(order):
        kept.add(order[len(kept)])
    return kept


@pytest.mark.parametrize("mass", [1e-9, 0.2, 0.5, 0.83, 0.97, 0.999])
def test_typical_keeps_the_tokens_whose_information_is_closest_to_the_entropy(mass: float) -> None:
    for seed in range(20):
        logits = 3 * torch.randn(1, 12, generator=generators(seed)[0], dtype=torch.float64)
        logits[0, seed % 12] = -INF
        expected = typical_by_definition(logits.softmax(-1)[0].tolist(), mass)
        assert set(kept(keep_typical(logits, mass))) == expected


def test_typical_can_rule_out_the_likeliest() -> None:
    # Entropy 1.75 nats: a share of 0.1 carries 2.30, one of 0.4 only 0.92.
    assert kept(keep_typical(logits_of(0.4, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1), 0.25)) == [1, 2, 3]


def test_penalties_of_counts_are_taken_off_once_and_each_time() -> None:
    logits = torch.tensor([[1.0, 1.0, -1.0, -INF]])
    counts = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    assert penalise_counts(logits, counts, 0.5, 0.25).tolist() == [[1.0, 0.25, -2.25, -INF]]
    assert penalise_counts(logits, counts, -0.5, 0.0).tolist() == [[1.0, 1.5, -0.5, -INF]]


def test_a_bias_is_added_to_its_token_in_every_row() -> None:
    logits = torch.tensor([[1.0, 2.0, -INF], [3.0, 4.0, 5.0]])
    assert add_bias(logits, {2: 100.0, 0: -1.5}).tolist() == [[-0.5, 2.0, -INF], [1.5, 4.0, 105.0]]
    assert logits[0, 0] == 1.0


def test_ids_beyond_the_tokenizer_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0, 50.0]])
    assert kept(keep_first(logits, 2)) == [0, 1]
    assert torch.equal(keep_first(logits, 4), logits)


def test_a_repetition_penalty_lowers_positive_and_negative_logits_of_seen_tokens() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0]])
    seen = torch.tensor([[True, True, False, False]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 2.0, -2.0]]


# Together


def test_the_temperature_comes_before_the_masses() -> None:
    logits = logits_of(0.5, 0.3, 0.2)
    hot = distribution(logits, SamplingOptions(temperature=100.0, top_p=0.5))
    cold = distribution(logits, SamplingOptions(temperature=0.1, top_p=0.5))
    assert (hot > 0).tolist() == [[True, True, False]]
    assert (cold > 0).tolist() == [[True, False, False]]
    torch.testing.assert_close(
        distribution(logits, SamplingOptions(temperature=0.5)),
        torch.tensor([[0.25, 0.09, 0.04]]) / 0.38,
    )


def test_top_p_counts_only_what_top_k_left() -> None:
    options = SamplingOptions(top_k=2, top_p=0.6)
    assert (distribution(logits_of(0.4, 0.25, 0.2, 0.15), options) > 0).tolist() == [
        [True, False, False, False]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_float32_and_sum_to_one(dtype: torch.dtype) -> None:
    options = SamplingOptions(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05)
    result = distribution(torch.randn(4, 30).to(dtype), options)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.sum(-1), torch.ones(4))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_the_most_likely_token_and_never_nan(temperature: float) -> None:
    logits = torch.tensor([[1e4, 1.1e4, -1e4, -INF]])
    result = distribution(logits, SamplingOptions(temperature=temperature))
    assert result.tolist() == [[0.0, 1.0, 0.0, 0.0]]


@pytest.mark.parametrize("huge", [1e39, 1e300, 10**20, 10**300])
def test_a_huge_number_never_makes_nan(huge: float) -> None:
    logits = torch.tensor([[3.0, 0.0, -1.0, -INF]])
    for changes in (
        {"temperature": huge},
        {"presence_penalty": huge},
        {"presence_penalty": -huge},
        {"frequency_penalty": huge},
        {"frequency_penalty": -huge, "presence_penalty": -huge},
        {"repetition_penalty": huge},
        {"repetition_penalty": 1 / huge, "presence_penalty": huge},
    ):
        options = SamplingOptions(**changes)
        occurred = Occurrences(options, torch.tensor([[0]]), 4)
        for token in (0, 2, 0):
            occurred.record(torch.tensor([token]))
        p = distribution(logits, options, occurred.seen, occurred.counts)
        assert p.sum().item() == pytest.approx(1)
        assert p[0, 3] == 0


def test_temperature_zero_is_the_argmax_whatever_the_filters() -> None:
    logits = torch.randn(8, 50)
    options = SamplingOptions(temperature=0, top_k=3, top_p=0.1, min_p=0.9)
    assert torch.equal(choose(logits, options, generators(*range(8))), logits.argmax(-1))


def test_the_penalty_also_concerns_temperature_zero() -> None:
    logits = torch.tensor([[3.0, 2.0]])
    options = SamplingOptions(temperature=0, repetition_penalty=2.0)
    seen = torch.tensor([[True, False]])
    assert choose(logits, options, generators(0), seen).tolist() == [1]


def test_typical_counts_only_what_the_filters_before_it_left() -> None:
    # Of all five the three smallest are the most typical; once they are gone they stay so.
    logits = logits_of(0.4, 0.3, 0.1, 0.1, 0.1)
    options = SamplingOptions(top_k=2, typical_p=0.5)
    left = keep_typical(keep_top_k(logits, 2), 0.5)
    assert (distribution(logits, options) > 0).tolist() == (left > -INF).tolist()
    assert kept(left) == [0]


@pytest.mark.parametrize("temperature", [0, 1e-6])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0),
        ({"presence_penalty": 2.0}, 1),
        ({"frequency_penalty": 0.9}, 1),
        ({"frequency_penalty": 0.4}, 0),
        ({"logit_bias": {2: 3.0}}, 2),
        ({"logit_bias": {0: -100}}, 1),
        ({"repetition_penalty": 9.0, "presence_penalty": 1.0}, 2),
    ],
)
def test_penalties_and_bias_concern_every_temperature(
    temperature: float, options: dict, expected: int
) -> None:
    logits, asked = (
        torch.tensor([[3.0, 2.0, 1.0]]),
        SamplingOptions(temperature=temperature, **options),
    )
    occurred = Occurrences(asked, torch.tensor([[1]]), 3)  # 1 is of the prompt,
    for _ in range(2):
        occurred.record(torch.tensor([0]))  # 0 was produced, twice
    tokens = choose(logits, asked, generators(0), occurred.seen, occurred.counts)
    assert tokens.tolist() == [expected]
    p = distribution(logits, asked, occurred.seen, occurred.counts)
    assert p.argmax() == expected
    assert p.max() == 1


def test_occurrences_of_the_prompt_are_seen_and_not_counted() -> None:
    options = SamplingOptions(repetition_penalty=2.0, frequency_penalty=1.0)
    occurred = Occurrences(options, torch.tensor([[0, 0], [3, 1]]), 4)
    occurred.record(torch.tensor([2, 1]))
    before = occurred.copy()
    occurred.record(torch.tensor([2, 0]))
    assert before.seen is not None
    assert before.counts is not None
    assert before.seen.int().tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    assert before.counts.tolist() == [[0, 0, 1, 0], [0, 1, 0, 0]]
    assert occurred.counts is not None
    assert occurred.counts.tolist() == [[0, 0, 2, 0], [1, 1, 0, 0]]


def test_without_penalties_nothing_is_noted() -> None:
    occurred = Occurrences(SamplingOptions(), torch.tensor([[1]]), 4)
    occurred.record(torch.tensor([2]))
    assert occurred.seen is None
    assert occurred.counts is None


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(),
        SamplingOptions(temperature=0.7),
        SamplingOptions(temperature=1.5, top_k=4),
        SamplingOptions(temperature=0.7, top_p=0.8),
        SamplingOptions(temperature=1e-35),
        SamplingOptions(temperature=1e35),
        SamplingOptions(temperature=1.3, top_k=5, min_p=0.2, logit_bias={0: 2.0}),
    ],
    ids=str,
)
def test_a_token_is_drawn_from_the_distribution(options: SamplingOptions) -> None:
    n, (generator,) = 5000, generators(3)
    logits = torch.randn(1, 7, generator=generator)
    logits[0, 5] = -INF
    wanted = distribution(logits, options)[0]
    drawn = choose(logits.expand(n, -1), options, [generator] * n)
    for count, p in zip(drawn.bincount(minlength=7).tolist(), wanted.tolist(), strict=True):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p))


@pytest.mark.parametrize(
    ("value", "temperature"), [(1e30, 1.0), (5.0, 1e-8), (0.0, 1e-300), (1e8, 1.0)]
)
def test_equal_logits_are_equally_likely_however_large_or_cold(value, temperature) -> None:
    n, (generator,) = 2000, generators(4)
    options = SamplingOptions(temperature=temperature)
    drawn = choose(torch.full((n, 4), value), options, [generator] * n)
    for count in drawn.bincount(minlength=4).tolist():
        assert abs(count - n / 4) <= 4 * math.sqrt(n * 3 / 16)


def test_at_temperature_0_the_distribution_is_certain() -> None:
    logits = torch.randn(3, 9)
    greedy = distribution(logits, SamplingOptions(temperature=0))
    assert torch.equal(greedy, torch.nn.functional.one_hot(logits.argmax(-1), 9).float())


# Log-probabilities


def test_log_probabilities_are_of_the_logits_as_they_come() -> None:
    logits = keep_first(torch.randn(2, 6), 5)
    expected = logits[:, :5].log_softmax(-1)
    entries = token_logprobs(logits, [4, 0], 3)
    for row, token, entry in zip(expected, [4, 0], entries, strict=True):
        assert entry.logprob == pytest.approx(row[token].item())
        assert [token for token, _ in entry.top] == row.topk(3).indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist())


def test_log_probabilities_of_the_token_alone() -> None:
    (entry,) = token_logprobs(torch.zeros(1, 4), [2], 0)
    assert entry.top == ()
    assert entry.logprob == pytest.approx(-math.log(4))


# The draw


def test_draws_follow_the_probabilities() -> None:
    wanted = torch.tensor([[0.6, 0.3, 0.1, 0.0]])
    row, n = generators(1), 4000
    counts = torch.zeros(4)
    for _ in range(n):
        counts[draw(wanted, row)] += 1
    assert counts[3] == 0
    for count, p in zip(counts[:3].tolist(), wanted[0, :3].tolist(), strict=True):
        assert abs(count / n - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_each_row_draws_from_its_own_generator() -> None:
    flat = torch.full((3, 1000), 1e-3)
    together = draw(flat, generators(5, 6, 7))
    alone = [draw(flat[:1], generators(seed)).item() for seed in (5, 6, 7)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    choose(torch.randn(1, 9, generator=generators(0)[0]), SamplingOptions(), generators(0))
    assert torch.equal(torch.get_rng_state(), before)


# Values out of range


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": INF}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1 must be at least 1, or 0 for no limit"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"min_p": -0.1}, "min_p=-0.1 must be between 0"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"typical_p": 0.0}, "typical_p=0.0 must be above 0"),
        ({"typical_p": float("nan")}, "typical_p=nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be"),
        ({"presence_penalty": INF}, "presence_penalty=inf must be a finite number"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan must be"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names the id -1; ids begin with 0"),
        ({"logit_bias": {3: 100.5}}, "logit_bias=100.5 of the id 3 must be from -100 to 100"),
        ({"logit_bias": {3: -INF}}, "logit_bias=-inf of the id 3"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias=nan of the id 3"),
    ],
)
def test_a_value_out_of_range_is_one_line(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingOptions(**options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


def test_a_bias_of_an_id_that_the_model_lacks_is_one_line() -> None:
    options = SamplingOptions(logit_bias={0: 1.0, 9: 1.0})
    options.check_ids(10)
    with pytest.raises(ValueError, match="logit_bias names the id 9, tokens have ids from 0 to 8"):
        options.check_ids(9)


def test_options_with_a_bias_can_be_a_key() -> None:
    assert len({SamplingOptions(logit_bias={1: 2.0}), SamplingOptions(logit_bias={1: 2.0})}) == 1
