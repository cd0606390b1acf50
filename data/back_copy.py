"""The back-copy task: made-up text on which attention sinks form within minutes on a CPU.

A sequence is a walk over 32 symbols, of which three are triggers. The symbol after a trigger
repeats the one before the trigger; after any other symbol the next is drawn from that symbol's row
of a transition matrix, random but fixed. A head has something to do behind a trigger (look one
place back) and nothing elsewhere, while its weights must add up to 1 everywhere. Follows the
Bigram-Backcopy task of Guo et al. 2024, "Active-Dormant Attention Heads" (arXiv:2410.13835), whose
chain has the bigrams of Shakespeare instead of random ones.

A walk begins with no trigger, and then no two triggers ever stand side by side, since a trigger is
followed by what was before it. So the rule always has a symbol to repeat.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import numpy as np

from data.documents import Document, Splits
from data.tokenizers import SYMBOLS

VERSION = 1  # raise it when the sequences change
RANDOM_STATE = 20241017

N_SYMBOLS = len(SYMBOLS)
N_TRIGGERS = 3  # the first symbols are the triggers
TRIGGERS = SYMBOLS[:N_TRIGGERS]
LENGTH = 64  # symbols of a sequence
N_TRAIN, N_VAL = 50_000, 1_000  # sequences

_MATRIX, _TRAIN, _VAL = range(3)  # streams of random numbers, independent of each other

Array = np.ndarray[Any, np.dtype[np.floating[Any]]]
IntArray = np.ndarray[Any, np.dtype[np.int64]]


def load_back_copy() -> Splits:
    """Make the sequences of both splits, one document each; always the same ones."""
    train, val = _texts(sequences(N_TRAIN, _TRAIN)), _texts(sequences(N_VAL, _VAL))
    digest = hashlib.sha256("\n".join([*train, "", *val]).encode()).hexdigest()
    return Splits(
        train=[Document(text=text, name=f"sequence {n}") for n, text in enumerate(train)],
        val=[Document(text=text, name=f"validation sequence {n}") for n, text in enumerate(val)],
        fingerprint={f"back-copy sequences, version {VERSION}": digest},
        description=f"the back-copy task ({N_SYMBOLS} symbols, triggers {', '.join(TRIGGERS)})",
        split_rule=f"validation is {N_VAL:,} sequences of a random stream of their own",
    )


@functools.cache
def transitions() -> Array:
    """Probability of the next symbol (column) after each symbol (row), (32, 32).

    Every row is drawn evenly from all distributions (Dirichlet with parameters 1). The rows of the
    triggers are 0: what follows them is not drawn.
    """
    weights = -np.log1p(-_uniform(_MATRIX, (N_SYMBOLS, N_SYMBOLS)))
    weights[:N_TRIGGERS] = 0
    weights[N_TRIGGERS:] /= weights[N_TRIGGERS:].sum(axis=1, keepdims=True)
    return weights


def sequences(n: int, stream: int) -> IntArray:
    """The first `n` sequences of a random stream, (n, LENGTH) numbers of symbols."""
    uniform = _uniform(stream, (n, LENGTH))
    edges = transitions().cumsum(axis=1)
    edges[:, -1] = 1  # whatever rounding left of it
    walks = np.zeros((n, LENGTH), dtype=np.int64)
    walks[:, 0] = N_TRIGGERS + np.floor(uniform[:, 0] * (N_SYMBOLS - N_TRIGGERS))
    for place in range(1, LENGTH):
        now = walks[:, place - 1]
        drawn = (uniform[:, place, None] >= edges[now]).sum(axis=1)  # inverse of the distribution
        walks[:, place] = np.where(now < N_TRIGGERS, walks[:, place - 2], drawn)
    return walks


def attainable_loss() -> float:
    """Entropy of a symbol given all before it, in nats, mean over the places of a sequence.

    No model has a lower expected loss. Exact: the symbols' probabilities are followed from place to
    place. A copy has no entropy, a drawn symbol that of its row.
    """
    plain, _ = _probabilities()
    first = np.log(N_SYMBOLS - N_TRIGGERS)
    return float((first + (plain[:-1] @ _entropy(transitions())).sum()) / LENGTH)


def bigram_loss() -> float:
    """The same for the best model that sees only the symbol before, and so cannot copy."""
    _, behind = _probabilities()
    copied = behind[:-1].sum(axis=0)  # (triggers, 32): how often each is repeated after a trigger
    shares = copied / copied.sum(axis=1, keepdims=True)
    return attainable_loss() + float(copied.sum(axis=1) @ _entropy(shares)) / LENGTH


def _probabilities() -> tuple[Array, Array]:
    """Probability at each place of what the next symbol depends on.

    Returns:
        (LENGTH, 32): of each symbol, 0 for triggers.
        (LENGTH, triggers, 32): of each trigger together with the symbol before it.
    """
    matrix = transitions()
    plain = np.zeros((LENGTH, N_SYMBOLS))
    behind = np.zeros((LENGTH, N_TRIGGERS, N_SYMBOLS))
    plain[0, N_TRIGGERS:] = 1 / (N_SYMBOLS - N_TRIGGERS)
    for place in range(1, LENGTH):
        drawn = plain[place - 1, :, None] * matrix  # (before, now)
        behind[place] = drawn[:, :N_TRIGGERS].T
        plain[place, N_TRIGGERS:] = drawn[:, N_TRIGGERS:].sum(axis=0)
        plain[place] += behind[place - 1].sum(axis=0)
    return plain, behind


def _entropy(probabilities: Array) -> Array:
    """Entropy of each row in nats; 0 for a row of zeros."""
    logs = np.log(np.where(probabilities > 0, probabilities, 1))
    return -(probabilities * logs).sum(axis=-1)


def _uniform(stream: int, shape: tuple[int, ...]) -> Array:
    """Numbers in [0, 1) from the raw bits of PCG64, which NumPy keeps the same over versions."""
    bits = np.random.PCG64([RANDOM_STATE, stream]).random_raw(int(np.prod(shape)))
    return (bits >> np.uint64(11)).reshape(shape) * 2.0**-53


def _texts(walks: IntArray) -> list[str]:
    """Each walk as text, one character per symbol."""
    letters = np.frombuffer(SYMBOLS.encode("ascii"), dtype=np.uint8)
    return [row.tobytes().decode("ascii") for row in letters[walks]]
