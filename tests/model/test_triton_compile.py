"""A model that attends by the Triton kernels, inside a compiler."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from model.config import ModelConfig
from model.decoder import Decoder

pytestmark = pytest.mark.usefixtures("quick_interpreter")

CONFIG = ModelConfig(
    vocab_size=11,
    context_length=24,
    n_layer=2,
    n_head=2,
    n_kv_head=1,
    n_embd=32,
    windows=[9, 0],
    window_sinks=2,
    sink_logit="learned",
)


def loss_and_gradients(model: torch.nn.Module, length: int) -> tuple[Tensor, dict[str, Tensor]]:
    tokens = torch.arange(length + 1)[None] * 7 % CONFIG.vocab_size
    loss = model(tokens[:, :-1], tokens[:, 1:]).loss
    model.zero_grad()
    loss.backward()
    gradients = {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}
    return loss.detach(), gradients


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
)
def test_a_compiled_model_is_one_graph_for_all_lengths(compiler: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Decoder(CONFIG, backend="triton")
    lengths = (22, 20, 17)
    expected = {length: loss_and_gradients(model, length) for length in lengths}
    counter = CompileCounterWithBackend(compiler)
    model.compile(fullgraph=True, backend=counter)
    for length, values in expected.items():
        torch.testing.assert_close(loss_and_gradients(model, length), values)
    assert counter.frame_count == 2  # the first length, then all others
