"""Linear layers of few rows: the product they stand for, and 8 bits within half a step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from model import decode_linear
from model.config import ModelConfig
from model.decode_linear import (
    FEW_ROWS,
    Int8Linear,
    RowsLinear,
    row_by_row,
    side_by_side,
    with_linear_layers,
)
from model.decoder import Decoder


@pytest.mark.parametrize("large", [0, decode_linear.LARGE])
@pytest.mark.parametrize("product", [row_by_row, side_by_side])
@pytest.mark.parametrize("n_rows", [1, 2, 3, 8, 9, 16, 17])
@pytest.mark.parametrize(("n_out", "width"), [(1, 1), (7, 33), (8, 16), (24, 100)])
def test_both_sums_are_the_product(product, n_rows, n_out, width, large, monkeypatch):
    monkeypatch.setattr(decode_linear, "LARGE", large)
    torch.manual_seed(n_rows)
    rows, weight = torch.randn(n_rows, width), torch.randn(n_out, width)
    exact = rows.double() @ weight.double().T
    # Each product and each addition rounds once, relative to the sum of what has been added.
    bound = 2**-24 * (width + 1) * (rows.abs() @ weight.abs().T).double()
    result = product(rows, weight)
    assert result.is_contiguous()
    assert ((result.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("n_rows", [1, FEW_ROWS, FEW_ROWS + 1, 32, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_of_few_rows_is_the_layer_it_replaces(n_rows, bias, monkeypatch):
    linear = nn.Linear(20, 12, bias=bias)
    x = torch.randn(n_rows, 1, 20)
    expected = F.linear(x, linear.weight, linear.bias)
    assert torch.equal(RowsLinear(linear)(x), expected)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    torch.testing.assert_close(RowsLinear(linear)(x), expected, rtol=1e-5, atol=1e-6)


def test_the_copy_shares_its_parameters_with_the_model():
    model = Decoder(ModelConfig(vocab_size=31, context_length=16, n_layer=1, n_head=2, n_embd=16))
    twin = with_linear_layers(model, RowsLinear)
    theirs = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        assert theirs[name] is parameter
    assert not any(isinstance(module, nn.Linear) for module in twin.modules())
    assert any(isinstance(module, nn.Linear) for module in model.modules())


# --- 8 bits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("out", "width"), [(1, 8), (7, 32), (33, 100)])
def test_a_weight_of_8_bits_is_off_by_at_most_half_a_step(out, width):
    torch.manual_seed(0)
    linear = nn.Linear(width, out, bias=False)
    with torch.no_grad():
        linear.weight[0] *= 1e-3
        linear.weight[-1] *= 1e3
    packed = Int8Linear(linear)
    assert not packed.weight[:, width:].any()
    back = packed.weight[:, :width].double() * packed.scale.double()[:, None]
    error = (back - linear.weight.double()).abs()
    assert (error <= packed.scale.double()[:, None] / 2 * (1 + 1e-6)).all()
    # One scale per row: a large row does not spoil a small one.
    assert packed.scale[0] < 1.02 * linear.weight[0].abs().max() / 127


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (3, 1)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 8, 32, 40, 100])
def test_a_layer_of_8_bits_multiplies_by_its_rounded_weights(shape, bias, width):
    torch.manual_seed(1)
    linear = nn.Linear(width, 48, bias=bias)
    packed = Int8Linear(linear)
    x = torch.randn(*shape, width)
    weight = packed.weight[:, :width].double() * packed.scale.double()[:, None]
    rounded = x.bfloat16().double()
    expected = rounded @ weight.T
    # The product adds in float32 or better and rounds its result to bfloat16.
    bound = expected.abs() * 2**-8 + (rounded.abs() @ weight.abs().T) * 2**-16
    with torch.inference_mode():
        y = packed(x)
    if bias:
        expected = expected + linear.bias.double()
        bound = bound + 1e-5
    assert y.dtype == torch.float32
    assert ((y.double() - expected).abs() <= bound).all()


def test_the_copy_drops_nothing_out_even_if_the_model_was_training():
    config = ModelConfig(
        vocab_size=31, context_length=16, n_layer=1, n_head=2, n_embd=16, dropout=0.5
    )
    model = Decoder(config).train()
    twin = with_linear_layers(model, RowsLinear)
    tokens = torch.arange(6)[None]
    assert torch.equal(twin(tokens).logits, model.eval()(tokens).logits)


def test_a_row_of_zeros_stays_zero():
    linear = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        linear.weight[2] = 0
    with torch.inference_mode():
        y = Int8Linear(linear)(torch.randn(1, 8))
    assert y[0, 2] == 0
    assert y.isfinite().all()


def test_few_rows_are_not_rounded_where_they_are_compiled(monkeypatch):
    linear = nn.Linear(32, 48)
    packed = Int8Linear(linear)
    x = torch.randn(FEW_ROWS, 1, 32)
    weight = packed.weight * packed.scale.float()[:, None]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    expected = F.linear(x, weight, linear.bias)
    torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-6)
