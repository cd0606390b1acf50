"""What the mathematics of attention says about the model; every test is named for its claim."""

import math

import pytest
import torch
from torch import Tensor

import model.attention as attention_module
from kernels.attention import AttentionSpec, Stats, attention
from model.attention import Attention, Shared
from model.decoder import Decoder
from model.positions import RotaryTable, alibi_slopes, rotate
from tests.model.tiny import OPTIONS, TINY, tiny_config, tiny_model, tiny_tokens

H, C, D = 4, 32, 8
CAUSAL_OPTIONS = [name for name in OPTIONS if name != "bidirectional"]


def tiny_layer(**changes) -> Attention:
    return tiny_model(dtype=torch.float64, **changes).blocks[0].attn


def inputs(length: int = 9, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, C, dtype=torch.float64)


def shared_for(layer: Attention, length: int) -> Shared:
    """What the decoder gives a layer: the rotations, if the layer uses RoPE."""
    if layer.config.position != "rope":
        return Shared()
    table = RotaryTable(layer.config).at(None, length)
    return Shared(rotation=table)


def queries_keys_values(layer: Attention, x: Tensor, monkeypatch) -> tuple[Tensor, ...]:
    """What the layer hands to the attention function, keys and values repeated per query head."""
    seen = []

    def spy(q, k, v, spec, **options):
        seen.extend([q, k, v])
        return attention(q, k, v, spec, **options)

    monkeypatch.setattr(attention_module, "attention", spy)
    layer(x, shared_for(layer, x.shape[1]))
    q, k, v = seen
    group = layer.config.group
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def scores(layer: Attention, x: Tensor, monkeypatch) -> Tensor:
    """Scaled scores of all pairs, as the layer computes them: (B, H, T, T)."""
    q, k, _ = queries_keys_values(layer, x, monkeypatch)
    return q @ k.transpose(-1, -2) / math.sqrt(D)


# --- size of the logits ----------------------------------------------------------------------


@pytest.mark.parametrize(("width", "std"), [(128, 0.02), (256, 0.02), (128, 0.06)])
def test_initial_logits_have_std_n_embd_times_weight_variance(width, std, monkeypatch):
    torch.manual_seed(0)
    config = tiny_config(n_embd=width, n_head=4, n_kv_head=4, head_dim=32, init_std=std)
    layer = Decoder(config).blocks[0].attn
    x = torch.randn(1, 32, width)
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt()  # unit RMS, as the norm before gives it
    q, k, _ = queries_keys_values(layer, x, monkeypatch)
    logits = q @ k.transpose(-1, -2) / math.sqrt(32)
    assert logits.std().item() == pytest.approx(width * std**2, rel=0.1)


# --- order ----------------------------------------------------------------------------------


def last_row_before_and_after_shuffling(n_layer: int) -> tuple[Tensor, Tensor]:
    model = tiny_model(dtype=torch.float64, position="none", n_layer=n_layer)
    tokens = torch.tensor([[3, 1, 4, 11, 5, 9, 2, 6]])
    shuffled = tokens[:, [4, 2, 6, 0, 5, 3, 1, 7]]
    return model(tokens).logits[0, -1], model(shuffled).logits[0, -1]


def test_one_causal_layer_without_positions_does_not_know_the_order_of_earlier_tokens():
    torch.testing.assert_close(*last_row_before_and_after_shuffling(n_layer=1))


def test_two_causal_layers_without_positions_know_the_order_of_earlier_tokens():
    before, after = last_row_before_and_after_shuffling(n_layer=2)
    assert (before - after).abs().max() > 1e-2


@pytest.mark.parametrize("scaling", ["plain", "linear", "ntk", "yarn"])
def test_rope_scores_depend_only_on_the_offset(scaling):
    table = RotaryTable(tiny_config(context_length=512, **OPTIONS[scaling]))
    q, k = torch.randn(2, 1, 1, H, D, dtype=torch.float64)

    def score(i: int, j: int) -> Tensor:
        turned_q = rotate(q, table.at(torch.tensor([[i]]), 1))
        turned_k = rotate(k, table.at(torch.tensor([[j]]), 1))
        return (turned_q * turned_k).sum(-1)

    for offset in (0, 1, 7, 100):
        for start in (1, 50, 400):
            torch.testing.assert_close(
                score(start + offset, start), score(offset, 0), atol=1e-5, rtol=0
            )
    assert not score(7, 0).allclose(score(8, 0), atol=1e-2)


# --- a head is two products of weights -----------------------------------------------------------


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_concatenation_then_output_projection_is_a_sum_over_heads(n_kv_head):
    layer = tiny_layer(n_kv_head=n_kv_head)
    x = inputs()
    output, result = layer(x, shared_for(layer, 9))
    heads = [result.out[:, head] @ layer.output_weight(head) for head in range(H)]
    torch.testing.assert_close(output, sum(heads))


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
@pytest.mark.parametrize("position", ["none", "rope"])
def test_score_is_the_bilinear_form_of_the_qk_circuit(position, n_kv_head, monkeypatch):
    layer = tiny_layer(position=position, n_kv_head=n_kv_head)
    x = inputs()
    actual = scores(layer, x, monkeypatch)
    for head in range(H):
        for i, j in [(8, 8), (8, 3), (5, 0), (2, 7)]:
            circuit = layer.qk_circuit(head, offset=j - i)
            expected = torch.einsum("bc,cd,bd->b", x[:, i], circuit, x[:, j])
            torch.testing.assert_close(actual[:, head, i, j], expected, atol=1e-5, rtol=1e-5)


def test_qk_and_ov_circuits_have_at_most_the_rank_of_a_head():
    layer = tiny_layer()
    for head in range(H):
        assert torch.linalg.matrix_rank(layer.qk_circuit(head, offset=-3)) == D
        assert torch.linalg.matrix_rank(layer.ov_circuit(head)) == D


def test_qk_circuit_folds_in_the_gains_of_qk_norm(monkeypatch):
    layer = tiny_layer(qk_norm=True)
    x = inputs()
    actual = scores(layer, x, monkeypatch)[:, 1, 8, 3]
    query = x[:, 8] @ layer.q_proj.weight.T[:, D : 2 * D]
    key = x[:, 3] @ layer.k_proj.weight.T[:, :D]
    lengths = query.pow(2).mean(-1).sqrt() * key.pow(2).mean(-1).sqrt()
    expected = torch.einsum("bc,cd,bd->b", x[:, 8], layer.qk_circuit(1, -5), x[:, 3]) / lengths
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


def change_basis(layer: Attention, basis: Tensor) -> None:
    """W_Q <- W_Q A and W_K <- W_K A^-T in every head."""
    C = layer.config.n_embd
    with torch.no_grad():
        for projection, matrix in (
            (layer.q_proj, basis),
            (layer.k_proj, torch.linalg.inv(basis).T),
        ):
            per_head = projection.weight.view(-1, D, C)
            projection.weight.copy_((matrix.T @ per_head).view(-1, C))


def scores_before_and_after(layer: Attention, basis: Tensor, monkeypatch) -> tuple[Tensor, Tensor]:
    x = inputs()
    before = scores(layer, x, monkeypatch)
    change_basis(layer, basis)
    return before, scores(layer, x, monkeypatch)


def any_basis() -> Tensor:
    return torch.randn(D, D, dtype=torch.float64) + 2 * torch.eye(D, dtype=torch.float64)


def basis_of_scaled_rotations() -> Tensor:
    """Every RoPE pair (d, d + D/2) turned by its own angle and scaled by its own factor."""
    angle = torch.rand(D // 2, dtype=torch.float64) * 6
    factor = torch.rand(D // 2, dtype=torch.float64) + 0.5
    cos, sin = torch.diag(factor * angle.cos()), torch.diag(factor * angle.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def test_without_rope_any_invertible_change_of_basis_leaves_the_scores(monkeypatch):
    layer = tiny_layer(position="none")
    torch.testing.assert_close(*scores_before_and_after(layer, any_basis(), monkeypatch))


def test_with_rope_a_general_change_of_basis_changes_the_scores(monkeypatch):
    before, after = scores_before_and_after(tiny_layer(), any_basis(), monkeypatch)
    assert (before - after).abs().max() > 0.1
    same_position = before.diagonal(dim1=-2, dim2=-1), after.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(*same_position, atol=1e-5, rtol=1e-5)  # R(0) is the identity


def test_with_rope_a_change_that_commutes_with_every_rotation_leaves_the_scores(monkeypatch):
    before, after = scores_before_and_after(tiny_layer(), basis_of_scaled_rotations(), monkeypatch)
    torch.testing.assert_close(before, after, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_kv_head", [4, 2, 1])
def test_ov_circuit_is_what_a_head_writes_for_what_it_looks_at(n_kv_head, monkeypatch):
    layer = tiny_layer(n_kv_head=n_kv_head)
    x = inputs()
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    weights = scores(layer, x, monkeypatch).masked_fill(~visible, -math.inf).softmax(-1)
    by_hand = sum(weights[:, head] @ x @ layer.ov_circuit(head) for head in range(H))
    output, _ = layer(x, shared_for(layer, 9))
    torch.testing.assert_close(output, by_hand, atol=1e-6, rtol=1e-6)


def test_the_output_gate_scales_every_channel_of_every_head():
    layer = tiny_layer(output_gate=True)
    x = inputs()
    output, result = layer(x, shared_for(layer, 9))
    gate = torch.sigmoid(x @ layer.gate_proj.weight.T)
    heads = result.out.transpose(1, 2).reshape(2, 9, C)
    torch.testing.assert_close(output, (gate * heads) @ layer.o_proj.weight.T)


# --- causality ---------------------------------------------------------------------------------


class RecordingCache:
    """Stores nothing, only notes which keys a pass over a whole text would put into a cache."""

    lengths = None
    length = 0
    capacity = TINY["context_length"]

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def extend(self, n: int) -> Tensor:
        return torch.arange(n)[None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys.append(k)
        return k, v


@pytest.mark.parametrize("option", CAUSAL_OPTIONS)
def test_changing_a_token_leaves_every_earlier_output_and_cached_key_bit_identical(option):
    model = tiny_model(**OPTIONS[option])
    first = model.config.prefix  # tokens of the prefix are visible to each other
    for t in range(max(first, 1), 12):
        tokens = tiny_tokens(1, 12)
        changed = tokens.clone()
        changed[0, t] = (changed[0, t] + 1) % TINY["vocab_size"]
        caches = RecordingCache(), RecordingCache()
        one, other = (
            model(x, cache=cache).logits for x, cache in zip((tokens, changed), caches, strict=True)
        )
        assert one[:, :t].equal(other[:, :t])
        assert not one[:, t:].equal(other[:, t:])
        for k, k_changed in zip(caches[0].keys, caches[1].keys, strict=True):
            assert k[:, :, :t].equal(k_changed[:, :, :t])
            assert not k[:, :, t].equal(k_changed[:, :, t])


@pytest.mark.parametrize("option", CAUSAL_OPTIONS)
@pytest.mark.parametrize("t", [0, 5, 9])
def test_no_gradient_flows_from_an_output_to_later_tokens(option, t):
    model = tiny_model(n_layer=3, **OPTIONS[option])
    embeddings = []
    model.embed.register_forward_hook(lambda module, args, output: embeddings.append(output))
    logits = model(tiny_tokens(1, 10)).logits
    (gradient,) = torch.autograd.grad(logits[0, t].square().sum(), embeddings[0])
    seen = gradient[0].abs().sum(-1)
    visible_until = max(t + 1, model.config.prefix) if t < model.config.prefix else t + 1
    assert seen[visible_until:].eq(0).all()
    reach = 3 * (model.config.windows[0] - 1) if len(model.config.windows) == 1 else 10
    if model.config.window_sinks == 0:
        assert seen[max(0, t - reach) : visible_until].gt(0).all()
        assert seen[: max(0, t - reach)].eq(0).all()


def test_a_bidirectional_model_sees_everything():
    model = tiny_model(mask="bidirectional")
    embeddings = []
    model.embed.register_forward_hook(lambda module, args, output: embeddings.append(output))
    logits = model(tiny_tokens(1, 10)).logits
    (gradient,) = torch.autograd.grad(logits[0, 2].square().sum(), embeddings[0])
    assert gradient[0].abs().sum(-1).gt(0).all()


# --- per-layer options reach the layer they name ------------------------------------------------


def test_windows_repeat_over_the_layers_and_hold_the_sinks_visible():
    model = tiny_model(n_layer=3, windows=[2, 0], window_sinks=1)
    specs: list[AttentionSpec] = [block.attn.spec() for block in model.blocks]
    assert [(spec.window, spec.sinks) for spec in specs] == [(2, 1), (None, 0), (2, 1)]


def test_options_of_the_logits_reach_the_attention_function():
    layer = tiny_layer(position="alibi", softcap=5.0, sink_logit="learned")
    spec = layer.spec()
    assert spec.softcap == 5.0
    assert spec.alibi_slopes.equal(alibi_slopes(H))
    assert spec.sink_logit.equal(layer.sink_logit.float())
    plain = tiny_layer().spec()
    assert plain.plain_logits


def test_a_zero_sink_logit_adds_one_to_the_softmax_denominator():
    model = tiny_model(sink_logit="zero")
    result = model(tiny_tokens(1, 9), stats=Stats(lse=True, null_mass=True)).attention[0]
    torch.testing.assert_close(result.null_mass, torch.exp(-result.lse))
