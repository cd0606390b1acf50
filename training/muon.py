"""`torch.optim.Muon`, working on all matrices of one shape at once.

The update and the state are those of `torch.optim.Muon`; only how the work is done differs. A small
model has many small matrices, and orthogonalising them one by one in bfloat16 takes longer
than together, and much longer where the CPU has no bfloat16 instructions.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) for 2-D parameters."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; closures are not supported."""
        assert closure is None, "BatchedMuon does not re-evaluate the model"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                directions = torch.stack([self._direction(p, group) for p in parameters])
                updates = orthogonalize(directions, group, newton_schulz_dtype(directions.device))
                scale = group["lr"] * shape_scale(shape, group["adjust_lr_fn"])
                for parameter, update in zip(parameters, updates.to(parameters[0]), strict=True):
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(update, alpha=-scale)

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> Tensor:
        """Fold the gradient into the momentum and return the matrix to orthogonalise."""
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum: Tensor = state["momentum_buffer"]
        momentum.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum


def orthogonalize(matrices: Tensor, group: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """Bring the singular values of every matrix in `matrices` (N, A, B) near 1, in `dtype`.

    `ns_steps` Newton-Schulz iterations x <- a x + (b xxᵀ + c (xxᵀ)²) x, with the coefficients of
    the Muon post: they end between about 0.7 and 1.2, which is close enough and soon reached.
    """
    a, b, c = group["ns_coefficients"]
    tall = matrices.size(1) > matrices.size(2)
    x = (matrices.mT if tall else matrices).to(dtype)  # (N, min(A, B), max(A, B))
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def shape_scale(shape: torch.Size, scaling: str | None) -> float:
    """Return the factor of the learning rate for a matrix of A rows and B columns.

    "original" is sqrt(max(1, A / B)); "match_rms_adamw" is 0.2 sqrt(max(A, B)), which gives the
    update the size of AdamW's, so that AdamW's learning rate and weight decay can be kept (Liu et
    al. 2025, arXiv 2502.16982, section 2.2).
    """
    rows, columns = shape
    if scaling == "match_rms_adamw":
        return 0.2 * max(rows, columns) ** 0.5
    return max(1.0, rows / columns) ** 0.5


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 where the device multiplies it in hardware, else float32.

    It depends on the machine alone, never on a timing, so that runs repeat exactly.
    """
    if device.type != "cpu":
        return torch.bfloat16
    # Older PyTorch versions cannot tell: float32 is right everywhere.
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32
