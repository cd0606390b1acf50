"""Who sees whom: the positions of queries and keys, document starts, and the mask from both.

Every backend in plain PyTorch takes its mask from `Layout.visible`, so the rule is written
once. A mask is asked for some rows and some keys and never needs to be (T, S) whole.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.spec import AttentionSpec

Rows = slice | Tensor  # query rows by number: the same in every sequence, or (B, rows)


def document_starts(documents: Tensor) -> Tensor:
    """First position of the document that each token belongs to: (B, S) ids to (B, S) int64."""
    index = torch.arange(documents.shape[1], device=documents.device)
    changed = torch.zeros_like(documents, dtype=torch.bool)
    changed[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(changed, index, 0).cummax(dim=1).values


def document_ends(documents: Tensor) -> Tensor:
    """One past the last position of the document that each token belongs to: (B, S) int64."""
    return documents.shape[1] - document_starts(documents.flip(1)).flip(1)


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the rows of one call sit, and what each of them sees.

    The leading axis b of every tensor is B, or 1 where all sequences of the batch are alike.

    Attributes:
        spec: the rule.
        n_keys: S, the number of keys in the tensors.
        positions: (b, T), position of each query row; negative where T exceeds the keys.
        starts: (b, T), first position of the row's document.
        key_starts: (b, S), the same for keys; None without documents.
        kv_lengths: (B, 1), number of valid keys; None where all S are valid.
    """

    spec: AttentionSpec
    n_keys: int
    positions: Tensor
    starts: Tensor
    key_starts: Tensor | None
    kv_lengths: Tensor | None

    def distance(self, rows: Rows, keys: Tensor) -> Tensor:
        """How far back each key lies from each row, i - j: (b, rows, keys) int64."""
        return _pick(self.positions, rows).unsqueeze(2) - keys

    def visible(self, rows: Rows, keys: Tensor) -> Tensor:
        """Whether each row may see each of the given key positions: (b, rows, keys) bool.

        Keys are positions (n,) that all rows ask about, or each row's own, (b, rows, n).
        """
        seen = self._visible_by_order(rows, keys)
        if self.key_starts is not None:
            key_starts = _starts_of(self.key_starts, keys)
            seen = seen & (key_starts == _pick(self.starts, rows).unsqueeze(2))
        if self.kv_lengths is not None:
            seen = seen & (keys < self.kv_lengths.unsqueeze(2))
        return seen

    def _visible_by_order(self, rows: Rows, keys: Tensor) -> Tensor:
        """The rule inside one document, by position alone."""
        spec = self.spec
        distance = self.distance(rows, keys)
        if not spec.causal:
            return torch.ones_like(distance, dtype=torch.bool)
        seen = distance >= 0
        starts = _pick(self.starts, rows).unsqueeze(2)
        if spec.window is not None:
            near = distance < spec.window
            if spec.sinks:
                near = near | (keys - starts < spec.sinks)
            seen = seen & near
        if spec.prefix:
            row_in_prefix = _pick(self.positions, rows).unsqueeze(2) - starts < spec.prefix
            seen = seen | (row_in_prefix & (keys - starts < spec.prefix))
        return seen


def _pick(x: Tensor, rows: Rows) -> Tensor:
    """What (b, T) holds for some rows: (b, rows)."""
    if isinstance(rows, slice):
        return x[:, rows]
    return x.expand(rows.shape[0], -1).gather(1, rows)


def _starts_of(key_starts: Tensor, keys: Tensor) -> Tensor:
    """Document starts of keys (n,) or (b, rows, n): (B, 1, n) or (B, rows, n)."""
    if keys.ndim == 1:
        return key_starts[:, None, keys]
    batch, count = key_starts.shape[0], keys.shape[1]
    return key_starts.unsqueeze(1).expand(-1, count, -1).gather(2, keys.expand(batch, -1, -1))


def make_layout(
    spec: AttentionSpec, n_rows: int, n_keys: int, kv_lengths: Tensor | None, device: torch.device
) -> Layout:
    """Lay out T = n_rows queries against S = n_keys keys, the last query at the last key."""
    rows = torch.arange(n_rows, device=device)
    if kv_lengths is None:
        positions = (n_keys - n_rows + rows)[None]
    else:
        positions = kv_lengths[:, None].long() - n_rows + rows
    key_starts = None
    starts = torch.zeros_like(positions)
    if spec.documents is not None:
        key_starts = document_starts(spec.documents)
        inside = positions.clamp(0, n_keys - 1).expand(key_starts.shape[0], n_rows)
        starts = key_starts.gather(1, inside)
    return Layout(
        spec=spec,
        n_keys=n_keys,
        positions=positions,
        starts=starts,
        key_starts=key_starts,
        kv_lengths=None if kv_lengths is None else kv_lengths[:, None],
    )
