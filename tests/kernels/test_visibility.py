"""Document starts, and a mask that means what the written rule says."""

import numpy as np
import pytest
import torch

from kernels.attention import AttentionSpec
from kernels.visibility import document_ends, document_starts, make_layout
from tests.kernels.cases import document_ids
from tests.reference.attention import Problem


def test_document_starts_and_ends() -> None:
    ids = document_ids(((3, 1, 2), (6,), (1, 1, 4)))
    assert document_starts(ids).tolist() == [[0, 0, 0, 3, 4, 4], [0] * 6, [0, 1, 2, 2, 2, 2]]
    assert document_ends(ids).tolist() == [[3, 3, 3, 4, 6, 6], [6] * 6, [1, 2, 6, 6, 6, 6]]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 1},
        {"window": 3},
        {"window": 3, "sinks": 2},
        {"sinks": 2},
        {"prefix": 1},
        {"prefix": 4, "window": 2, "sinks": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [None, (9, 4)], ids=["whole", "ragged"])
@pytest.mark.parametrize("documents", [None, ((4, 5), (2, 7))], ids=["one", "documents"])
def test_mask_follows_the_rule(
    options: dict, lengths: tuple[int, ...] | None, documents: tuple | None
) -> None:
    n_rows, n_keys = 11, 9
    ids = None if documents is None else document_ids(documents)
    kv_lengths = None if lengths is None else torch.tensor(lengths)
    layout = make_layout(
        AttentionSpec(documents=ids, **options), n_rows, n_keys, kv_lengths, torch.device("cpu")
    )
    mask = layout.visible(slice(None), torch.arange(n_keys)).expand(2, -1, -1)
    nothing = np.zeros((2, 1, n_keys, 1))
    problem = Problem(
        q=np.zeros((2, 1, n_rows, 1)),
        k=nothing,
        v=nothing,
        documents=None if ids is None else ids.numpy(),
        **options,
    )
    for b in range(2):
        length = n_keys if lengths is None else lengths[b]
        for t in range(n_rows):
            for j in range(n_keys):
                expected = problem.sees(b, length - n_rows + t, j, length)
                assert mask[b, t, j].item() == expected, (b, t, j)


def test_a_block_of_the_mask_is_a_block_of_the_whole() -> None:
    spec = AttentionSpec(window=3, sinks=1, prefix=2, documents=document_ids(((4, 5),)))
    layout = make_layout(spec, 7, 9, None, torch.device("cpu"))
    whole = layout.visible(slice(None), torch.arange(9))
    rows, keys = slice(2, 5), torch.tensor([0, 3, 4, 5])
    assert torch.equal(layout.visible(rows, keys), whole[:, rows][:, :, keys])


@pytest.mark.parametrize("documents", [None, ((4, 5), (2, 7))], ids=["one", "documents"])
@pytest.mark.parametrize("lengths", [None, (9, 4)], ids=["whole", "ragged"])
def test_rows_by_number_and_keys_of_their_own_are_entries_of_the_whole(
    lengths: tuple[int, ...] | None, documents: tuple | None
) -> None:
    ids = None if documents is None else document_ids(documents)
    kv_lengths = None if lengths is None else torch.tensor(lengths)
    spec = AttentionSpec(window=3, sinks=1, prefix=2, documents=ids)
    layout = make_layout(spec, 9, 9, kv_lengths, torch.device("cpu"))
    whole = layout.visible(slice(None), torch.arange(9)).expand(2, -1, -1)
    rows = torch.tensor([[0, 5, 8], [2, 2, 7]])
    keys = torch.tensor([[[0, 1], [3, 5], [0, 4]], [[1, 2], [0, 8], [7, 3]]])
    expected = whole.gather(1, rows.unsqueeze(2).expand(-1, -1, 9))
    assert torch.equal(layout.visible(rows, torch.arange(9)).expand(2, -1, -1), expected)
    assert torch.equal(layout.visible(rows, keys).expand(2, -1, -1), expected.gather(2, keys))


def test_one_document_is_the_same_as_none() -> None:
    for options in ({}, {"causal": False}, {"prefix": 3}, {"window": 2, "sinks": 1}):
        plain, single = (
            make_layout(
                AttentionSpec(documents=ids, **options), 12, 9, None, torch.device("cpu")
            ).visible(slice(None), torch.arange(9))
            for ids in (None, torch.zeros(1, 9, dtype=torch.int64))
        )
        assert torch.equal(plain, single)
