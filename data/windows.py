"""Windows: how a token file is cut into the rows of a batch, and in which order they are seen.

Every row has `context_length` positions. A position's target is the token that follows it; targets
of `IGNORE` carry no loss. `data.mode` says how windows meet the edges of documents:

- `stream`: documents lie one after the other and window n covers the tokens [n·L, n·L + L), its
  targets [n·L + 1, n·L + L + 1). Windows begin and end anywhere and run over document edges.
- `document`: the same windows, but each position also has the number of its document, so that
  attention and positions can stay inside it. The last token of a document is followed by the
  first of the next. If that is the shared BOS/EOS token it says "here the text ends", which a model
  can learn from the document alone, and counts. Any other token belongs to a text that the position
  cannot know, and its target is ignored.
- `bos_aligned`: each window begins with BOS and holds tokens of one document only. A document of
  more than L tokens goes on in further windows, which begin with BOS again, so that each of its
  tokens is a target exactly once. What is left of its last window is padding without loss. The
  padding lies behind the text, where causal attention does not see it.

No token is a target twice in an epoch. `stream` and `document` drop a last partial window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from data.sources import MODES
from data.token_files import TokenFile

IGNORE = -100  # the target that carries no loss
NO_BOS = (
    "data.mode=bos_aligned needs a tokenizer with a BOS token, and this one has none; "
    "use tokenizer=bpe, or data.mode=stream or document"
)

IntArray = np.ndarray[Any, np.dtype[np.int64]]


class Batch(NamedTuple):
    """Rows for the model: (B, T) int64 each; `documents` only if attention must stay inside."""

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None


class Windows:
    """The windows of a token file, by number.

    Attributes:
        dropped: tokens at the end that no window predicts, as they would fill only part of one.
        padding: positions without text in all windows together (`bos_aligned` only).

    Raises:
        ValueError: the split is shorter than one window, the mode is unknown, or `bos_aligned` is
            asked of a tokenizer without BOS.
    """

    def __init__(self, tokens: TokenFile, context_length: int, mode: str) -> None:
        if context_length < 1:
            raise ValueError(f"model.context_length={context_length} must be at least 1")
        if mode not in MODES:
            raise ValueError(f"data.mode={mode} is unknown; choose one of {', '.join(MODES)}")
        self.context_length = context_length
        self.mode = mode
        self._cut: _Packed | _BosAligned
        if mode == "bos_aligned":
            self._cut = _BosAligned(tokens, context_length)
        else:
            self._cut = _Packed(tokens, context_length, with_documents=mode == "document")
        self.dropped = self._cut.dropped
        self.padding = self._cut.padding

    def __len__(self) -> int:
        return self._cut.n_windows

    def batch(self, indices: Sequence[int] | IntArray) -> Batch:
        """Rows of the windows with the given numbers, in the given order."""
        numbers = np.asarray(indices, dtype=np.int64)
        if numbers.min() < 0 or numbers.max() >= len(self):
            raise IndexError(f"window numbers must lie in [0, {len(self)})")
        return self._cut.batch(numbers)

    def describe(self) -> str:
        """Say in one line how many windows there are and what is not in them."""
        text = f"{len(self):,} windows of {self.context_length} ({self.mode})"
        if self.mode == "bos_aligned":
            return f"{text}, {self.padding / (len(self) * self.context_length):.1%} padding"
        return f"{text}, {self.dropped:,} tokens dropped"


class _Packed:
    """Windows that lie one after the other over all documents: `stream` and `document`."""

    padding = 0

    def __init__(self, tokens: TokenFile, length: int, *, with_documents: bool) -> None:
        self._tokens = tokens
        self._length = length
        self._with_documents = with_documents
        self._one_token_ends_and_begins = _one_token_ends_and_begins(tokens)
        n_targets = len(tokens) - 1  # the very first token is predicted by none
        self.n_windows = n_targets // length
        if self.n_windows < 1:
            raise ValueError(_too_short(tokens, length))
        self.dropped = n_targets - self.n_windows * length

    def batch(self, numbers: IntArray) -> Batch:
        starts = numbers * self._length
        rows = self._tokens.read_rows(starts.tolist(), self._length + 1)  # (B, T + 1)
        tokens = rows[:, :-1].astype(np.int64)  # (B, T)
        targets = rows[:, 1:].astype(np.int64)  # (B, T)
        if not self._with_documents:
            return _as_batch(tokens, targets)
        positions = starts[:, None] + np.arange(self._length + 1)  # (B, T + 1)
        documents = np.searchsorted(self._tokens.starts, positions, side="right")
        if not self._one_token_ends_and_begins:
            targets[documents[:, 1:] != documents[:, :-1]] = IGNORE
        # Counted from the row's first document, so that any integer type can hold them.
        return _as_batch(tokens, targets, documents[:, :-1] - documents[:, :1])


class _BosAligned:
    """Windows that begin with BOS and hold tokens of one document."""

    dropped = 0

    def __init__(self, tokens: TokenFile, length: int) -> None:
        bos_id = tokens.provenance.bos_id
        if bos_id is None:
            raise ValueError(NO_BOS)
        self._tokens = tokens
        self._length = length
        self._bos_id = bos_id
        self._firsts = tokens.starts + 1  # first target of each document: what follows its BOS
        # Past each document's last target, which is the next document's BOS if that is also EOS.
        next_starts = tokens.starts[1:] + int(_one_token_ends_and_begins(tokens))
        self._ends = np.append(next_starts, len(tokens))
        n_targets = self._ends - self._firsts
        if not n_targets.size:
            raise ValueError(_too_short(tokens, 1))
        n_windows = -(-n_targets // length)  # of each document, rounded up
        self._first_windows = np.cumsum(n_windows) - n_windows
        self.n_windows = int(n_windows.sum())
        self.padding = self.n_windows * length - int(n_targets.sum())

    def batch(self, numbers: IntArray) -> Batch:
        document = np.searchsorted(self._first_windows, numbers, side="right") - 1  # (B,)
        starts = self._firsts[document] + (numbers - self._first_windows[document]) * self._length
        counts = np.minimum(self._ends[document] - starts, self._length)
        targets = np.full((len(numbers), self._length), IGNORE, dtype=np.int64)  # (B, T)
        for row, start, count in zip(targets, starts.tolist(), counts.tolist(), strict=True):
            row[:count] = self._tokens.read(start, count)
        tokens = np.full_like(targets, self._bos_id)  # (B, T)
        tokens[:, 1:] = np.where(targets[:, :-1] == IGNORE, self._bos_id, targets[:, :-1])
        return _as_batch(tokens, targets)


class WindowOrder:
    """In which order windows are seen: each once per epoch, shuffled anew for every epoch.

    The order of epoch e depends on (seed, e) alone: not on the batch size, the number of ranks, or
    where a run was resumed. It is the sorting order of random keys from PCG64, whose output NumPy
    keeps over versions, which it does not promise for `permutation`.

    Memory: 8 bytes per window, and 12 more while an epoch's order is made. For ten million windows
    that is 80 MB, 200 MB at the start of an epoch, where it takes one to two seconds.

    Attributes:
        n_windows, seed: as given.
        epoch: completed passes over all windows.
        offset: windows already seen of the pass under way.
    """

    VERSION = 1

    def __init__(self, n_windows: int, seed: int) -> None:
        if n_windows < 1:
            raise ValueError(f"an order needs at least one window, got {n_windows}")
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        self.n_windows = n_windows
        self.seed = seed
        self.epoch = 0
        self.offset = 0
        self._order = np.empty(0, dtype=np.int64)
        self._order_epoch = -1

    def next_indices(self, count: int) -> IntArray:
        """Numbers of the next `count` windows, going on in the next epoch where one ends."""
        parts = []
        while count > 0:
            part = self._order_of_epoch()[self.offset : self.offset + count]
            parts.append(part)
            count -= len(part)
            self.offset += len(part)
            if self.offset == self.n_windows:
                self.epoch, self.offset = self.epoch + 1, 0
        return np.concatenate(parts)

    def state_dict(self) -> dict[str, int]:
        """Return the position, for a checkpoint: plain integers."""
        return {
            "version": self.VERSION,
            "epoch": self.epoch,
            "offset": self.offset,
            "seed": self.seed,
            "n_windows": self.n_windows,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on at a saved position.

        Raises:
            ValueError: the position belongs to other windows or another seed.
        """
        if state.get("version") != self.VERSION:
            raise ValueError(
                f"the saved data position has version {state.get('version')}, "
                f"this code reads {self.VERSION}"
            )
        for name, knobs in (
            ("n_windows", "the text, the tokenizer, data.mode or model.context_length"),
            ("seed", "seed"),
        ):
            saved, own = state[name], getattr(self, name)
            if saved != own:
                raise ValueError(
                    f"the saved data position is for {name}={saved}, but this run has {own}: "
                    f"{knobs} changed; init_from takes over the weights alone"
                )
        self.epoch, self.offset = state["epoch"], state["offset"]

    def _order_of_epoch(self) -> IntArray:
        if self._order_epoch != self.epoch:
            keys = np.random.PCG64([self.seed, self.epoch]).random_raw(self.n_windows)
            self._order = np.argsort(keys, kind="stable")
            self._order_epoch = self.epoch
        return self._order


def fixed_windows(total: int, limit: int | None) -> IntArray:
    """Return all window numbers, or `limit` of them spread evenly over the split."""
    if limit is None or limit >= total:
        return np.arange(total)
    return np.arange(limit) * total // limit


def _as_batch(tokens: IntArray, targets: IntArray, documents: IntArray | None = None) -> Batch:
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(targets),
        None if documents is None else torch.from_numpy(documents),
    )


def _one_token_ends_and_begins(tokens: TokenFile) -> bool:
    provenance = tokens.provenance
    return provenance.bos_id is not None and provenance.bos_id == provenance.eos_id


def _too_short(tokens: TokenFile, length: int) -> str:
    split = tokens.provenance.split
    more = "data.val_fraction or data.val_path" if split == "val" else "data.path"
    return (
        f"the {split} split has {len(tokens)} tokens, but one window of "
        f"model.context_length={length} needs {length + 1}; lower model.context_length or give it "
        f"more text ({more})"
    )
