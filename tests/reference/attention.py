"""Attention by loops over sequences, heads and rows, in float64: slow and obviously right.

It follows the written definition one formula at a time and shares no code with `kernels`. All
arrays are numpy; the gradients are the derivatives worked out by hand.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
ROW_STATISTICS = (
    "lse",
    "entropy",
    "entropy_tokens",
    "max_logit",
    "max_prob",
    "null_mass",
    "mean_distance",
)


@dataclass(kw_only=True)
class Problem:
    """Inputs of one call; the fields mean what they mean in `AttentionSpec`."""

    q: Array
    k: Array
    v: Array
    causal: bool = True
    window: int | None = None
    sinks: int = 0
    prefix: int = 0
    documents: NDArray[np.int64] | None = None
    alibi_slopes: Array | None = None
    softcap: float | None = None
    scale: float | None = None
    sink_logit: Array | None = None
    kv_lengths: NDArray[np.int64] | None = None
    sink_mass: tuple[int, ...] = ()

    def factor(self) -> float:
        return 1 / math.sqrt(self.q.shape[3]) if self.scale is None else self.scale

    def document_start(self, b: int, i: int) -> int:
        """First position of i's document; rows before the first key count to the first one."""
        if self.documents is None:
            return 0
        start = max(i, 0)
        while start > 0 and self.documents[b, start - 1] == self.documents[b, start]:
            start -= 1
        return start

    def sees(self, b: int, i: int, j: int, length: int) -> bool:
        """Whether key j is visible from position i of sequence b."""
        if j >= length:
            return False
        start = self.document_start(b, i)
        if self.documents is not None and self.document_start(b, j) != start:
            return False
        if not self.causal:
            return True
        if i - start < self.prefix and j - start < self.prefix:
            return True
        if j > i:
            return False
        if self.window is None:
            return True
        return i - j < self.window or j - start < self.sinks


@dataclass(kw_only=True)
class Row:
    """One query row: what it sees, and the softmax over it."""

    b: int
    h: int
    kv_head: int
    t: int
    i: int
    keys: list[int]
    raw: Array  # scale * q . k over `keys`, as are the next three
    logits: Array
    weights: Array
    tokens: Array  # weights of the real keys alone, summing to 1
    null: float
    lse: float


def rows(problem: Problem) -> Iterator[Row]:
    """Every query row of the call, one by one."""
    batch, heads, n_rows, _ = problem.q.shape
    kv_heads, n_keys = problem.k.shape[1:3]
    for b in range(batch):
        length = n_keys if problem.kv_lengths is None else int(problem.kv_lengths[b])
        for t in range(n_rows):
            i = length - n_rows + t
            keys = [j for j in range(n_keys) if problem.sees(b, i, j, length)]
            for h in range(heads):
                yield _row(problem, b, h, h // (heads // kv_heads), t, i, keys)


def _row(problem: Problem, b: int, h: int, kv_head: int, t: int, i: int, keys: list[int]) -> Row:
    raw = np.array([problem.factor() * problem.q[b, h, t] @ problem.k[b, kv_head, j] for j in keys])
    logits = raw.copy()
    if problem.softcap is not None:
        logits = problem.softcap * np.tanh(raw / problem.softcap)
    if problem.alibi_slopes is not None:
        logits = logits - problem.alibi_slopes[h] * np.array([abs(i - j) for j in keys])
    options = list(logits)
    if problem.sink_logit is not None:
        options.append(problem.sink_logit[h])
    lse = -math.inf
    if options:
        top = max(options)
        lse = top + math.log(sum(math.exp(s - top) for s in options))
    weights = np.array([math.exp(s - lse) for s in logits])
    null = 0.0 if problem.sink_logit is None else math.exp(problem.sink_logit[h] - lse)
    tokens = np.array([math.exp(s - logits.max()) for s in logits])
    tokens = tokens / tokens.sum() if keys else tokens
    return Row(
        b=b,
        h=h,
        kv_head=kv_head,
        t=t,
        i=i,
        keys=keys,
        raw=raw,
        logits=logits,
        weights=weights,
        tokens=tokens,
        null=null,
        lse=lse,
    )


def entropy(weights: Array) -> float:
    """-sum p log p in nats."""
    return -sum(p * math.log(p) for p in weights if p > 0)


def attention(problem: Problem) -> dict[str, Array]:
    """Output, every statistic and the column mass, by name."""
    batch, heads, n_rows, _ = problem.q.shape
    results = {name: np.zeros((batch, heads, n_rows)) for name in ROW_STATISTICS}
    results["out"] = np.zeros((batch, heads, n_rows, problem.v.shape[3]))
    results["sink_mass"] = np.zeros((batch, heads, n_rows, len(problem.sink_mass)))
    results["column_mass"] = np.zeros((batch, heads, problem.k.shape[2]))
    for row in rows(problem):
        at = row.b, row.h, row.t
        results["lse"][at] = row.lse
        results["null_mass"][at] = row.null
        results["entropy"][at] = entropy(np.array([*row.weights, row.null]))
        results["entropy_tokens"][at] = entropy(row.tokens)
        results["max_logit"][at] = max(row.raw, default=-math.inf)
        results["max_prob"][at] = max(row.weights, default=0.0)
        start = problem.document_start(row.b, row.i)
        for j, p, p_token in zip(row.keys, row.weights, row.tokens, strict=True):
            results["out"][at] += p * problem.v[row.b, row.kv_head, j]
            results["mean_distance"][at] += p_token * (row.i - j)
            results["column_mass"][row.b, row.h, j] += p
            for n, k in enumerate(problem.sink_mass):
                if start <= j < start + k:
                    results["sink_mass"][at][n] += p
    return results


def gradients(problem: Problem, d_out: Array, d_lse: Array, d_entropy: Array) -> dict[str, Array]:
    """Gradients of every input, given those of the output, lse and entropy."""
    heads = problem.q.shape[1]
    grads = {name: np.zeros_like(getattr(problem, name)) for name in ("q", "k", "v")}
    grads["alibi_slopes"] = np.zeros(heads)
    grads["sink_logit"] = np.zeros(heads)
    for row in rows(problem):
        if row.lse == -math.inf:
            continue
        b, h, g, t = row.b, row.h, row.kv_head, row.t
        upstream = d_out[b, h, t], d_lse[b, h, t], d_entropy[b, h, t]
        values = problem.v[b, g, row.keys]
        for j, p, s, x in zip(row.keys, row.weights, row.logits, row.raw, strict=True):
            d_s = _logit_gradient(row, s, problem.v[b, g, j], values, *upstream)
            d_x = d_s
            if problem.softcap is not None:
                d_x = d_s * (1 - math.tanh(x / problem.softcap) ** 2)
            grads["q"][b, h, t] += problem.factor() * d_x * problem.k[b, g, j]
            grads["k"][b, g, j] += problem.factor() * d_x * problem.q[b, h, t]
            grads["v"][b, g, j] += p * d_out[b, h, t]
            grads["alibi_slopes"][h] -= d_s * abs(row.i - j)
        if problem.sink_logit is not None:
            z = problem.sink_logit[h]
            nothing = np.zeros(problem.v.shape[3])
            grads["sink_logit"][h] += _logit_gradient(row, z, nothing, values, *upstream)
    return grads


def _logit_gradient(
    row: Row, s: float, value: Array, values: Array, d_out: Array, d_lse: float, d_entropy: float
) -> float:
    """Gradient of one logit s whose entry has this value, beside all `values` of the row."""
    log_p = s - row.lse
    out = row.weights @ values
    full_entropy = entropy(np.array([*row.weights, row.null]))
    from_out = d_out @ (value - out)
    return math.exp(log_p) * (from_out + d_lse - d_entropy * (log_p + full_entropy))
