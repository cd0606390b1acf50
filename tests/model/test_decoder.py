"""The decoder: every option runs and trains, packed equals alone, the loss counts rightly."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import Stats, attention
from model.decoder import IGNORE, Decoder, next_token_loss
from model.kv_cache import FullCache
from tests.model.tiny import OPTIONS, TINY, tiny_config, tiny_model, tiny_tokens

V = TINY["vocab_size"]


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_forward_and_backward(option):
    model = tiny_model(**OPTIONS[option]).train()
    tokens = tiny_tokens(2, 9)
    output = model(tokens, tiny_tokens(2, 9, seed=2))
    assert output.logits.shape == (2, 9, V)
    assert output.loss.shape == ()
    assert output.attention is None
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("option", OPTIONS)
def test_backends_agree(option):
    tokens, targets = tiny_tokens(2, 11), tiny_tokens(2, 11, seed=2)
    stats = Stats(entropy=True, max_logit=True)
    outputs = [
        tiny_model(backend=backend, dtype=torch.float64, **OPTIONS[option])(
            tokens, targets, stats=stats
        )
        for backend in ("eager", "auto")
    ]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits)
    for one, other in zip(outputs[0].attention, outputs[1].attention, strict=True):
        torch.testing.assert_close(one.entropy, other.entropy)


@pytest.mark.parametrize("option", OPTIONS)
def test_packed_documents_equal_each_alone(option):
    model = tiny_model(**OPTIONS[option])
    lengths = [[5, 1, 7, 3], [9, 7]]
    tokens, targets = tiny_tokens(2, 16), tiny_tokens(2, 16, seed=2)
    ids = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    packed = model(tokens, targets, documents=torch.stack(ids), reduction="none")
    for b, row in enumerate(lengths):
        for part in torch.arange(16).split(row):
            alone = model(tokens[b : b + 1, part], targets[b : b + 1, part], reduction="none")
            torch.testing.assert_close(packed.logits[b, part], alone.logits[0])
            torch.testing.assert_close(packed.loss[b, part], alone.loss[0])


def test_module_names_and_tying():
    names = {name for name, _ in tiny_model(**OPTIONS["all_at_once"]).named_parameters()}
    for module in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "q_norm", "k_norm"):
        assert f"blocks.1.attn.{module}.weight" in names
    for module in ("attn_norm", "mlp_norm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        assert f"blocks.1.{module}.weight" in names
    assert {"embed.weight", "norm.weight", "lm_head.weight", "blocks.0.attn.sink_logit"} <= names
    tied = tiny_model(position="learned")
    assert tied.lm_head.weight is tied.embed.weight
    assert tied.position_embed.weight.shape == (32, 32)


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    config = tiny_config(n_embd=128, n_layer=8, init_std=0.05, bias=True, norm="layernorm")
    model = Decoder(config)
    block = model.blocks[3]
    for weight in (model.embed.weight, block.attn.q_proj.weight, block.mlp.up_proj.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    for weight in (block.attn.o_proj.weight, block.mlp.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)
    assert block.attn.q_proj.bias.abs().max() == 0
    assert block.attn_norm.weight.eq(1).all()
    assert block.attn_norm.bias.eq(0).all()


def test_a_model_built_without_memory_can_be_initialised_later():
    config = tiny_config(**OPTIONS["all_at_once"])
    with torch.device("meta"):
        late = Decoder(config)
    late.to_empty(device="cpu")
    usual = Decoder(config)
    for model in (late, usual):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(7)
        torch.manual_seed(0)
        model.reset_parameters()
    for (name, one), other in zip(late.named_parameters(), usual.parameters(), strict=True):
        assert one.equal(other), name
        assert not one.eq(7).any(), name
    tokens = tiny_tokens(1, 8)
    assert late.eval()(tokens).logits.equal(usual.eval()(tokens).logits)


# --- loss ------------------------------------------------------------------------------------


def test_reductions_agree_and_ignored_targets_do_not_count():
    model = tiny_model()
    tokens, targets = tiny_tokens(2, 6), tiny_tokens(2, 6, seed=2)
    targets[0, 2:5] = IGNORE
    each = model(tokens, targets, reduction="none").loss
    logits = model(tokens).logits
    assert each.shape == (2, 6)
    assert each[0, 2:5].eq(0).all()
    assert each[1, 3] == F.cross_entropy(logits[1, 3], targets[1, 3])
    torch.testing.assert_close(model(tokens, targets, reduction="sum").loss, each.sum())
    torch.testing.assert_close(model(tokens, targets).loss, each.sum() / 9)


def test_loss_and_gradient_are_zero_when_nothing_counts():
    model = tiny_model()
    loss = model(tiny_tokens(2, 6), torch.full((2, 6), IGNORE)).loss
    loss.backward()
    assert loss == 0
    assert all(parameter.grad.eq(0).all() for parameter in model.parameters())


def test_loss_is_computed_in_float32_whatever_the_logits_are():
    logits, targets = 5 * torch.randn(2, 50, V), tiny_tokens(2, 50)
    narrow = logits.bfloat16()
    loss = next_token_loss(narrow, targets)
    assert loss.dtype == torch.float32
    assert loss == next_token_loss(narrow.float(), targets)
    assert next_token_loss(logits.double(), targets).dtype == torch.float64


def test_targets_inside_the_prefix_do_not_count():
    model = tiny_model(mask="prefix", prefix=4)
    tokens = tiny_tokens(1, 10)
    targets = tiny_tokens(1, 10, seed=2)
    each = model(tokens, targets, reduction="none").loss[0]
    # Row i predicts token i + 1: rows 0, 1, 2 predict tokens 1, 2, 3, which the prefix shows.
    assert each[:3].eq(0).all()
    assert each[3:].gt(0).all()
    torch.testing.assert_close(model(tokens, targets).loss, each.sum() / 7)


# --- what comes back, and what is refused --------------------------------------------------------


def test_statistics_come_back_for_the_chosen_layers(monkeypatch):
    asked = []

    def spy(*args, **options):
        asked.append(options["stats"])
        return attention(*args, **options)

    monkeypatch.setattr("model.attention.attention", spy)
    model = tiny_model(n_layer=3)
    tokens = tiny_tokens(2, 7)
    stats = Stats(entropy=True, sink_mass=(1, 2))
    everything = model(tokens, stats=stats).attention
    assert len(everything) == 3
    assert everything[0].entropy.shape == (2, 4, 7)
    assert everything[0].sink_mass.shape == (2, 4, 7, 2)
    chosen = model(tokens, stats=stats, layers=[2]).attention
    assert len(chosen) == 1
    assert asked == [stats] * 3 + [None, None, stats]  # unchosen layers do not pay for them
    torch.testing.assert_close(chosen[0].entropy, everything[2].entropy)
    assert not chosen[0].entropy.allclose(everything[0].entropy)


@pytest.mark.parametrize("option", OPTIONS)
def test_only_last_gives_the_last_logits(option):
    model = tiny_model(**OPTIONS[option])
    tokens = tiny_tokens(2, 7)
    torch.testing.assert_close(model(tokens, only_last=True).logits, model(tokens).logits[:, -1:])


def test_dropout_acts_in_training_only():
    model = tiny_model(dropout=0.5)
    tokens = tiny_tokens(1, 8)
    assert model(tokens).logits.equal(model(tokens).logits)
    model.train()
    assert not model(tokens).logits.equal(model(tokens).logits)


@pytest.mark.parametrize("position", ["rope", "learned", "sinusoidal"])
def test_sequences_beyond_the_context_are_refused(position):
    model = tiny_model(position=position)
    with pytest.raises(ValueError, match=r"33 tokens is longer than model\.context_length=32"):
        model(tiny_tokens(1, 33))
    cache = FullCache(model.config, batch=1, capacity=40)
    with torch.no_grad():
        model(tiny_tokens(1, 32), cache=cache)
    with pytest.raises(ValueError, match=r"33 tokens is longer than model\.context_length=32"):
        model(tiny_tokens(1, 1), cache=cache)


@pytest.mark.parametrize("position", ["alibi", "none"])
def test_positions_without_a_table_have_no_limit(position):
    assert tiny_model(position=position)(tiny_tokens(1, 40)).logits.isfinite().all()


def test_what_has_no_meaning_is_refused():
    model = tiny_model()
    tokens = tiny_tokens(1, 5)
    cache = FullCache(model.config, batch=1, capacity=8)
    with pytest.raises(ValueError, match=r"model\.vocab_size=0: take it from the tokenizer"):
        Decoder(tiny_config(vocab_size=0))
    with pytest.raises(ValueError, match="reduction='avg' is not one of mean, sum, none"):
        model(tokens, tokens, reduction="avg")
    with pytest.raises(ValueError, match=r"layer 2 is outside 0 \.\. 1"):
        model(tokens, stats=Stats(lse=True), layers=[2])
    with pytest.raises(ValueError, match="only_last leaves out"):
        model(tokens, tokens, only_last=True)
    with pytest.raises(ValueError, match="documents and a cache do not go together"):
        model(tokens, documents=torch.zeros_like(tokens), cache=cache)
    with pytest.raises(ValueError, match="bidirectional has no cache"):
        tiny_model(mask="bidirectional")(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"5 tokens given, model\.prefix=6"):
        tiny_model(mask="prefix", prefix=6)(tokens, cache=cache)
    with pytest.raises(ValueError, match=r"head 4 is outside 0 \.\. 3"):
        model.blocks[0].attn.ov_circuit(4)


# --- number types and compilation -------------------------------------------------------------


@pytest.mark.parametrize("option", ["plain", "all_at_once", "all_with_alibi", "layernorm_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_stay_close_to_float32(option, dtype):
    tokens = tiny_tokens(2, 12)
    exact = tiny_model(**OPTIONS[option])(tokens).logits
    narrow = tiny_model(dtype=dtype, **OPTIONS[option])(tokens).logits
    assert narrow.dtype == dtype
    assert (narrow.float() - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("option", ["plain", "all_at_once", "all_with_alibi", "layernorm_bias"])
def test_autocast_trains_float32_weights(option):
    model = tiny_model(**OPTIONS[option])
    tokens, targets = tiny_tokens(2, 12), tiny_tokens(2, 12, seed=2)
    exact = model(tokens, targets).loss
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(tokens, targets)
    output.loss.backward()
    assert output.loss.dtype == torch.float32
    assert output.loss.item() == pytest.approx(exact.item(), rel=0.02)
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


@pytest.mark.parametrize("option", ["plain", "all_at_once", "all_with_alibi", "learned"])
def test_a_training_step_compiles_into_one_graph(option):
    torch.compiler.reset()
    model = tiny_model(**(OPTIONS[option] | {"dropout": 0.0}))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    inputs = tiny_tokens(2, 8), tiny_tokens(2, 8, seed=2)
    expected = torch.autograd.grad(model(*inputs).loss, model.embed.weight)
    actual = torch.autograd.grad(compiled(*inputs).loss, model.embed.weight)
    torch.testing.assert_close(actual, expected)


def test_statistics_and_documents_compile_into_one_graph():
    torch.compiler.reset()
    model = tiny_model()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2]])
    options = {"documents": documents, "stats": Stats(entropy=True), "layers": (1,)}
    expected = model(tiny_tokens(1, 8), tiny_tokens(1, 8, seed=2), **options)
    actual = compiled(tiny_tokens(1, 8), tiny_tokens(1, 8, seed=2), **options)
    torch.testing.assert_close(actual.loss, expected.loss)
    torch.testing.assert_close(actual.attention[0].entropy, expected.attention[0].entropy)
