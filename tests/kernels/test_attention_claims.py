"""What is said of attention's mathematics, each claim as a property of the code that runs.

The weights themselves are never returned, but with the identity matrix as values the output of
a row is its weights, so every claim is checked on what a backend really computes.
"""

import math

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionOutput, AttentionSpec, attention, column_mass
from tests.kernels.cases import ALL_STATS

pytestmark = pytest.mark.parametrize("backend", ["eager", "sdpa"])

B, H, N, D = 2, 3, 12, 8
SPECS = {
    "causal": AttentionSpec(),
    "bidirectional": AttentionSpec(causal=False),
    "window and sinks": AttentionSpec(window=3, sinks=2),
    "soft-cap": AttentionSpec(softcap=2.0),
    "alibi": AttentionSpec(alibi_slopes=torch.tensor([1.0, 0.5, 0.25])),
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(seed: int = 0) -> Tensor:
    return draw(B, H, N, D, seed=seed)


def with_sink_logit(spec: AttentionSpec) -> AttentionSpec:
    return AttentionSpec(
        causal=spec.causal,
        window=spec.window,
        sinks=spec.sinks,
        softcap=spec.softcap,
        alibi_slopes=spec.alibi_slopes,
        sink_logit=draw(H, seed=9),
    )


def measure(q: Tensor, k: Tensor, spec: AttentionSpec, backend: str) -> AttentionOutput:
    """Attention whose output is the weights themselves: (B, H, T, S), with every statistic."""
    n_keys = k.shape[2]
    identity = torch.eye(n_keys, dtype=k.dtype).expand(k.shape[0], k.shape[1], -1, -1)
    return attention(q, k, identity, spec, stats=ALL_STATS, backend=backend)


def causal_counts() -> Tensor:
    """Keys that each row of causal attention sees: (N,)."""
    return torch.arange(1, N + 1, dtype=torch.float64)


@every_spec
def test_weights_of_a_row_sum_to_one_minus_the_null_mass(backend: str, spec: AttentionSpec) -> None:
    plain = measure(heads(1), heads(2), spec, backend)
    assert (plain.out >= 0).all()
    torch.testing.assert_close(plain.out.sum(-1), torch.ones(B, H, N, dtype=torch.float64))
    nulled = measure(heads(1), heads(2), with_sink_logit(spec), backend)
    assert (nulled.null_mass > 0).all()
    torch.testing.assert_close(nulled.out.sum(-1), 1 - nulled.null_mass)


@every_spec
def test_output_lies_in_the_convex_hull_of_the_values_and_zero_with_a_sink_logit(
    backend: str, spec: AttentionSpec
) -> None:
    v = 5 + heads(3)  # far from zero, which a plain head cannot reach
    for rule, has_null in ((spec, False), (with_sink_logit(spec), True)):
        weights = measure(heads(1), heads(2), rule, backend).out
        out = attention(heads(1), heads(2), v, rule, backend=backend).out
        assert (weights >= 0).all()
        torch.testing.assert_close(out, weights @ v)
        highest = v.amax(dim=2, keepdim=True)
        lowest = torch.zeros_like(highest) if has_null else v.amin(dim=2, keepdim=True)
        assert (out <= highest + 1e-12).all()
        assert (out >= lowest - 1e-12).all()


def softmax_of_attention(logits: Tensor, backend: str) -> Tensor:
    """One query whose logits are its own components: identity as keys and values, scale 1."""
    n = logits.shape[0]
    identity = torch.eye(n, dtype=logits.dtype)[None, None]
    spec = AttentionSpec(causal=False, scale=1.0)
    query = logits[None, None, None]
    return attention(query, identity, identity, spec, backend=backend).out.flatten()


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_softmax_jacobian_is_diag_p_minus_p_p_transposed(backend: str, size: float) -> None:
    logits = size * draw(7)
    p = softmax_of_attention(logits, backend)
    jacobian = torch.autograd.functional.jacobian(
        lambda x: softmax_of_attention(x, backend), logits
    )
    torch.testing.assert_close(jacobian, torch.diag(p) - torch.outer(p, p))
    torch.testing.assert_close(jacobian.sum(-1), torch.zeros(7, dtype=torch.float64))
    norm = torch.linalg.matrix_norm(jacobian, 2)
    largest = p.max()
    spread = largest * (1 - largest)
    assert spread - 1e-15 <= norm <= min(0.5, 2 * spread) + 1e-15


def test_jacobian_bracket_is_tight_for_two_tied_keys(backend: str) -> None:
    jacobian = torch.autograd.functional.jacobian(
        lambda x: softmax_of_attention(x, backend), torch.zeros(2, dtype=torch.float64)
    )
    torch.testing.assert_close(
        torch.linalg.matrix_norm(jacobian, 2), torch.tensor(0.5, dtype=torch.float64)
    )


@pytest.mark.parametrize("head_size", [16, 64])
def test_logits_have_std_sqrt_d_before_scaling_and_one_after(backend: str, head_size: int) -> None:
    many = 20_000  # the standard error of the measured std is half a percent
    q, k = draw(many, 1, 1, head_size, seed=1), draw(many, 1, 1, head_size, seed=2)
    for scale, expected in ((1.0, math.sqrt(head_size)), (None, 1.0)):
        spec = AttentionSpec(scale=scale)
        lse = attention(q, k, k, spec, stats=ALL_STATS, backend=backend).lse
        assert lse is not None  # of a single key: its logit
        assert lse.std().item() == pytest.approx(expected, rel=0.03)


def entropy_floor(logits: Tensor) -> Tensor:
    """The least entropy that logits this far from their mean can have (Zhai 2023, Thm 3.1)."""
    n = logits.shape[-1]
    sigma = (logits - logits.mean(-1, keepdim=True)).norm(dim=-1)
    beta = torch.exp(-sigma * math.sqrt(n / (n - 1)))
    tail = 1 + (n - 1) * beta
    return torch.log(tail) + sigma * math.sqrt(n * (n - 1)) * beta / tail


@pytest.mark.parametrize("size", [0.1, 1.0, 5.0, 30.0])
def test_entropy_never_falls_below_the_floor_of_its_logits(backend: str, size: float) -> None:
    q, k = size * heads(1), heads(2)
    entropy = measure(q, k, AttentionSpec(), backend).entropy
    assert entropy is not None
    logits = q @ k.mT / math.sqrt(D)
    for i in range(1, N):  # row i sees i + 1 keys
        assert (entropy[:, :, i] >= entropy_floor(logits[:, :, i, : i + 1]) - 1e-12).all()


def test_entropy_floor_is_reached_by_one_logit_above_equal_ones(backend: str) -> None:
    logits = torch.zeros(N, dtype=torch.float64)
    for height in (0.5, 3.0, 20.0):
        logits[4] = height
        identity = torch.eye(N, dtype=torch.float64)[None, None]
        spec = AttentionSpec(causal=False, scale=1.0)
        row = measure(logits[None, None, None], identity, spec, backend)
        assert row.entropy is not None
        torch.testing.assert_close(row.entropy.squeeze(), entropy_floor(logits))


@every_spec
def test_full_entropy_is_that_of_the_null_choice_plus_the_rest(
    backend: str, spec: AttentionSpec
) -> None:
    row = measure(heads(1), heads(2), with_sink_logit(spec), backend)
    assert row.null_mass is not None
    assert row.entropy_tokens is not None
    choice = torch.special.entr(row.null_mass) + torch.special.entr(1 - row.null_mass)
    torch.testing.assert_close(row.entropy, choice + (1 - row.null_mass) * row.entropy_tokens)


@every_spec
def test_without_a_sink_logit_both_entropies_are_equal(backend: str, spec: AttentionSpec) -> None:
    row = measure(heads(1), heads(2), spec, backend)
    torch.testing.assert_close(row.entropy, row.entropy_tokens)


def test_equal_logits_spread_the_weight_evenly(backend: str) -> None:
    row = measure(torch.zeros_like(heads()), heads(2), AttentionSpec(), backend)
    n = causal_counts()
    torch.testing.assert_close(row.entropy, n.log().expand(B, H, N))
    torch.testing.assert_close(row.max_prob, (1 / n).expand(B, H, N))
    torch.testing.assert_close(row.mean_distance, ((n - 1) / 2).expand(B, H, N))
    assert row.sink_mass is not None
    for column, k in enumerate(ALL_STATS.sink_mass):
        expected = (k / n).clamp(max=1).expand(B, H, N)
        torch.testing.assert_close(row.sink_mass[..., column], expected)


def test_a_logit_far_above_takes_all_the_weight(backend: str) -> None:
    k = heads(2)
    k = k / k.norm(dim=-1, keepdim=True)
    row = measure(1e4 * k, k, AttentionSpec(), backend)  # every token matches itself best
    zero, one = torch.zeros(B, H, N).double(), torch.ones(B, H, N).double()
    torch.testing.assert_close(row.out, torch.eye(N).double().expand(B, H, N, N))
    torch.testing.assert_close(row.entropy, zero)
    torch.testing.assert_close(row.max_prob, one)
    torch.testing.assert_close(row.mean_distance, zero)


def test_all_weight_on_the_first_token_is_a_perfect_sink(backend: str) -> None:
    k = heads(2)
    k[:, :, 0] = 1e4
    q = heads(1).abs()
    row = measure(q, k, AttentionSpec(), backend)
    assert row.sink_mass is not None
    torch.testing.assert_close(row.sink_mass, torch.ones_like(row.sink_mass))
    torch.testing.assert_close(row.mean_distance, (causal_counts() - 1).expand(B, H, N))
    assert row.lse is not None
    received = column_mass(q, k, row.lse, AttentionSpec(), backend=backend)
    torch.testing.assert_close(received[:, :, 0], torch.full((B, H), float(N)).double())


@pytest.mark.parametrize(("n", "share"), [(8, 0.340), (16, 0.211), (64, 0.074)])
def test_uniform_causal_attention_gives_the_first_token_a_harmonic_share(
    backend: str, n: int, share: float
) -> None:
    q, k = torch.zeros(1, 1, n, D).double(), draw(1, 1, n, D)
    lse = attention(q, k, k, AttentionSpec(), stats=ALL_STATS, backend=backend).lse
    assert lse is not None
    received = column_mass(q, k, lse, AttentionSpec(), backend=backend)[0, 0, 0].item() / n
    assert received == pytest.approx(sum(1 / t for t in range(1, n + 1)) / n)
    assert received == pytest.approx(share, abs=5e-4)


def test_without_mask_and_positions_attention_is_permutation_equivariant(backend: str) -> None:
    q, k, v = heads(1), heads(2), heads(3)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(4))
    spec = AttentionSpec(causal=False)
    out = attention(q, k, v, spec, backend=backend).out
    permuted = attention(q[:, :, order], k[:, :, order], v[:, :, order], spec, backend=backend).out
    torch.testing.assert_close(permuted, out[:, :, order])


@pytest.mark.parametrize("spec", [AttentionSpec(), AttentionSpec(window=5, sinks=1)], ids=str)
@pytest.mark.parametrize("stats", [None, ALL_STATS], ids=["plain", "statistics"])
def test_changing_a_token_leaves_every_output_before_it_bit_identical(
    backend: str, stats, spec: AttentionSpec
) -> None:
    n, t = 100, 61
    q, k, v = (draw(2, 2, n, 16, seed=seed).float() for seed in (1, 2, 3))
    before = attention(q, k, v, spec, stats=stats, backend=backend)
    for x in (q, k, v):
        x[:, :, t] = 100 * x[:, :, t] + 1
    after = attention(q, k, v, spec, stats=stats, backend=backend)
    assert not torch.equal(after.out[:, :, t], before.out[:, :, t])
    for name, x in before._asdict().items():
        if x is not None:
            assert torch.equal(x[:, :, :t], getattr(after, name)[:, :, :t]), name
