"""Where the last token of a text looked: the table behind `/show`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from analysis.inside import LayerView, inside
from analysis.weights import row_weights
from data.tokenizers import Tokenizer
from kernels.attention import Stats
from model.decoder import Decoder

SHOWN_TOKENS = 5  # per head, those with the most weight
STATS = Stats(entropy_tokens=True, null_mass=True, sink_mass=(1,))


@torch.inference_mode()
def describe_last_look(
    model: Decoder, ids: Sequence[int], tokenizer: Tokenizer, layer: int | None = None
) -> str:
    """Return a table of what each head of the last of `ids` looked at when it was read.

    A row per head, of one layer or of all: the weight on the first token, the entropy of the
    weights in nats and, where the softmax may attend to nothing, the weight that went there; then
    the tokens with the most weight, each with its weight and how many tokens back it stands.
    Of a text longer than the context its end is read.

    Raises ValueError for a layer that the model does not have.
    """
    read = list(ids[-model.config.context_length :])
    tokens = torch.tensor([read], device=model.embed.weight.device)
    _, views = inside(model, tokens, stats=STATS, layers=None if layer is None else [layer])
    last = len(read) - 1
    has_null = model.config.sink_logit != "none"
    lines = [
        f"{token_text(read[last], tokenizer)}, the last of {len(read)} tokens read, looked at "
        f"(even weights on all have an entropy of {math.log(len(read)):.2f})",
        f"{'layer head':10}  {'first':>5}  {'entropy':>7}"
        + (f"  {'nothing':>7}" if has_null else "")
        + "  token weight (tokens back)",
    ]
    texts = [token_text(token, tokenizer) for token in read]
    for view in views:
        lines += _rows(view, texts, has_null=has_null)
    return "\n".join(lines)


def _rows(view: LayerView, texts: Sequence[str], *, has_null: bool) -> list[str]:
    """A line for each head of a layer."""
    result, last = view.result, len(texts) - 1
    assert result.sink_mass is not None
    assert result.entropy_tokens is not None
    assert result.null_mass is not None
    rows = torch.tensor([[last]], device=view.q.device)
    weights = row_weights(view, rows)[0, :, 0].float()  # (H, T)
    lines = []
    for head, row in enumerate(weights):
        line = (
            f"{view.layer:5} {head:4}  {float(result.sink_mass[0, head, last, 0]):5.3f}"
            f"  {float(result.entropy_tokens[0, head, last]):7.2f}"
        )
        if has_null:
            line += f"  {float(result.null_mass[0, head, last]):7.3f}"
        top = row.topk(min(SHOWN_TOKENS, len(texts)))
        seen = [
            f"{texts[place]} {weight:.3f} ({last - place})"
            for weight, place in zip(top.values.tolist(), top.indices.tolist(), strict=True)
            if weight > 0
        ]
        lines.append(f"{line}  {'  '.join(seen)}")
    return lines


def token_text(token: int, tokenizer: Tokenizer) -> str:
    """The text of a token in quotes, line breaks and parts of characters escaped."""
    if token == tokenizer.bos_id:
        return "<bos>"
    if token >= tokenizer.vocab_size or not tokenizer.token_bytes[token]:
        return f"<id {token}>"
    raw = tokenizer.token_bytes[token]
    try:
        return repr(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return repr(raw)  # part of a character
