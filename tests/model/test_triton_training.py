"""A model trains through the Triton kernels as it does through the stock operations."""

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.decoder import Decoder

pytestmark = pytest.mark.usefixtures("quick_interpreter")

CONFIG = ModelConfig(
    vocab_size=11,
    context_length=40,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=32,
    windows=[9, 0],
    window_sinks=2,
    sink_logit="learned",
)


def loss_curve(backend: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of 10 steps on one batch, and the parameters after them."""
    torch.manual_seed(0)
    model = Decoder(CONFIG, backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(CONFIG.vocab_size, (1, 41))
    losses = []
    for _ in range(10):
        loss = model(tokens[:, :-1], tokens[:, 1:]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def test_the_loss_curve_is_that_of_the_stock_operations() -> None:
    losses, parameters = loss_curve("triton")
    expected, expected_parameters = loss_curve("sdpa")
    assert losses[-1] < losses[0] - 0.1
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True)):
        assert abs(loss - other) < 1e-4, f"step {step}"
    sinks = [name for name in parameters if name.endswith("sink_logit")]
    assert len(sinks) == 2
    for name in sinks:
        assert parameters[name].abs().max() > 1e-3
        torch.testing.assert_close(
            parameters[name], expected_parameters[name], atol=1e-4, rtol=1e-3
        )
