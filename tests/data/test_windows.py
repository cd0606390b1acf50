"""Windows against their definition in plain lists, and the order in which they are seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.windows import IGNORE, Batch, WindowOrder, Windows, fixed_windows
from tests.data.token_data import write_tokens

GOLDEN_ORDER = [5, 1, 6, 7, 4, 0, 2, 3, 2, 6, 3, 7]

EOT = 0  # one token that ends and begins documents
BOS, EOS = 1, 2

patient = settings(deadline=None)  # a loaded machine is no failure
on_disk = settings(patient, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(st.lists(st.integers(10, 99), max_size=9), min_size=1, max_size=6)


def write_texts(folder: Path, texts: list[list[int]], marks: str) -> Any:
    """Texts as token files hold them, for a tokenizer with the given marks."""
    if marks == "none":
        return write_tokens(folder, [text for text in texts if text])
    if marks == "shared":
        documents = [[EOT, *text] for text in texts]
        return write_tokens(folder, documents, bos_id=EOT, eos_id=EOT, tail=[EOT])
    return write_tokens(folder, [[BOS, *text, EOS] for text in texts], bos_id=BOS, eos_id=EOS)


def all_rows(windows: Windows) -> Batch:
    return windows.batch(range(len(windows)))


def targets_that_count(windows: Windows) -> list[int]:
    targets = all_rows(windows).targets
    return targets[targets != IGNORE].tolist()


# Stream


def test_window_n_covers_its_tokens_and_the_targets_are_the_next(tmp_path: Path) -> None:
    windows = Windows(write_tokens(tmp_path, [range(12)]), 3, "stream")
    batch = windows.batch([2, 0])
    assert batch.tokens.tolist() == [[6, 7, 8], [0, 1, 2]]
    assert batch.targets.tolist() == [[7, 8, 9], [1, 2, 3]]
    assert batch.documents is None
    assert batch.tokens.dtype == batch.targets.dtype
    assert str(batch.tokens.dtype) == "torch.int64"
    assert batch.tokens.is_contiguous()
    assert batch.targets.is_contiguous()


@pytest.mark.parametrize(
    ("n_tokens", "n_windows", "dropped"), [(4, 1, 0), (5, 1, 1), (6, 1, 2), (7, 2, 0), (10, 3, 0)]
)
def test_only_a_partial_last_window_is_dropped_and_counted(
    n_tokens: int, n_windows: int, dropped: int, tmp_path: Path
) -> None:
    windows = Windows(write_tokens(tmp_path, [range(n_tokens)]), 3, "stream")
    assert (len(windows), windows.dropped) == (n_windows, dropped)
    expected = list(range(1, n_tokens - dropped))  # each token but the first is a target once
    assert targets_that_count(windows) == expected
    assert windows.describe() == f"{n_windows} windows of 3 (stream), {dropped} tokens dropped"


@pytest.mark.parametrize("number", [-1, 3])
def test_a_window_that_does_not_exist_is_an_error(number: int, tmp_path: Path) -> None:
    windows = Windows(write_tokens(tmp_path, [range(10)]), 3, "stream")
    with pytest.raises(IndexError, match=r"\[0, 3\)"):
        windows.batch([0, number])


# Document


@on_disk
@given(texts=texts, marks=st.sampled_from(["none", "shared", "separate"]), length=st.integers(1, 7))
def test_document_windows_are_stream_windows_that_know_their_documents(
    tmp_path: Path, texts: list[list[int]], marks: str, length: int
) -> None:
    texts = [*texts, list(range(20, 28))]
    tokens = write_texts(tmp_path, texts, marks)
    ids = tokens.read(0, len(tokens)).tolist()
    owner = [sum(start <= i for start in tokens.starts) for i in range(len(ids))]
    windows = Windows(tokens, length, "document")
    batch = all_rows(windows)
    assert batch.documents is not None
    assert batch.tokens.tolist() == all_rows(Windows(tokens, length, "stream")).tokens.tolist()
    for n in range(len(windows)):
        for t in range(length):
            i = n * length + t
            stays = owner[i + 1] == owner[i] or marks == "shared"
            assert batch.targets[n, t] == (ids[i + 1] if stays else IGNORE)
            assert batch.documents[n, t] == owner[i] - owner[n * length]


def test_the_end_of_a_document_is_a_target_only_where_a_token_marks_it(tmp_path: Path) -> None:
    def targets(marks: str) -> list[int]:
        tokens = write_texts(tmp_path, [[10, 11], [20, 21]], marks)
        return Windows(tokens, len(tokens) - 1, "document").batch([0]).targets[0].tolist()

    assert targets("none") == [11, IGNORE, 21]
    assert targets("shared") == [10, 11, EOT, 20, 21, EOT]
    assert targets("separate") == [10, 11, EOS, IGNORE, 20, 21, EOS]


# Aligned to BOS


def test_long_documents_go_on_behind_another_bos_and_the_rest_is_padding(tmp_path: Path) -> None:
    tokens = write_texts(tmp_path, [[10, 11, 12, 13], [20]], "shared")
    windows = Windows(tokens, 3, "bos_aligned")
    batch = all_rows(windows)
    assert batch.tokens.tolist() == [[EOT, 10, 11], [EOT, 13, EOT], [EOT, 20, EOT]]
    assert batch.targets.tolist() == [[10, 11, 12], [13, EOT, IGNORE], [20, EOT, IGNORE]]
    assert batch.documents is None
    assert (windows.dropped, windows.padding) == (0, 2)
    assert windows.describe() == "3 windows of 3 (bos_aligned), 22.2% padding"


@on_disk
@given(texts=texts, marks=st.sampled_from(["shared", "separate"]), length=st.integers(1, 7))
def test_aligned_windows_predict_every_token_of_every_document_once(
    tmp_path: Path, texts: list[list[int]], marks: str, length: int
) -> None:
    bos, end = (EOT, EOT) if marks == "shared" else (BOS, EOS)
    expected_tokens, expected_targets = [], []
    for text in texts:
        rest = [*text, end]
        while rest:
            row, rest = rest[:length], rest[length:]
            padding = length - len(row)
            expected_tokens.append(([bos, *row, *[bos] * padding])[:length])
            expected_targets.append([*row, *[IGNORE] * padding])
    windows = Windows(write_texts(tmp_path, texts, marks), length, "bos_aligned")
    batch = all_rows(windows)
    assert batch.targets.tolist() == expected_targets
    assert windows.padding == sum(row.count(IGNORE) for row in expected_targets)
    assert batch.tokens.tolist() == expected_tokens


# Errors


def test_bos_alignment_needs_a_bos(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, [range(10)])
    with pytest.raises(ValueError, match="bos_aligned needs a tokenizer with a BOS token"):
        Windows(tokens, 3, "bos_aligned")


@pytest.mark.parametrize(("split", "knob"), [("train", "data.path"), ("val", "data.val_fraction")])
@pytest.mark.parametrize("mode", ["stream", "document"])
def test_a_split_shorter_than_a_window_says_have_need_and_knob(
    split: str, knob: str, mode: str, tmp_path: Path
) -> None:
    tokens = write_tokens(tmp_path, [range(64)], split=split)
    with pytest.raises(ValueError, match=knob) as error:
        Windows(tokens, 64, mode)
    message = f"the {split} split has 64 tokens, but one window of model.context_length=64 needs 65"
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("marks", ["none", "shared"])
def test_an_empty_split_is_an_error(marks: str, tmp_path: Path) -> None:
    tokens = write_texts(tmp_path, [], marks)
    with pytest.raises(ValueError, match="the train split has"):
        Windows(tokens, 3, "stream" if marks == "none" else "bos_aligned")


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path, [range(10)])
    with pytest.raises(ValueError, match=r"data\.mode=steam is unknown; choose one of stream"):
        Windows(tokens, 3, "steam")
    with pytest.raises(ValueError, match="context_length=0 must be at least 1"):
        Windows(tokens, 0, "stream")


# Order


def draw(order: WindowOrder, *counts: int) -> list[int]:
    return [int(i) for count in counts for i in order.next_indices(count)]


@patient
@given(n_windows=st.integers(1, 40), seed=st.integers(0, 2**40), data=st.data())
def test_every_window_comes_once_per_epoch_however_many_are_drawn_at_a_time(
    n_windows: int, seed: int, data: st.DataObject
) -> None:
    counts = data.draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    drawn = draw(WindowOrder(n_windows, seed), *counts)
    assert drawn == draw(WindowOrder(n_windows, seed), *[1] * sum(counts))
    for begin in range(0, len(drawn) - n_windows + 1, n_windows):
        assert sorted(drawn[begin : begin + n_windows]) == list(range(n_windows))


def test_the_order_depends_on_seed_and_epoch() -> None:
    first, second = draw(WindowOrder(50, 1), 50), draw(WindowOrder(50, 2), 50)
    order = WindowOrder(50, 1)
    epochs = [draw(order, 50) for _ in range(3)]
    assert epochs[0] == first != second
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert first != list(range(50))


def test_the_order_is_the_same_in_every_version() -> None:
    """Written down once: a change here would change every run that is resumed."""
    assert draw(WindowOrder(8, 1337), 12) == GOLDEN_ORDER


def test_a_single_draw_can_cross_several_epochs() -> None:
    order = WindowOrder(3, 0)
    drawn = draw(order, 10)
    assert [sorted(drawn[i : i + 3]) for i in (0, 3, 6)] == [[0, 1, 2]] * 3
    assert (order.epoch, order.offset) == (3, 1)


def test_an_epoch_that_is_complete_is_counted() -> None:
    order = WindowOrder(4, 0)
    order.next_indices(3)
    assert (order.epoch, order.offset) == (0, 3)
    order.next_indices(1)
    assert (order.epoch, order.offset) == (1, 0)


@patient
@given(n_windows=st.integers(1, 20), counts=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_a_saved_position_goes_on_exactly_twice_in_a_row(n_windows: int, counts: list[int]) -> None:
    """Over epoch edges, through JSON, and resumed again after each draw."""
    straight = draw(WindowOrder(n_windows, 5), *counts)
    resumed, state = [], WindowOrder(n_windows, 5).state_dict()
    for count in counts:
        order = WindowOrder(n_windows, 5)
        order.load_state_dict(json.loads(json.dumps(state)))
        resumed += draw(order, count)
        state = order.state_dict()
    assert resumed == straight


def test_loading_a_position_forgets_the_order_of_the_other_epoch() -> None:
    order, other = WindowOrder(10, 0), WindowOrder(10, 0)
    order.next_indices(5)
    other.next_indices(25)
    state = other.state_dict()
    order.load_state_dict(state)
    assert draw(order, 5) == draw(other, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_windows": 9}, "for n_windows=9, but this run has 10: the text, the tokenizer"),
        ({"seed": 4}, "for seed=4, but this run has 3: seed changed; init_from"),
        ({"version": 7}, "has version 7, this code reads 1"),
    ],
)
def test_a_position_of_another_run_is_refused(changes: dict[str, int], message: str) -> None:
    order = WindowOrder(10, 3)
    with pytest.raises(ValueError, match=message):
        order.load_state_dict(order.state_dict() | changes)


def test_an_order_of_nothing_and_a_negative_seed_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one window"):
        WindowOrder(0, 1)
    with pytest.raises(ValueError, match="seed=-1 must not be negative"):
        WindowOrder(3, -1)


def test_indices_are_plain_int64() -> None:
    indices = WindowOrder(5, 0).next_indices(7)
    assert indices.dtype == np.int64
    assert indices.shape == (7,)


def test_a_limit_means_the_same_evenly_spread_windows_every_time() -> None:
    assert fixed_windows(10, None).tolist() == list(range(10))
    assert fixed_windows(10, 20).tolist() == list(range(10))
    assert fixed_windows(10, 4).tolist() == [0, 2, 5, 7]
    assert np.unique(fixed_windows(1000, 999)).size == 999
