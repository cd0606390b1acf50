"""The evicting cache against a slow version that keeps everything and says what survives."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from model.caches import logit_error
from model.decoder import Decoder
from model.evicting_cache import EvictingCache
from model.kv_cache import FullCache
from model.positions import rotate
from tests.model.tiny import OPTIONS, tiny_config, tiny_model, tiny_tokens

CHANGES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "multi-head": {"n_kv_head": None, "qk_norm": True},
    "multi-query": {"n_kv_head": 1, "position": "none"},
    "yarn": OPTIONS["yarn"],
    "learned": {"position": "learned"},
    "sink logit": {"sink_logit": "learned", "output_gate": True},
    "soft-cap": {"softcap": 5.0},
}


class SlowEviction:
    """Keeps every key, and a list of those that each head has not dropped."""

    def __init__(self, model: Decoder, budget: int, sinks: int, recent: int) -> None:
        self.model, self.config = model, model.config
        self.budget, self.sinks, self.recent = budget, sinks, recent
        self.read = 0
        heads = [(layer, h) for layer in range(self.config.n_layer) for h in self._kv_heads()]
        self.alive: dict[tuple[int, int], list[int]] = {head: [] for head in heads}
        self.received: dict[tuple[int, int], dict[int, float]] = {head: {} for head in heads}
        self.keys: list[Tensor | None] = [None] * self.config.n_layer
        self.values: list[Tensor | None] = [None] * self.config.n_layer

    def _kv_heads(self) -> range:
        return range(self.config.kv_heads)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Logits (1, n, V) of a chunk of one sequence, (1, n)."""
        model, n = self.model, tokens.shape[1]
        positions = torch.arange(self.read, self.read + n)[None]
        self.read += n
        x = model.embed(tokens)
        if model.position_embed is not None:
            x = x + model.position_embed.weight[positions]
        for layer, block in enumerate(model.blocks):
            inside = block.attn_norm(x)
            q, k, v = block.attn.queries_keys_values(inside, None)
            if model.rope is not None:
                rotation = model.rope.at(positions, n)
                q, k = (rotate(each.transpose(1, 2), rotation).transpose(1, 2) for each in (q, k))
            for kept, new in ((self.keys, k), (self.values, v)):
                kept[layer] = new if kept[layer] is None else torch.cat([kept[layer], new], dim=2)
            heads = torch.cat(
                [self._attend(layer, head, q[0, head]) for head in range(self.config.n_head)], -1
            )
            for head in self._kv_heads():
                self._drop(layer, head, n)
            if block.attn.gate_proj is not None:
                heads = heads * torch.sigmoid(block.attn.gate_proj(inside))
            x = x + block.attn.o_proj(heads)
            x = x + block.mlp(block.mlp_norm(x))
        return model.lm_head(model.norm(x))

    def _attend(self, layer: int, head: int, q: Tensor) -> Tensor:
        """One query head on what its key head has, and the chunk itself: (1, n, D)."""
        kv_head = head // self.config.group
        spec = self.model.blocks[layer].attn.spec()
        n = q.shape[0]
        rows = []
        for t in range(n):
            position = self.read - n + t
            seen = [*self.alive[layer, kv_head], *range(self.read - n, position + 1)]
            scores = self.keys[layer][0, kv_head, seen] @ q[t] / math.sqrt(q.shape[1])
            if spec.softcap:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            null = [] if spec.sink_logit is None else [spec.sink_logit[head].double().view(1)]
            weights = torch.cat([scores, *null]).softmax(0)[: len(seen)]
            for key, weight in zip(seen, weights.tolist(), strict=True):
                total = self.received[layer, kv_head]
                total[key] = total.get(key, 0.0) + weight
            rows.append(weights @ self.values[layer][0, kv_head, seen])
        return torch.stack(rows)[None]

    def _drop(self, layer: int, head: int, n: int) -> None:
        alive = [*self.alive[layer, head], *range(self.read - n, self.read)]
        while len(alive) > self.budget:
            may_go = [k for k in alive if self.sinks <= k < self.read - self.recent]
            alive.remove(min(may_go, key=lambda k: self.received[layer, head][k]))
        self.alive[layer, head] = alive


def check(
    changes: dict[str, Any], chunks: list[int], budget: int, sinks: int, recent: int
) -> EvictingCache:
    model = tiny_model(**({"init_std": 0.4} | changes)).double()
    cache = EvictingCache(
        model.config, budget=budget, sinks=sinks, recent=recent, dtype=torch.float64
    )
    slow = SlowEviction(copy.deepcopy(model), budget, sinks, recent)
    for part in tiny_tokens(1, sum(chunks)).split(chunks, 1):
        with torch.no_grad():
            actual = model(part, cache=cache).logits
        torch.testing.assert_close(actual, slow.logits(part), atol=1e-5, rtol=0)
        for layer in range(model.config.n_layer):
            assert cache.kept(layer)[0].tolist() == [
                slow.alive[layer, head] for head in range(model.config.kv_heads)
            ]
    return cache


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("chunks", [[20, *[1] * 8], [3, 9, 1, 8, 1, 1]])
def test_logits_and_survivors_are_those_of_the_slow_version(name: str, chunks: list[int]) -> None:
    check(CHANGES[name], chunks, budget=9, sinks=2, recent=3)


@pytest.mark.parametrize(
    ("budget", "sinks", "recent"), [(1, 0, 1), (5, 4, 1), (6, 0, 2), (8, 2, 6), (31, 4, 2)]
)
def test_small_and_large_budgets(budget: int, sinks: int, recent: int) -> None:
    check({}, [12, *[1] * 12], budget, sinks, recent)


def test_heads_keep_different_tokens_but_all_the_sinks_and_the_latest() -> None:
    cache = check({"n_kv_head": None}, [16, *[1] * 16], budget=10, sinks=2, recent=4)
    kept = [head for layer in range(2) for head in cache.kept(layer)[0].tolist()]
    assert len({tuple(head) for head in kept}) > 4
    for head in kept:
        assert head == sorted(head)
        assert head[:2] == [0, 1]
        assert head[-4:] == [28, 29, 30, 31]


def test_within_the_budget_it_is_a_full_cache() -> None:
    model = tiny_model(mask="prefix", prefix=3)
    tokens = tiny_tokens(2, 32)
    caches = FullCache(model.config, batch=2), EvictingCache(model.config, batch=2, budget=32)
    with torch.no_grad():
        for part in tokens.split([7, 1, 1, 20, 1, 1, 1], 1):
            one, other = (model(part, cache=cache).logits for cache in caches)
            torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_error_is_finite_and_falls_with_the_budget() -> None:
    model = tiny_model()
    errors = [
        logit_error(
            model,
            EvictingCache(model.config, batch=2, budget=budget),
            tiny_tokens(2, 32),
            singly=16,
        ).mean_kl
        for budget in (6, 14, 28, 32)
    ]
    assert errors == sorted(errors, reverse=True)
    assert 1e-4 < errors[0] < 1
    assert errors[-1] < 1e-9


def test_memory_is_that_of_the_budget() -> None:
    cache = EvictingCache(tiny_config(), batch=3, budget=10, dtype=torch.bfloat16)
    layers, keys_and_values, bytes_each = 2, 2, 2
    assert cache.nbytes == layers * keys_and_values * 3 * 2 * 10 * 8 * bytes_each
    assert cache.recent == 3


def test_every_sequence_can_begin_with_the_content_of_one_and_be_reset() -> None:
    model = tiny_model()
    tokens = tiny_tokens(1, 32)
    options: dict[str, Any] = {"budget": 9, "sinks": 2}
    single = EvictingCache(model.config, capacity=21, **options)
    many = EvictingCache(model.config, batch=3, **options)
    with torch.no_grad():
        model(tiny_tokens(3, 30, seed=5), cache=many)
        many.reset()
        model(tokens[:, :21], cache=single)
        many.copy_from(single)
        alone = EvictingCache(model.config, **options)
        model(tokens[:, :21], cache=alone)
        for token in tokens[:, 21:].split(1, 1):
            expected = model(token, cache=alone).logits.expand(3, -1, -1)
            actual = model(token.expand(3, 1), cache=many).logits
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    assert many.kept(1)[2].equal(alone.kept(1)[0])


def test_the_context_remains_the_limit() -> None:
    cache = EvictingCache(tiny_config(), budget=8)
    with pytest.raises(ValueError, match="holds 0 of at most 32 tokens; 33 more do not fit"):
        cache.extend(33)
    assert cache.length == 0


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"position": "alibi"}, {"budget": 9}, r"model\.position=alibi cannot evict"),
        ({"windows": [4, 0]}, {"budget": 9}, r"model\.windows=\[4, 0\] cannot evict"),
        ({"mask": "prefix", "prefix": 8}, {"budget": 7}, r"budget=7 .* whole model\.prefix=8"),
        ({}, {"budget": 4}, "budget=4 must be at least 5: sinks=4 and the 1 most recent"),
        ({}, {"budget": 6, "sinks": 2, "recent": 5}, "budget=6 must be at least 7: sinks=2"),
        ({}, {"budget": 6, "sinks": -2}, "sinks=-2 must be at least 0"),
        ({}, {"budget": 6, "recent": 0}, "recent=0 must be at least 1"),
    ],
)
def test_what_cannot_evict_is_one_line(changes, options, message) -> None:
    with pytest.raises(ValueError, match=message) as error:
        EvictingCache(tiny_config(**changes), **options)
    assert "\n" not in str(error.value)
