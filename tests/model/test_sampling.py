"""Each filter on its own, their order, and the draw."""

import math

import pytest
import torch

from model.sampling import (
    SamplingOptions,
    choose,
    draw,
    keep_first,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    probabilities,
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
    for filtered in (keep_top_k(logits, 5), keep_top_p(logits, 0.5), keep_min_p(logits, 0.3)):
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
    torch.testing.assert_close(probabilities(logits, options), logits.softmax(-1))


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
    hot = probabilities(logits, SamplingOptions(temperature=100.0, top_p=0.5))
    cold = probabilities(logits, SamplingOptions(temperature=0.1, top_p=0.5))
    assert (hot > 0).tolist() == [[True, True, False]]
    assert (cold > 0).tolist() == [[True, False, False]]
    torch.testing.assert_close(
        probabilities(logits, SamplingOptions(temperature=0.5)),
        torch.tensor([[0.25, 0.09, 0.04]]) / 0.38,
    )


def test_top_p_counts_only_what_top_k_left() -> None:
    options = SamplingOptions(top_k=2, top_p=0.6)
    assert (probabilities(logits_of(0.4, 0.25, 0.2, 0.15), options) > 0).tolist() == [
        [True, False, False, False]
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_float32_and_sum_to_one(dtype: torch.dtype) -> None:
    options = SamplingOptions(temperature=0.7, top_k=9, top_p=0.9, min_p=0.05)
    result = probabilities(torch.randn(4, 30).to(dtype), options)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.sum(-1), torch.ones(4))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300])
def test_a_tiny_temperature_is_the_most_likely_token_and_never_nan(temperature: float) -> None:
    logits = torch.tensor([[1e4, 1.1e4, -1e4, -INF]])
    result = probabilities(logits, SamplingOptions(temperature=temperature))
    assert result.tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_temperature_zero_is_the_argmax_whatever_the_filters() -> None:
    logits = torch.randn(8, 50)
    options = SamplingOptions(temperature=0, top_k=3, top_p=0.1, min_p=0.9)
    assert torch.equal(choose(logits, options, generators(*range(8))), logits.argmax(-1))


def test_the_penalty_also_concerns_temperature_zero() -> None:
    logits = torch.tensor([[3.0, 2.0]])
    options = SamplingOptions(temperature=0, repetition_penalty=2.0)
    seen = torch.tensor([[True, False]])
    assert choose(logits, options, generators(0), seen).tolist() == [1]


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
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be"),
    ],
)
def test_a_value_out_of_range_is_one_line(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        SamplingOptions(**options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
