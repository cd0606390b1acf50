"""Output t depends on every token up to t and on none after it, seen through gradients."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels.attention import AttentionSpec, Stats, attention
from tests.reference.causality import assert_causal

BACKENDS = ("eager", "sdpa")
T, D, H = 13, 4, 2


def self_attention(spec: AttentionSpec, backend: str) -> Callable[[Tensor], Tensor]:
    """One layer with the input as query, key and value: (B, T, H * D) to the same."""

    def layer(x: Tensor) -> Tensor:
        heads = x.unflatten(2, (H, D)).transpose(1, 2)  # (B, H, T, D)
        stats = Stats(lse=True, entropy=True)
        output = attention(heads, heads, heads, spec, stats=stats, backend=backend)
        assert output.lse is not None
        assert output.entropy is not None
        measured = torch.stack([output.lse, output.entropy], dim=-1)  # (B, H, T, 2)
        return torch.cat([output.out, measured], dim=-1).transpose(1, 2).flatten(2)

    return layer


def embeddings() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, T, H * D, generator=generator, dtype=torch.float64)


SPECS = {
    "causal": AttentionSpec(),
    "window as long as the input": AttentionSpec(window=T),
    "window and sinks": AttentionSpec(window=2, sinks=T),
    "alibi": AttentionSpec(alibi_slopes=torch.tensor([0.5, 0.1])),
    "soft-cap and sink logit": AttentionSpec(softcap=3.0, sink_logit=torch.zeros(H)),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_is_causal(backend: str, spec: AttentionSpec) -> None:
    assert_causal(self_attention(spec, backend), embeddings())


@pytest.mark.parametrize(
    "spec",
    [AttentionSpec(causal=False), AttentionSpec(prefix=4), AttentionSpec(window=3)],
    ids=["sees the future", "sees the future of a prefix", "misses the past"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_check_notices_what_is_not_causal(backend: str, spec: AttentionSpec) -> None:
    with pytest.raises(AssertionError, match="output"):
        assert_causal(self_attention(spec, backend), embeddings())
