"""Many texts together: what `--prompts-file` and `--serve` have in common."""

from __future__ import annotations

import argparse

from model.batching import ContinuousBatch, Handle
from model.decode import DecodeStep
from model.text_batch import TextBatch
from serving.session import Session

FINISH_REASONS = {"eos": "stop", "stopped": "stop", "length": "length", "context": "length"}


def open_batch(args: argparse.Namespace, session: Session) -> TextBatch:
    """Make the batch that the command line asks for; ValueError in one line if it cannot be."""
    if args.no_cache:
        raise ValueError("--no-cache reads one prompt at a time: leave it out, or the batch")
    if args.max_concurrent < 1:
        raise ValueError(f"max_concurrent={args.max_concurrent} must be at least 1")
    batch = ContinuousBatch(
        DecodeStep(session.model, weights=args.weights).model,
        max_batch=args.max_concurrent,
        cache_tokens=args.cache_tokens,
        vocab_size=session.tokenizer.vocab_size,
        at_limit=args.at_limit,
    )
    return TextBatch(batch, session.tokenizer.stream)


def finish_reason(handle: Handle) -> str:
    """Why a text ended: "stop" (its end, or a stop string) or "length" (cut off)."""
    assert handle.end is not None
    return FINISH_REASONS[handle.end]
