"""Chunks cover every row once, and visit the keys their rows see and few others."""

import pytest
import torch

from kernels import chunks
from kernels.attention import AttentionSpec
from kernels.chunks import Chunk
from kernels.visibility import make_layout
from tests.kernels.cases import document_ids


def plan(
    spec: AttentionSpec, n_rows: int, n_keys: int, kv_lengths: torch.Tensor | None = None
) -> list[Chunk]:
    batch = 1 if kv_lengths is None else len(kv_lengths)
    q, k = torch.empty(batch, 2, n_rows, 4), torch.empty(batch, 2, n_keys, 4)
    return list(chunks.chunks(spec, q, k, kv_lengths))


SPECS = {
    "causal": AttentionSpec(),
    "bidirectional": AttentionSpec(causal=False),
    "window": AttentionSpec(window=7),
    "window and sinks": AttentionSpec(window=7, sinks=3),
    "prefix": AttentionSpec(prefix=30, window=4),
    "documents": AttentionSpec(documents=document_ids(((1, 40, 20, 3, 36),))),
    "documents and all": AttentionSpec(
        documents=document_ids(((1, 40, 20, 3, 36),)), window=5, sinks=2, prefix=9
    ),
    "documents, bidirectional": AttentionSpec(documents=document_ids(((50, 50),)), causal=False),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("n_rows", [1, 37, 100, 113])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_visible_key_is_visited_once(spec: AttentionSpec, n_rows: int) -> None:
    n_keys = 100
    layout = make_layout(spec, n_rows, n_keys, None, torch.device("cpu"))
    whole = layout.visible(slice(None), torch.arange(n_keys))[0]
    row = 0
    for chunk in plan(spec, n_rows, n_keys):
        assert chunk.rows.start == row
        row = chunk.rows.stop
        visited = chunk.key_positions(torch.device("cpu"))
        assert (visited.diff() > 0).all(), "ascending, none twice"
        unvisited = torch.ones(n_keys, dtype=torch.bool).index_fill(0, visited, False)
        assert not whole[chunk.rows][:, unvisited].any()
    assert row == n_rows


def visited_keys(spec: AttentionSpec, n: int, kv_lengths: torch.Tensor | None = None) -> int:
    """Logits computed per head over a whole call."""
    return sum(
        (chunk.rows.stop - chunk.rows.start) * len(chunk.key_positions(torch.device("cpu")))
        for chunk in plan(spec, n, n, kv_lengths)
    )


def test_work_follows_the_mask() -> None:
    n = 4096
    bidirectional = visited_keys(AttentionSpec(causal=False), n)
    assert bidirectional == n * n
    assert visited_keys(AttentionSpec(), n) < 0.55 * n * n
    rows = chunks.MAX_ROWS
    assert visited_keys(AttentionSpec(window=64), n) < n * (64 + rows)
    assert visited_keys(AttentionSpec(window=64, sinks=4), n) < n * (64 + 4 + rows)
    documents = document_ids(((100,) * 40 + (96,),))
    assert visited_keys(AttentionSpec(documents=documents), n) < n * (100 + rows)
    assert visited_keys(AttentionSpec(prefix=8), n) < 0.55 * n * n


def test_ragged_lengths_narrow_a_window_too() -> None:
    spec = AttentionSpec(window=16)
    (chunk,) = plan(spec, 1, 1000, torch.tensor([900, 800]))
    assert chunk.keys == slice(784, 900)


def test_chunks_shrink_as_keys_grow() -> None:
    for n in (1024, 8192, 65536):
        largest = max(
            (chunk.rows.stop - chunk.rows.start) * (chunk.keys.stop - chunk.keys.start)
            for chunk in plan(AttentionSpec(), n, n)
        )
        assert largest <= max(2**17 // 2, chunks.MIN_ROWS * n)


def test_columns_of_key_positions() -> None:
    chunk = Chunk(slice(0, 4), 2, slice(5, 8))
    assert chunk.key_positions(torch.device("cpu")).tolist() == [0, 1, 5, 6, 7]
    columns, visited = chunk.columns(torch.tensor([0, 1, 2, 4, 5, 7, 8]))
    assert visited.tolist() == [True, True, False, False, True, True, False]
    assert columns[visited].tolist() == [0, 1, 2, 4]
