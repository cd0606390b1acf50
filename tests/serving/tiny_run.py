"""Run folders with tiny untrained models."""

from pathlib import Path

import torch

from data.tokenizers import TokenizerConfig, build_tokenizer
from model.checkpoint import save_checkpoint
from model.config import ModelConfig
from model.decoder import Decoder

TEXT = "abc déf\nxyz: 中\n" * 30


def make_tiny_run(run: Path, kind: str = "char", context_length: int = 32) -> Path:
    """A run whose tokens vary, on a tokenizer of some kind."""
    run.mkdir(parents=True)
    tokenizer = build_tokenizer(TokenizerConfig(kind=kind, vocab_size=270), [TEXT], [])
    tokenizer.save(run / "tokenizer.json")
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        context_length=context_length,
        n_layer=1,
        n_head=2,
        n_embd=16,
        tie_embeddings=False,
        init_std=0.4,
    )
    torch.manual_seed(10)
    save_checkpoint(
        run,
        10,
        {"model": Decoder(config).state_dict()},
        {"model_config": config.to_dict(), "tokenizer_sha256": tokenizer.sha256},
    )
    return run
