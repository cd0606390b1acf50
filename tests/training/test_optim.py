"""Optimizers: who updates which parameter, by which rule, and an exact way back from a file."""

from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.muon import BatchedMuon, newton_schulz_dtype, orthogonalize, shape_scale
from training.optim import KINDS, OptimConfig, Optimizers, build_optimizers

CONFIGS = Path(__file__).parents[2] / "configs" / "optim"


class TinyModel(nn.Module):
    """The parameter kinds of a decoder under a decoder's names; the head is tied."""

    def __init__(self, *, reverse: bool = False) -> None:
        super().__init__()

        def block() -> nn.Module:
            layer = nn.Module()
            layer.up_proj = nn.Linear(4, 8)
            layer.down_proj = nn.Linear(8, 4, bias=False)
            layer.sink_logit = nn.Parameter(torch.zeros(2))
            return layer

        parts = {
            "embed": lambda: nn.Embedding(7, 4),
            "position_embed": lambda: nn.Embedding(5, 4),
            "blocks": lambda: nn.ModuleList([block(), block()]),
            "norm": lambda: nn.LayerNorm(4),
        }
        for name in reversed(parts) if reverse else parts:
            setattr(self, name, parts[name]())
        self.lm_head = nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position_embed.weight
        for block in self.blocks:
            x = x + block.down_proj(block.up_proj(x).relu()) * block.sink_logit.sum().exp()
        return self.lm_head(self.norm(x)).square().mean()


TOKENS = torch.tensor([[0, 1, 2, 3, 4], [6, 5, 4, 3, 2]])


def train(model: nn.Module, optimizers: Optimizers, steps: int) -> None:
    for step in range(steps):
        optimizers.set_lr(1.0 / (1 + step))
        model(TOKENS).backward()
        optimizers.clip_grad_norm()
        optimizers.step()
        optimizers.zero_grad()


def names_by_group(model: nn.Module, optimizers: Optimizers) -> list[tuple[float, set[str]]]:
    names = {p: name for name, p in model.named_parameters()}
    return [(g["weight_decay"], {names[p] for p in g["params"]}) for g in optimizers.param_groups]


def seeded(model_seed: int = 0, **options: bool) -> TinyModel:
    torch.manual_seed(model_seed)
    return TinyModel(**options)


VECTORS = {"norm.weight", "norm.bias"} | {
    f"blocks.{n}.{leaf}" for n in (0, 1) for leaf in ("up_proj.bias", "sink_logit")
}
HIDDEN = {f"blocks.{n}.{leaf}.weight" for n in (0, 1) for leaf in ("up_proj", "down_proj")}


# --- Groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_matrices_and_embeddings_decay_and_vectors_do_not(kind: str) -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig(kind=kind, weight_decay=0.3))
    assert names_by_group(model, optimizers) == [
        (0.3, HIDDEN | {"embed.weight", "position_embed.weight"}),
        (0.0, VECTORS),
    ]


def test_muon_takes_the_hidden_matrices_and_adamw_the_rest() -> None:
    model = seeded()
    config = OptimConfig(kind="muon", weight_decay=0.3, muon_weight_decay=0.01, muon_lr=0.05)
    optimizers = build_optimizers(model, config)
    assert [type(o) for o in optimizers.optimizers] == [BatchedMuon, torch.optim.AdamW]
    assert names_by_group(model, optimizers) == [
        (0.01, HIDDEN),
        (0.3, {"embed.weight", "position_embed.weight"}),
        (0.0, VECTORS),
    ]
    assert optimizers.set_lr(0.5) == 0.5 * config.lr
    assert [g["lr"] for g in optimizers.param_groups] == [0.025, 0.5 * config.lr, 0.5 * config.lr]


def test_frozen_parameters_are_left_out() -> None:
    model = seeded()
    model.position_embed.requires_grad_(False)
    before = model.position_embed.weight.clone()
    optimizers = build_optimizers(model, OptimConfig())
    train(model, optimizers, 2)
    assert torch.equal(model.position_embed.weight, before)
    assert not any("position_embed" in name for name in optimizers.state_tensors())
    with pytest.raises(ValueError, match="no trainable parameters"):
        build_optimizers(model.requires_grad_(False), OptimConfig())


def test_muon_without_matrices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"optim.kind=muon found no trainable matrices"):
        build_optimizers(nn.Linear(3, 3), OptimConfig(kind="muon"))


def test_describe_counts_tensors_and_parameters() -> None:
    lines = build_optimizers(seeded(), OptimConfig(kind="muon")).describe().splitlines()
    assert lines[0].startswith("BatchedMuon: 4 tensors, 128 parameters, peak lr 0.02")
    assert lines[1].startswith("AdamW: 2 tensors, 48 parameters, peak lr 0.001, weight decay 0.1")


# --- Update rules ---------------------------------------------------------------------------------


def test_adamw_follows_the_published_rule() -> None:
    config = OptimConfig(lr=0.01, weight_decay=0.2, beta1=0.8, beta2=0.9, eps=1e-8, grad_clip=0)
    weight = nn.Parameter(torch.linspace(-1, 1, 6).reshape(2, 3))
    model = nn.ParameterDict({"w": weight})
    optimizers = build_optimizers(model, config)
    expected = weight.detach().double()
    m = v = torch.zeros_like(expected)
    for step, multiplier in enumerate((0.1, 1.0, 0.7), start=1):
        gradient = torch.full_like(weight, 0.3 * step) + weight.detach()
        weight.grad = gradient.clone()
        g, lr = gradient.double(), 0.01 * multiplier
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        m_hat, v_hat = m / (1 - 0.8**step), v / (1 - 0.9**step)
        expected = expected * (1 - lr * 0.2) - lr * m_hat / (v_hat.sqrt() + 1e-8)
        optimizers.set_lr(multiplier)
        optimizers.step()
        torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-6)


def test_sgd_follows_the_nesterov_rule() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    config = OptimConfig(kind="sgd", lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.0)
    optimizers = build_optimizers(nn.ParameterDict({"w": weight}), config)
    for gradient in (1.0, 2.0):
        weight.grad = torch.full_like(weight, gradient)
        optimizers.set_lr(1.0)
        optimizers.step()
    # Velocities 1 and 2.5; steps 1 + 0.5 and 2 + 1.25.
    torch.testing.assert_close(weight.detach(), torch.full((2, 2), 1 - 0.1 * (1.5 + 3.25)))


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_batched_muon_is_torchs_muon(
    scaling: str, nesterov: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.muon.newton_schulz_dtype", lambda device: torch.bfloat16)
    torch.manual_seed(0)
    start = [torch.randn(shape) for shape in ((8, 4), (4, 8), (4, 4), (8, 4))]
    results = []
    for build in (torch.optim.Muon, BatchedMuon):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = build(
            parameters, lr=0.1, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=scaling
        )
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for p in parameters[:-1]:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        momenta = [optimizer.state[p]["momentum_buffer"] for p in parameters[:-1]]
        results.append((parameters, momenta))
    (expected, expected_momenta), (actual, momenta) = results
    for one, other in zip(momenta, expected_momenta, strict=True):
        assert torch.equal(one, other)
    for one, other, before in zip(actual, expected, start, strict=True):
        # Both round to bfloat16, in different places: 1 % of the distance travelled.
        limit = 0.02 * (other.detach() - before).norm()
        assert (one.detach() - other.detach()).norm() <= limit


@pytest.mark.parametrize("shape", [(2, 6, 6), (2, 5, 9), (2, 9, 5)])
def test_orthogonalising_keeps_directions_and_levels_singular_values(shape: tuple) -> None:
    torch.manual_seed(0)
    group = BatchedMuon([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    matrices = left @ torch.diag_embed(values.clamp(min=0.5)) @ right
    result = orthogonalize(matrices, group, torch.float32)
    diagonal = left.mT @ result @ right.mT
    levels = diagonal.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(diagonal, torch.diag_embed(levels), rtol=0, atol=1e-4)
    assert levels.min() > 0.6
    assert levels.max() < 1.25


def test_shape_scale_grows_as_documented() -> None:
    assert shape_scale(torch.Size((16, 4)), "original") == 2.0
    assert shape_scale(torch.Size((4, 16)), "original") == 1.0
    assert shape_scale(torch.Size((4, 16)), "match_rms_adamw") == pytest.approx(0.8)


def test_muon_computes_in_float32_without_bfloat16_instructions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for capabilities, dtype in (
        ({"avx2": True}, torch.float32),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"amx_bf16": True}, torch.bfloat16),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda c=capabilities: c, raising=False)
        assert newton_schulz_dtype(torch.device("cpu")) is dtype
    assert newton_schulz_dtype(torch.device("cuda")) is torch.bfloat16


# --- Clipping and order of calls ------------------------------------------------------------------


def test_clipping_uses_one_norm_over_all_optimizers() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig(kind="muon", grad_clip=0.5))
    for p in model.parameters():
        p.grad = torch.full_like(p, 2.0)
    count = sum(p.numel() for p in model.parameters())
    norm = optimizers.clip_grad_norm()
    assert norm.item() == pytest.approx(2.0 * count**0.5)
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert after.item() == pytest.approx(0.5, rel=1e-4)


def test_without_clipping_the_norm_is_still_measured() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig(grad_clip=0.0))
    model(TOKENS).backward()
    before = [p.grad.clone() for p in model.parameters()]
    assert optimizers.clip_grad_norm() > 0
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


def test_a_loss_scaler_is_undone_before_clipping_and_backs_off_after_an_overflow() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig(kind="muon", grad_clip=0.0))
    model(TOKENS).backward()
    plain = optimizers.clip_grad_norm()
    optimizers.zero_grad()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(TOKENS)).backward()
    optimizers.unscale(scaler)
    torch.testing.assert_close(optimizers.clip_grad_norm(), plain)
    scaler.update()
    assert scaler.get_scale() == 1024.0
    model.norm.weight.grad[0] = float("inf")
    optimizers.unscale(scaler)
    assert not torch.isfinite(optimizers.clip_grad_norm())
    scaler.update()
    assert scaler.get_scale() == 512.0


def test_a_step_needs_a_learning_rate_first() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig())
    with pytest.raises(AssertionError, match="set_lr"):
        optimizers.step()
    train(model, optimizers, 1)
    optimizers.load(optimizers.state_tensors(), optimizers.state_json())
    with pytest.raises(AssertionError, match="set_lr"):
        optimizers.step()


def test_zero_grad_frees_the_gradients() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig(kind="muon"))
    model(TOKENS).backward()
    optimizers.zero_grad()
    assert all(p.grad is None for p in model.parameters())


# --- State ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 3])
def test_training_continues_exactly_from_a_file(
    kind: str, steps_before: int, tmp_path: Path
) -> None:
    config = OptimConfig(kind=kind, grad_clip=0.0)  # the norm's last bit depends on the order
    model = seeded()
    optimizers = build_optimizers(model, config)
    train(model, optimizers, steps_before)
    if optimizers.state_tensors():
        save_file(optimizers.state_tensors(), tmp_path / "state")
    state = optimizers.state_json()

    # The other model lists its parameters in the opposite order.
    other = seeded(1, reverse=True)
    other.load_state_dict(model.state_dict())
    resumed = build_optimizers(other, config)
    tensors = load_file(tmp_path / "state") if steps_before else {}
    resumed.load(tensors, state)

    train(model, optimizers, 3)
    train(other, resumed, 3)
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


def test_loaded_state_is_a_copy() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig())
    train(model, optimizers, 1)
    tensors = {name: value.clone() for name, value in optimizers.state_tensors().items()}
    resumed = build_optimizers(model, OptimConfig())
    resumed.load(tensors, optimizers.state_json())
    before = {name: value.clone() for name, value in tensors.items()}
    train(model, resumed, 1)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


def test_a_parameter_without_gradients_needs_no_state() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig())
    optimizers.set_lr(1.0)
    model.norm.weight.sum().backward()
    optimizers.step()
    state = optimizers.state_json()
    assert "embed.weight" in state["without_state"]
    build_optimizers(model, OptimConfig()).load(optimizers.state_tensors(), state)


def test_bad_state_is_refused_by_name() -> None:
    model = seeded()
    optimizers = build_optimizers(model, OptimConfig())
    train(model, optimizers, 1)
    good, state = optimizers.state_tensors(), optimizers.state_json()

    missing = {n: t for n, t in good.items() if n != "norm.bias/exp_avg"}
    with pytest.raises(ValueError, match=r"missing norm.bias/exp_avg; unexpected none"):
        optimizers.load(missing, state)
    with pytest.raises(ValueError, match=r"missing none; unexpected old.weight/exp_avg"):
        optimizers.load(good | {"old.weight/exp_avg": torch.zeros(1)}, state)
    with pytest.raises(ValueError, match=r"norm.bias/exp_avg has shape \(5,\), .* needs \(4,\)"):
        optimizers.load(good | {"norm.bias/exp_avg": torch.zeros(5)}, state)
    with pytest.raises(ValueError, match=r"missing .* and 31 more; unexpected none") as error:
        optimizers.load({}, state)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"is of kind sgd, but optim.kind=adamw"):
        optimizers.load(good, state | {"kind": "sgd"})
    with pytest.raises(ValueError, match="version 99"):
        optimizers.load(good, state | {"version": 99})


# --- Configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "adam"}, "optim.kind=adam is not one of .*did you mean 'adamw'"),
        ({"muon_lr_scaling": "orig"}, "did you mean 'original'"),
        ({"beta2": 1.0}, "optim.beta2=1.0 must be at least 0 and below 1"),
        ({"grad_clip": -1.0}, "optim.grad_clip=-1.0 must be at least 0"),
        ({"kind": "sgd", "momentum": 0.0}, "optim.nesterov=true needs optim.momentum above 0"),
        ({"warmup_steps": -5}, "optim.warmup_steps=-5"),
    ],
)
def test_bad_options_fail_in_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        OptimConfig(**options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_config_files_hold_valid_values_under_one_comment(kind: str) -> None:
    text = (CONFIGS / f"{kind}.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    merged = OmegaConf.merge(OmegaConf.structured(OptimConfig), values)
    config = OmegaConf.to_object(merged)
    assert isinstance(config, OptimConfig)
    assert config.kind == kind
    assert [line[0] == "#" for line in text.splitlines()].count(True) == 1


def test_sgd_without_momentum_has_no_state() -> None:
    model = seeded()
    config = OptimConfig(kind="sgd", momentum=0.0, nesterov=False)
    optimizers = build_optimizers(model, config)
    train(model, optimizers, 1)
    assert optimizers.state_tensors() == {}
    build_optimizers(model, config).load({}, optimizers.state_json())
