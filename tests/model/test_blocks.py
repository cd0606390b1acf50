"""MLPs against their formulas, and dropout where it belongs."""

import pytest
import torch
from torch import Tensor

from tests.model.tiny import tiny_model, tiny_tokens


def relu2(x: Tensor) -> Tensor:
    return torch.where(x > 0, x**2, 0.0)


def gelu(x: Tensor) -> Tensor:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def gelu_tanh(x: Tensor) -> Tensor:
    return x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


@pytest.mark.parametrize("activation", [relu2, gelu, gelu_tanh])
def test_mlp_is_its_formula(activation):
    mlp = tiny_model(mlp=activation.__name__, bias=True).blocks[0].mlp
    x = torch.randn(2, 5, 32)
    hidden = activation(x @ mlp.up_proj.weight.T + mlp.up_proj.bias)
    expected = hidden @ mlp.down_proj.weight.T + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected)


def test_swiglu_is_its_formula():
    mlp = tiny_model(mlp="swiglu").blocks[0].mlp
    x = torch.randn(2, 5, 32)
    gate = x @ mlp.gate_proj.weight.T
    hidden = gate * torch.sigmoid(gate) * (x @ mlp.up_proj.weight.T)
    torch.testing.assert_close(mlp(x), hidden @ mlp.down_proj.weight.T)


def test_dropout_acts_on_embeddings_and_on_both_branches():
    model = tiny_model(dropout=0.5).train()
    block = model.blocks[0]
    seen: dict[str, Tensor] = {}

    def keep_input(name: str):
        return lambda module, args: seen.__setitem__(name, args[0])

    def keep_output(name: str):
        def hook(module, args, output):
            seen[name] = output[0] if isinstance(output, tuple) else output

        return hook

    model.embed.register_forward_hook(keep_output("embedded"))
    block.register_forward_pre_hook(keep_input("stream"))
    block.attn.register_forward_hook(keep_output("attention"))
    block.mlp_norm.register_forward_pre_hook(keep_input("between"))
    block.mlp.register_forward_hook(keep_output("mlp"))
    block.register_forward_hook(keep_output("end"))
    model(tiny_tokens(2, 9))

    for before, after in [
        (seen["embedded"], seen["stream"]),
        (seen["attention"], seen["between"] - seen["stream"]),
        (seen["mlp"], seen["end"] - seen["between"]),
    ]:
        dropped = after.abs() < 1e-6
        assert 0.4 < dropped.float().mean() < 0.6
        torch.testing.assert_close(after, torch.where(dropped, 0.0, 2 * before))
