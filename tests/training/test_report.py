"""The plan before a run and the report after it: their numbers are the model's."""

from __future__ import annotations

import re

import torch

from data.tokenizers import TokenizerConfig, build_tokenizer
from model.decoder import Decoder
from tests.training import runs
from training.optim import build_optimizers
from training.plan import describe_plan
from training.report import neutral_prompt

UNITS = {"B": 1, "KiB": 1024, "MiB": 1024**2}


def stated(page: str, name: str) -> float:
    """A size on the plan's page, in bytes."""
    number, unit = re.findall(rf"{name}\s+([\d.,]+) (\w+)", page)[0]
    return float(number.replace(",", "")) * UNITS[unit]


def test_the_planned_memory_of_weights_and_optimizer_is_what_they_take(tmp_path):
    for kind in ("adamw", "muon", "sgd"):
        config = runs.config(tmp_path, optim__kind=kind, model__vocab_size=45)
        page = describe_plan(config, dtype=torch.float32, world=1)
        model = Decoder(config.model)
        optimizers = build_optimizers(model, config.optim)
        optimizers.set_lr(1.0)
        tokens = torch.randint(45, (2, 16))
        model(tokens, tokens).loss.backward()
        optimizers.step()
        weights = sum(p.nbytes for p in model.parameters())
        state = sum(t.nbytes for n, t in optimizers.state_tensors().items() if t.ndim)
        assert abs(stated(page, "weights") - weights) <= 0.051 * 1024
        assert abs(stated(page, "optimizer state") - state) <= 0.051 * 1024
        cache = (
            2 * 2 * 1 * 8 * 16 * 4
        )  # layers, keys and values, kv heads, head size, tokens, bytes
        assert abs(stated(page, "full context:") - cache) <= 0.051 * 1024


def test_a_text_begins_with_bos_or_a_newline_or_whatever_there_is():
    def prompt(kind: str, text: str) -> list[int]:
        return neutral_prompt(build_tokenizer(TokenizerConfig(kind=kind), [text], []))

    assert prompt("bpe", "abc abc") == [0]  # BOS
    assert prompt("byte", "abc") == [10]
    assert prompt("char", "b\na") == [0]  # the newline sorts first
    assert prompt("char", "ab") == [0]
