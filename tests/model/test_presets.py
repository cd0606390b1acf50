"""Every shipped model shape, shrunk: it can be built, trained a step and generated from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from data.windows import IGNORE as DATA_IGNORE
from model.config import ModelConfig
from model.decoder import IGNORE, Decoder
from model.generate import Generator
from model.kv_cache import FullCache, KVCache
from model.paged_cache import BlockPool, PagedCache, PagedSequence
from model.sampling import SamplingOptions
from model.streaming_cache import StreamingCache

FILES = sorted((Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))


def shrunk(path: Path) -> ModelConfig:
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(values, dict)
    config = ModelConfig.from_dict({str(key): value for key, value in values.items()})
    small = {"vocab_size": 40, "context_length": 24, "n_layer": 2, "mlp_dim": 32}
    return replace(config, **small, n_embd=8 * config.n_head, head_dim=None)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_learns_and_generates_alike_with_and_without_cache(path):
    torch.manual_seed(0)
    model = Decoder(shrunk(path))
    tokens = torch.randint(40, (2, 24))
    loss = model(tokens, tokens).loss
    assert loss is not None
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    greedy = SamplingOptions(temperature=0)
    texts = [
        Generator(model, use_cache=use_cache)
        .generate([1, 2, 3], max_new_tokens=12, options=greedy)
        .run()
        .tokens
        for use_cache in (True, False)
    ]
    assert texts[0] == texts[1]
    assert len(texts[0][0]) == 12


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_preset_has_the_logits_of_the_uncached_pass_in_every_exact_cache(path):
    """Read in one chunk, in several, and token by token after a first one."""
    torch.manual_seed(0)
    model = Decoder(replace(shrunk(path), init_std=0.3)).eval()
    config = model.config
    tokens = torch.randint(40, (2, 24))
    with torch.inference_mode():
        expected = model(tokens).logits
        for chunks in ([24], [7, 1, 16], [1] * 24):
            pool = BlockPool(config, blocks=6, block_size=8)
            caches: dict[str, KVCache] = {
                "full": FullCache(config, batch=2),
                "paged": PagedCache([PagedSequence(pool), PagedSequence(pool)]),
            }
            if config.position in ("rope", "alibi", "none"):
                caches["streaming"] = StreamingCache(config, batch=2)
            for name, cache in caches.items():
                parts = [model(part, cache=cache).logits for part in tokens.split(chunks, 1)]
                difference = (torch.cat(parts, dim=1) - expected).abs().max()
                assert difference < 1e-4, (name, chunks)


def test_model_and_data_agree_on_the_target_that_does_not_count():
    assert IGNORE == DATA_IGNORE
