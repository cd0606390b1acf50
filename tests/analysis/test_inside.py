"""A view of a forward pass: the very numbers it used, and no trace of having looked."""

from __future__ import annotations

import pytest
import torch

from analysis.inside import STATS, inside
from kernels.attention import Stats, attention
from tests.model.tiny import OPTIONS, tiny_model, tiny_tokens

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 7, [0] * 12])


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one", "documents"])
@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_the_parts_of_every_view_are_those_of_the_forward_pass(option, documents):
    model, tokens = tiny_model(**OPTIONS[option]), tiny_tokens(2, 12)
    output, views = inside(model, tokens, documents)
    plain = model(tokens, documents=documents, stats=STATS)
    assert torch.equal(output.logits, plain.logits)
    assert [view.layer for view in views] == [0, 1]
    stream = views[0].stream_in
    for view, block, expected in zip(views, model.blocks, plain.attention, strict=True):
        assert torch.equal(view.stream_in, stream)
        again = attention(view.q, view.k, view.v, view.spec, stats=STATS)
        for value, seen, returned in zip(again, view.result, expected, strict=True):
            if value is not None:
                assert torch.equal(seen, value)
                assert torch.equal(seen, returned)
        if not model.config.output_gate:
            assert torch.equal(view.heads, view.result.out)
        wrote = block.attn.o_proj(view.heads.transpose(1, 2).flatten(2))
        middle = view.stream_in + wrote
        assert torch.equal(view.stream_out, middle + block.mlp(block.mlp_norm(middle)))
        stream = view.stream_out
    assert torch.equal(model.lm_head(model.norm(stream)), output.logits)


@torch.no_grad()
def test_a_gate_is_part_of_what_heads_hand_on():
    model, tokens = tiny_model(output_gate=True), tiny_tokens(2, 12)
    _, (view, _) = inside(model, tokens)
    attn = model.blocks[0].attn
    gate = torch.sigmoid(attn.gate_proj(model.blocks[0].attn_norm(view.stream_in)))
    expected = view.result.out * gate.unflatten(2, (4, -1)).transpose(1, 2)
    assert torch.equal(view.heads, expected)


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_looking_leaves_nothing_behind_even_when_it_fails():
    model, tokens = tiny_model(dropout=0.5).train(), tiny_tokens(2, 12)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inside(model, tokens)
    assert hooks(model) == 0
    with pytest.raises(ValueError, match="layer 2 is outside"):
        inside(model, tokens, layers=[0, 2])
    with pytest.raises(IndexError):
        inside(model, tokens + 100)
    assert hooks(model) == 0
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@torch.no_grad()
def test_a_compiled_model_is_looked_into_uncompiled_and_stays_as_it_was():
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    model, tokens = tiny_model(), tiny_tokens(2, 12)
    model.compile(backend=count)
    expected = model(tokens).logits
    compiled = len(graphs)
    assert compiled > 0
    output, views = inside(model, tokens)
    torch.testing.assert_close(output.logits, expected)
    assert len(views) == 2
    model(tokens)
    assert len(graphs) == compiled


@torch.no_grad()
def test_layers_come_in_the_order_asked_for_with_lse_and_the_chosen_statistics():
    model, tokens = tiny_model(n_layer=3), tiny_tokens(2, 12)
    _, every = inside(model, tokens)
    _, chosen = inside(model, tokens, stats=Stats(max_prob=True), layers=[2, 0])
    assert [view.layer for view in chosen] == [2, 0]
    for view in chosen:
        torch.testing.assert_close(view.q, every[view.layer].q)  # layer 1 ran the stock operation
        assert view.result.lse is not None
        assert view.result.max_prob is not None
        assert view.result.entropy_tokens is None


@torch.no_grad()
def test_half_precision_views_hold_what_the_layer_computed_with():
    model, tokens = tiny_model(), tiny_tokens(2, 12)
    with torch.autocast("cpu", torch.bfloat16):
        _, views = inside(model, tokens)
    for view in views:
        assert view.q.dtype == view.k.dtype == view.v.dtype == view.heads.dtype == torch.bfloat16
        again = attention(view.q, view.k, view.v, view.spec, stats=STATS)
        assert torch.equal(again.lse, view.result.lse)
        assert torch.equal(again.out, view.heads)


def test_gradients_flow_where_they_are_switched_on():
    model, tokens = tiny_model(), tiny_tokens(2, 12)
    _, views = inside(model, tokens)
    views[1].q.sum().backward()
    assert model.blocks[0].attn.v_proj.weight.grad.abs().sum() > 0
