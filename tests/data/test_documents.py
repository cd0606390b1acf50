"""How documents are divided into training and validation."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.documents import Document, first_val_document, split_text


def test_split_text_is_nanogpt_split():
    text = "".join(chr(97 + i % 26) for i in range(1003))
    train, val = split_text(Document(text=text, name="letters"), 0.1)
    assert train.text == text[: int(0.9 * len(text))]
    assert val.text == text[int(0.9 * len(text)) :]


@pytest.mark.parametrize(
    ("lengths", "fraction", "first"),
    [
        ([10] * 10, 0.1, 9),
        ([10] * 10, 0.3, 7),
        ([90, 5, 5], 0.1, 1),
        ([50, 50], 0.1, 1),  # training and validation get one document at least
        ([10, 90], 0.99, 1),
        ([5, 95], 0.01, 1),
        ([70, 11, 19], 0.2, 2),  # 19 is nearer to 20 than 30
    ],
)
def test_validation_starts_nearest_to_the_fraction(lengths, fraction, first):
    assert first_val_document(lengths, fraction) == first


@given(
    lengths=st.lists(st.integers(1, 1000), min_size=2, max_size=30),
    fraction=st.floats(0.01, 0.99),
)
def test_no_other_division_is_nearer(lengths, fraction):
    first = first_val_document(lengths, fraction)
    wanted = fraction * sum(lengths)
    distances = [abs(sum(lengths[start:]) - wanted) for start in range(1, len(lengths))]
    assert 1 <= first < len(lengths)
    assert distances[first - 1] == pytest.approx(min(distances))
