"""What keys and values in 8 and in 4 bits cost a trained model, in bits per byte.

    python benchmarks/cache_loss.py --run runs/latest

Texts of one context come from the validation split of the run and are read token by token through
each cache. The loss is the mean over the tokens that are predicted when at least one group is
quantised, the same ones for every cache: those after the first `sinks + group`.
"""

from __future__ import annotations

import argparse
import math

import torch
from own_runs import machine_line
from streaming import open_run, texts
from torch import Tensor

from model.caches import CacheOptions, make_cache
from model.decoder import Decoder, next_token_loss

KINDS = ("full", "int8", "int4")


@torch.inference_mode()
def read_loss(model: Decoder, tokens: Tensor, options: CacheOptions) -> float:
    """Mean loss in nats of the tokens (B, T) after the first `sinks + group`, read one by one."""
    cache = make_cache(model.config, options, batch=tokens.shape[0])
    first = options.sinks + options.group
    total = 0.0
    for number, (token, target) in enumerate(zip(tokens.T[:-1], tokens.T[1:], strict=True)):
        logits = model.forward(token[:, None], cache=cache).logits
        if number >= first:
            total += next_token_loss(logits, target[:, None], "sum").item()
    return total / tokens[:, first + 1 :].numel()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="runs/latest")
    parser.add_argument("--texts", type=int, default=256, help="how many texts (256)")
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--cache-dir", help="where texts are prepared, if not where the run says")
    args = parser.parse_args()
    try:
        if args.texts < 1:
            raise ValueError(f"--texts {args.texts} must be at least 1")
        options = [CacheOptions(kind=kind, sinks=args.sinks, group=args.group) for kind in KINDS]
        run = open_run(args.run, args.cache_dir)
        context, exact = run.model.config.context_length, args.sinks + args.group
        if context <= exact:
            raise ValueError(
                f"--sinks {args.sinks} and --group {args.group} leave nothing to quantise in a "
                f"context of {context} tokens"
            )
        tokens = texts(run.text, args.texts, context + 1)
        losses = [read_loss(run.model, tokens, each) for each in options]
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    print(machine_line())
    counted = tokens[:, exact + 1 :].numel()
    print(f"{run.name}: {counted:,} tokens after the first {exact} of {len(tokens)} texts")
    known = run.text.sidecar
    bits = known.n_tokens / known.n_bytes / math.log(2)  # per byte, for a nat per token
    for kind, loss in zip(KINDS, losses, strict=True):
        change = f"{100 * (loss / losses[0] - 1):+.3f} %"
        print(f"{kind}: {bits * loss:.4f} bits per byte" + f" ({change})" * (kind != "full"))


if __name__ == "__main__":
    main()
