"""RoPE's Triton kernel against the plain rotation, in the interpreter."""

import pytest
import torch
from torch import Tensor

from kernels import triton_rope
from kernels.triton_rope import rotate_queries_and_keys
from model.attention import Attention, Shared
from model.positions import RotaryTable, Rotation, rotate, rotate_pair
from tests.model.tiny import tiny_config

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half a step

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))


def heads(n_heads: int, dtype: torch.dtype, *, B: int = 2, T: int = 7, D: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(n_heads)
    return torch.randn(B, T, n_heads, D, generator=generator).to(dtype)


def rotation(positions: Tensor | None = None, *, T: int = 7, D: int = 8, **scaling) -> Rotation:
    return RotaryTable(tiny_config(head_dim=D, **scaling)).at(positions, T)


def exact(x: Tensor, turn: Rotation) -> Tensor:
    return rotate(x.double(), Rotation(turn.cos.double(), turn.sin.double()))


def assert_rounded(result: Tensor, truth: Tensor) -> None:
    """Equal to the float64 truth up to one rounding of the result (two in float32: a b + c d)."""
    bound = ROUNDING[result.dtype] * truth.abs() + 2e-7 * truth.abs().max()
    assert ((result.double() - truth).abs() <= bound).all()


@every_dtype
@pytest.mark.parametrize(
    ("n_head", "kv_heads", "T", "D"),
    [(4, 2, 7, 8), (1, 1, 1, 2), (6, 1, 130, 24), (3, 3, 5, 80)],
)
def test_kernel_rotates_as_the_plain_version(dtype, n_head, kv_heads, T, D):
    q, k = heads(n_head, dtype, T=T, D=D), heads(kv_heads, dtype, T=T, D=D)
    turn = rotation(T=T, D=D, context_length=T)
    for x, turned in zip((q, k), rotate_queries_and_keys(q, k, *turn), strict=True):
        assert turned.dtype == dtype
        assert_rounded(turned, exact(x, turn))
        torch.testing.assert_close(turned, rotate(x, turn))


def test_sequences_may_stand_at_their_own_positions():
    q, k = heads(4, torch.float32), heads(2, torch.float32)
    positions = torch.tensor([[5, 3, 0, 9, 1, 7, 7], [0, 1, 2, 3, 4, 5, 31]])
    turn = rotation(positions)
    turned_q, turned_k = rotate_queries_and_keys(q, k, *turn)
    torch.testing.assert_close(turned_q, rotate(q, turn))
    torch.testing.assert_close(turned_k, rotate(k, turn))


def test_yarn_scales_lengths_in_both_directions():
    q, k = heads(2, torch.float32).requires_grad_(), heads(1, torch.float32)
    turn = rotation(rope_scaling="yarn", rope_scaling_factor=4.0)
    turned, _ = rotate_queries_and_keys(q, k, *turn)
    torch.testing.assert_close(turned, rotate(q, turn))
    (gradient,) = torch.autograd.grad(turned, q, turned.detach())
    torch.testing.assert_close(gradient, q.detach() * (0.1 * torch.tensor(4.0).log() + 1) ** 2)


@pytest.mark.parametrize("layout", ["heads first", "part of one tensor", "expanded", "strided"])
def test_any_strides_are_read(layout):
    if layout == "heads first":
        q, k = (
            heads(n, torch.float32).transpose(1, 2).contiguous().transpose(1, 2) for n in (4, 2)
        )
    elif layout == "part of one tensor":
        q, k, _ = heads(8, torch.float32).split([4, 2, 2], dim=2)
    elif layout == "expanded":
        q, k = heads(4, torch.float32)[:1].expand(2, -1, -1, -1), heads(2, torch.float32)
    else:
        q, k = (heads(n, torch.float32, D=16)[..., ::2] for n in (4, 2))
    turn = rotation()
    turned_q, turned_k = rotate_queries_and_keys(q, k, *turn)
    torch.testing.assert_close(turned_q, rotate(q, turn))
    torch.testing.assert_close(turned_k, rotate(k, turn))


@every_dtype
def test_gradients_turn_back(dtype):
    q, k = heads(4, dtype).requires_grad_(), heads(2, dtype).requires_grad_()
    turn = rotation()
    upstream = [heads(4, dtype) * 3, heads(2, dtype).transpose(0, 1).reshape(2, 7, 2, 8)]
    turned = rotate_queries_and_keys(q, k, *turn)
    gradients = torch.autograd.grad(turned, (q, k), upstream)
    truth = [x.detach().double().requires_grad_() for x in (q, k)]
    expected = torch.autograd.grad(
        [exact(x, turn) for x in truth], truth, [g.double() for g in upstream]
    )
    for gradient, true in zip(gradients, expected, strict=True):
        assert gradient.dtype == dtype
        assert_rounded(gradient, true)


def test_one_gradient_may_be_absent():
    q, k = heads(4, torch.float32).requires_grad_(), heads(2, torch.float32).requires_grad_()
    _, turned_k = rotate_queries_and_keys(q, k, *rotation())
    turned_k.sum().backward()
    assert q.grad is None or not q.grad.any()
    assert k.grad.any()


@pytest.mark.parametrize("rows", [1, 16])
def test_block_edges_are_written_once_and_fully(rows, monkeypatch):
    """Blocks smaller than the sequence, into memory that was not zero before."""
    monkeypatch.setattr(triton_rope, "BLOCK_ROWS", rows)
    monkeypatch.setattr(triton_rope, "_new", lambda x: torch.full(x.shape, torch.nan))
    q, k = heads(3, torch.float32, T=3), heads(1, torch.float32, T=3)
    turn = rotation(T=3)
    turned_q, turned_k = rotate_queries_and_keys(q, k, *turn)
    torch.testing.assert_close(turned_q, rotate(q, turn))
    torch.testing.assert_close(turned_k, rotate(k, turn))


@pytest.mark.parametrize(("backend", "launches"), [("auto", 0), ("sdpa", 0), ("triton", 1)])
def test_the_backend_of_attention_decides_who_rotates(backend, launches, monkeypatch):
    calls = []

    def spy(*arguments):
        calls.append(arguments)
        return rotate_queries_and_keys(*arguments)

    monkeypatch.setattr(triton_rope, "rotate_queries_and_keys", spy)
    q, k, turn = heads(4, torch.float32), heads(2, torch.float32), rotation()
    for x, turned in zip((q, k), rotate_pair(q, k, turn, backend), strict=True):
        torch.testing.assert_close(turned, rotate(x, turn))
    assert len(calls) == launches


def test_the_layer_lets_its_backend_rotate(monkeypatch):
    class Seen(Exception):
        pass

    def refuse(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        raise Seen

    monkeypatch.setattr(triton_rope, "rotate_queries_and_keys", refuse)
    layer = Attention(tiny_config(), 0, backend="triton", precision="ieee")
    with pytest.raises(Seen):
        layer(torch.randn(1, 7, layer.config.n_embd), Shared(rotation=rotation()))


def test_the_operation_is_well_formed():
    q, k = heads(4, torch.float32).requires_grad_(), heads(2, torch.float32).requires_grad_()
    torch.library.opcheck(triton_rope._rotate, (q, k, *rotation(), False))


def test_a_compiled_caller_is_one_graph():
    q, k, turn = heads(4, torch.float32).requires_grad_(), heads(2, torch.float32), rotation()

    def caller(q: Tensor, k: Tensor) -> Tensor:
        turned_q, turned_k = rotate_queries_and_keys(q * 2, k, *turn)
        return turned_q.square().sum() + turned_k[:, :, :1].mul(turned_q[:, :, :1]).sum()

    torch.compiler.reset()
    compiled = torch.compile(caller, fullgraph=True, backend="aot_eager")(q, k)
    torch.testing.assert_close(compiled, caller(q, k))
    (gradient,) = torch.autograd.grad(compiled, q)
    (plain_gradient,) = torch.autograd.grad(caller(q, k), q)
    torch.testing.assert_close(gradient, plain_gradient)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(2, 6, 2, 8)}, "differ in more than heads"),
        ({"k": torch.zeros(2, 7, 2, 8, dtype=torch.float16)}, "torch.float16"),
        ({"q": torch.zeros(2, 7, 2, 8).double(), "k": torch.zeros(2, 7, 2, 8).double()}, "float64"),
        ({"q": torch.zeros(2, 7, 2, 5), "k": torch.zeros(2, 7, 2, 5)}, "head size 5 is odd"),
        ({"cos": torch.zeros(6, 1, 8)}, r"cos has shape \(6, 1, 8\)"),
        ({"sin": torch.zeros(7, 1, 8).double()}, "sin is torch.float64"),
        ({"cos": torch.zeros(7, 1, 8, device="meta")}, "q is on cpu"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(change, message):
    cos, sin = rotation()
    arguments = {"q": torch.zeros(2, 7, 4, 8), "k": torch.zeros(2, 7, 2, 8), "cos": cos, "sin": sin}
    with pytest.raises(ValueError, match=message) as error:
        rotate_queries_and_keys(**(arguments | change))
    assert "\n" not in str(error.value)
