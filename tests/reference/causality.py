"""Causality as a property of gradients, for any function of a sequence."""

from collections.abc import Callable

import torch
from torch import Tensor


def assert_causal(function: Callable[[Tensor], Tensor], inputs: Tensor) -> None:
    """Check that output t depends on every input up to t, and on none after t.

    Args:
        function: from (B, T, C) to (B, T, ...), in double precision if it can.
        inputs: (B, T, C) floats, such as embeddings; random ones, so that no gradient before t
            is zero by accident.
    """
    leaf = inputs.detach().clone().requires_grad_()
    outputs = function(leaf)
    for t in range(leaf.shape[1]):
        (gradient,) = torch.autograd.grad(outputs[:, t].sum(), leaf, retain_graph=True)
        reach = gradient.abs().amax(dim=-1)  # (B, T)
        assert (reach[:, t + 1 :] == 0).all(), f"output {t} depends on an input after it"
        assert (reach[:, : t + 1] > 0).all(), f"output {t} ignores an input up to it"
