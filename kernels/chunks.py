"""Cutting a call into chunks of query rows, each with only the keys that its rows can see.

A chunk of c rows and n keys costs c*n logits of memory, so the chunk size is what keeps memory
linear in the length, and the key range is what makes cost follow the mask: a band for a window,
the touched documents, the keys up to the last row for causal attention.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.spec import AttentionSpec
from kernels.visibility import document_ends, make_layout

# Logits in a chunk, over batch and heads. A CPU is fastest while they stay in the caches of its
# cores, a GPU when there are enough of them to fill it. Memory is linear in the length because
# the number of rows falls as the keys of a chunk grow, down to a fixed MIN_ROWS.
CPU_LOGITS_PER_THREAD = 2**17
DEVICE_LOGITS = 2**25
MAX_ROWS = 512
MIN_ROWS = 16


@dataclass(frozen=True)
class Chunk:
    """A block of query rows and the keys it visits: the first `sinks` keys, then `keys`."""

    rows: slice
    sinks: int
    keys: slice

    def key_positions(self, device: torch.device) -> Tensor:
        """Positions of the visited keys, ascending: (n,)."""
        band = torch.arange(self.keys.start, self.keys.stop, device=device)
        if not self.sinks:
            return band
        return torch.cat([torch.arange(self.sinks, device=device), band])

    def columns(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Where key positions stand among the visited keys, and which of them are visited."""
        is_sink = positions < self.sinks
        in_band = (positions >= self.keys.start) & (positions < self.keys.stop)
        column = torch.where(is_sink, positions, positions - self.keys.start + self.sinks)
        visited = is_sink | in_band
        return column.masked_fill(~visited, 0), visited

    def take(self, x: Tensor) -> Tensor:
        """Pick the visited keys from dimension 1: (N, S, ...) to (N, n, ...)."""
        band = x[:, self.keys]
        return torch.cat([x[:, : self.sinks], band], dim=1) if self.sinks else band

    def add_to(self, total: Tensor, part: Tensor) -> None:
        """Add (N, n, ...) to the visited keys of dimension 1 of total (N, S, ...), in place."""
        if self.sinks:
            total[:, : self.sinks] += part[:, : self.sinks]
        total[:, self.keys] += part[:, self.sinks :]


def chunks(spec: AttentionSpec, q: Tensor, k: Tensor, kv_lengths: Tensor | None) -> Iterator[Chunk]:
    """Yield the chunks of a call with q (B, H, T, D) and k (B, Hkv, S, D), in row order."""
    batch, heads, n_rows, _ = q.shape
    firsts, stops = _key_bounds(spec, n_rows, k.shape[2], kv_lengths)
    limit = _logits_per_chunk(q.device) // (batch * heads)
    sinks = spec.sinks if spec.documents is None else 0  # with documents the bounds hold them
    row = 0
    while row < n_rows:
        count = min(MAX_ROWS, n_rows - row)
        while count > MIN_ROWS and count * (stops[row + count - 1] - firsts[row]) > limit:
            count = (count + 1) // 2
        first = firsts[row]
        stop = max(stops[row + count - 1], first + 1)  # rows that see nothing visit one key
        yield Chunk(slice(row, row + count), min(sinks, first), slice(first, stop))
        row += count


def _logits_per_chunk(device: torch.device) -> int:
    if device.type == "cpu":
        return CPU_LOGITS_PER_THREAD * torch.get_num_threads()
    return DEVICE_LOGITS


def _key_bounds(
    spec: AttentionSpec, n_rows: int, n_keys: int, kv_lengths: Tensor | None
) -> tuple[list[int], list[int]]:
    """First visible key of each row and one past its last, over the batch, as host integers.

    Neither ever decreases from row to row, so a chunk needs the first of its first row and the
    stop of its last. Sinks beside a window are left out, unless there are documents: each has
    its own, so its rows then reach back to its start.
    """
    if spec.window is None and spec.documents is None:
        kv_lengths = None  # shorter sequences only see less of the same range: spare the copy
    source = spec.documents if spec.documents is not None else kv_lengths
    device = torch.device("cpu") if source is None else source.device
    layout = make_layout(spec, n_rows, n_keys, kv_lengths, device)
    positions, starts = layout.positions, layout.starts

    firsts = starts
    if spec.window is not None and not (spec.sinks and spec.documents is not None):
        firsts = torch.maximum(starts, positions - spec.window + 1)
    if spec.documents is None:
        ends = torch.full_like(positions, n_keys)
    else:
        ends = document_ends(spec.documents).gather(
            1, positions.clamp(0, n_keys - 1).expand_as(starts)
        )
    stops = ends
    if spec.causal:
        stops = positions + 1
    if spec.prefix:
        in_prefix = positions - starts < spec.prefix
        firsts = torch.where(in_prefix, starts, firsts)
        prefix_end = torch.minimum(starts + spec.prefix, ends)
        stops = torch.where(in_prefix, torch.maximum(stops, prefix_end), stops)
    low = firsts.amin(dim=0).clamp(0, n_keys - 1)
    high = stops.amax(dim=0).clamp(0, n_keys)
    first_list, stop_list = torch.stack([low, high]).tolist()
    return first_list, stop_list
