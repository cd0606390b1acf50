"""Position schemes against their formulas, and tables that no cast can reach."""

import copy
import math

import pytest
import torch

from model.decoder import Decoder
from model.positions import (
    RotaryTable,
    alibi_slopes,
    document_positions,
    rope_frequencies,
    rotate,
    rotation_matrix,
    sinusoidal_table,
)
from tests.model.tiny import tiny_config, tiny_model, tiny_tokens

SCALINGS = {
    "none": {},
    "linear": {"rope_scaling": "linear", "rope_scaling_factor": 4.0},
    "ntk": {"rope_scaling": "ntk", "rope_scaling_factor": 4.0},
    "yarn": {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
}


def test_rotation_equals_complex_multiplication():
    config = tiny_config(head_dim=6)
    x = torch.randn(2, 10, 3, 6)
    pairs = torch.complex(x[..., :3], x[..., 3:]).to(torch.complex128)
    frequencies = 10000.0 ** (-torch.arange(3, dtype=torch.float64) / 3)
    turns = torch.exp(1j * torch.arange(10)[:, None, None] * frequencies)
    expected = pairs * turns
    actual = rotate(x, RotaryTable(config).at(None, 10))
    torch.testing.assert_close(actual, torch.cat([expected.real, expected.imag], -1).float())


def test_rotation_by_given_positions_is_the_table_in_another_order():
    table = RotaryTable(tiny_config())
    x = torch.randn(2, 6, 4, 8)
    positions = torch.tensor([[5, 3, 0, 9, 1, 7], [0, 1, 2, 3, 4, 5]])
    everywhere = rotate(x[:, :, None].expand(2, 6, 10, 4, 8).flatten(0, 1), table.at(None, 10))
    expected = everywhere[torch.arange(12), positions.flatten()].view(2, 6, 4, 8)
    assert rotate(x, table.at(positions, 6)).equal(expected)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotation_matrix_is_the_product_of_two_rotations(scaling):
    config = tiny_config(**SCALINGS[scaling])
    q, k = torch.randn(2, 1, 1, 1, 8)
    table = RotaryTable(config)
    for i, j in [(0, 0), (9, 4), (4, 9), (31, 0)]:
        turned_q = rotate(q, table.at(torch.tensor([[i]]), 1)).flatten()
        turned_k = rotate(k, table.at(torch.tensor([[j]]), 1)).flatten()
        score = q.flatten().double() @ rotation_matrix(config, j - i) @ k.flatten().double()
        torch.testing.assert_close(turned_q @ turned_k, score.float())


def test_far_rotations_are_exact_to_float32_rounding():
    config = tiny_config(context_length=100_001)
    cos, sin = RotaryTable(config).at(None, 100_001)
    # A float32 product of position and frequency would be wrong by 1e-3 here.
    angle = 99_999 * 10000.0 ** (-2 / 8)
    assert abs(cos[99_999, 0, 1].item() - math.cos(angle)) < 1e-7
    assert abs(sin[99_999, 0, 5].item() - math.sin(angle)) < 1e-7


def test_yarn_leaves_fast_pairs_alone_and_stretches_slow_ones():
    plain, _ = rope_frequencies(tiny_config(context_length=8192, head_dim=64))
    config = tiny_config(context_length=8192, head_dim=64, **SCALINGS["yarn"])
    yarn, attention_factor = rope_frequencies(config)
    assert yarn[0] == plain[0]
    torch.testing.assert_close(yarn[-1], plain[-1] / 4)
    assert attention_factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("position", ["rope", "alibi", "sinusoidal"])
def test_no_cast_of_the_model_reaches_a_position_table(position, dtype):
    model = tiny_model(position=position)
    before = copy.deepcopy(dict(model.named_buffers()))
    assert before, "there is no table to test"
    model.to(dtype)
    assert model.embed.weight.dtype == dtype
    for name, table in model.named_buffers():
        assert table.dtype == torch.float32
        assert table.equal(before[name])
    assert not set(before) & set(model.state_dict())
    assert model(tiny_tokens(1, 8)).logits.dtype == dtype


def test_tables_of_a_model_built_without_memory_are_filled_when_it_gets_some():
    config = tiny_config()
    with torch.device("meta"):
        model = Decoder(config)
    assert model.rope.weight.is_meta
    assert model.to_empty(device="cpu").rope.weight.equal(RotaryTable(config).weight)


def test_alibi_slopes_of_a_power_of_two():
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]


def test_alibi_slopes_of_other_counts_fill_the_gaps():
    expected = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert alibi_slopes(6).tolist() == expected
    for n_head in range(1, 34):
        slopes = alibi_slopes(n_head)
        assert slopes.shape == (n_head,)
        assert slopes.unique().numel() == n_head
        assert slopes.min() > 0
        assert slopes.max() < 1


def test_sinusoidal_table_is_the_formula():
    table = sinusoidal_table(50, 6)
    for position, channel in [(0, 0), (0, 1), (7, 2), (49, 5)]:
        angle = position / 10000 ** (2 * (channel // 2) / 6)
        expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
        assert table[position, channel].item() == pytest.approx(expected, abs=1e-7)


def test_positions_restart_with_every_document():
    documents = torch.tensor([[4, 4, 4, 2, 2, 7], [1, 1, 1, 1, 1, 1]])
    expected = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    assert document_positions(documents).equal(expected)
