"""Tokens per second of cached generation, side by side with peers, on the CPU of this machine.

    python benchmarks/generation.py                      a Llama shape against transformers
    python benchmarks/generation.py --nanogpt PATH       and nanoGPT's own sampler (a checkout)
    python benchmarks/generation.py --lengths            and the cost of a token up to 8k

The Llama shape has 24 M parameters (width 512, MLP 1,376, 8 layers, 8 query heads, 2 key/value
heads, vocabulary 4,096, tied); ours and transformers' hold equal weights, which is checked by
their greedy text. A call reads 32 tokens of prompt and produces 256, greedily; its speed is the
new tokens of all rows over the seconds of the whole call. Sides take turns; what compiling costs
is printed apart and does not count. "bound" is what one matrix-vector product of all the weights
per token would allow, at the better speed of two layouts of the matrix, measured in every repeat.

nanoGPT's sampler is that of its model.py at its README's CPU size, random weights, temperature 0.8
and top_k 200 as in its sample.py, ours with the same; the prompt is one token. "within" stays in
the context of 64; "past it" produces 512, where nanoGPT reads the last 64 tokens anew for each
token and ours slides: the older half is forgotten whenever the context is full, so the two show
the model different texts.

The loss of 8-bit weights is in nats and in the share of equal greedy tokens: on the validation
text of `--run` where one is given, or else on random weights, which says little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_runs import machine_line
from torch import Tensor

from model.checkpoint import resolve_run
from model.config import ModelConfig
from model.decode import DecodeStep
from model.decoder import Decoder
from model.generate import Generator
from model.kv_cache import FullCache
from model.sampling import SamplingOptions

PROMPT, NEW = 32, 256
SHAPE = ModelConfig(
    vocab_size=4096,
    context_length=512,
    n_layer=8,
    n_head=8,
    n_kv_head=2,
    n_embd=512,
    mlp_dim=1376,
    norm_eps=1e-6,
)
NANOGPT_SHAPE = ModelConfig(
    vocab_size=65,
    context_length=64,
    n_layer=4,
    n_head=4,
    n_embd=128,
    position="learned",
    norm="layernorm",
    mlp="gelu",
)
GREEDY = SamplingOptions(temperature=0)
LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192]
Side = Callable[[], int]  # runs once, returns how many tokens it produced


class Speeds(NamedTuple):
    """Tokens per second of one side, one number per repeat."""

    name: str
    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


def measure(sides: dict[str, Side], repeats: int) -> dict[str, Speeds]:
    """Run the sides in turns; each has one run before that, to compile and to warm up."""
    for name, side in sides.items():
        started = time.perf_counter()
        side()
        print(f"  {name}: first call {time.perf_counter() - started:.1f} s", flush=True)
    speeds = {name: Speeds(name, []) for name in sides}
    for repeat in range(repeats):
        order = list(sides) if repeat % 2 == 0 else list(reversed(sides))
        for name in order:
            started = time.perf_counter()
            produced = sides[name]()
            speeds[name].values.append(produced / (time.perf_counter() - started))
    return speeds


def table(speeds: dict[str, Speeds], peer: str) -> str:
    lines = ["| | tokens/s, median (range) | times the peer, median (range) |", "|---|---|---|"]
    for side in speeds.values():
        ratios = [a / b for a, b in zip(side.values, speeds[peer].values, strict=True)]
        lines.append(f"| {side.name} | {_spread(side.values, '.0f')} | {_spread(ratios, '.2f')} |")
    return "\n".join(lines)


def _spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


# --- transformers -------------------------------------------------------------------------------


def their_model(ours: Decoder) -> Any:
    """A Llama of transformers with the weights of ours."""
    import transformers

    config = ours.config
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.kv_heads,
            max_position_embeddings=config.context_length,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=True,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    ).eval()
    names = {
        "model.embed_tokens": "embed",
        "model.norm": "norm",
        "model.layers": "blocks",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
        "self_attn": "attn",
    }
    state = {}
    weights = ours.state_dict()
    for name in theirs.state_dict():
        own = name
        for old, new in names.items():
            own = own.replace(old, new)
        state[name] = weights[own]
    theirs.load_state_dict(state)
    return theirs


def their_side(theirs: Any, prompt: Tensor, new: int) -> Side:
    def run() -> int:
        with torch.inference_mode():
            out = theirs.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=new,
                min_new_tokens=new,
                do_sample=False,
            )
        return (out.shape[1] - prompt.shape[1]) * out.shape[0]

    return run


def our_side(generator: Generator, prompt: Tensor, new: int) -> Side:
    """Generate greedily; rows of a batch share the prompt, as samples of one request do."""

    def run() -> int:
        generation = generator.generate(
            prompt[0].tolist(), max_new_tokens=new, options=GREEDY, num_samples=len(prompt)
        ).run()
        return generation.report.produced_tokens

    return run


def weight_bytes(model: Decoder) -> int:
    """Bytes of every matrix that is multiplied once per token."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return sum(layer.weight.nbytes for layer in layers)


def bound_side(n_bytes: int) -> Side:
    """One product of a matrix of that many bytes and a vector: what a token costs at least."""
    width = 512
    by_row = torch.randn(n_bytes // 4 // width, width)
    by_column = by_row.T.contiguous()
    vector = torch.randn(1, width)
    per_run = 20

    def run() -> int:
        with torch.inference_mode():
            seconds = []
            for product in (lambda: vector @ by_row.T, lambda: vector @ by_column):
                started = time.perf_counter()
                for _ in range(per_run):
                    product()
                seconds.append(time.perf_counter() - started)
        # The clock outside has seen both; let it count the better one's rate.
        return round(per_run * sum(seconds) / min(seconds))

    return run


def against_transformers(batch: int, new: int, repeats: int) -> None:
    torch.manual_seed(0)
    ours = Decoder(SHAPE).eval()
    theirs = their_model(ours)
    prompt = torch.randint(SHAPE.vocab_size, (1, PROMPT)).repeat(batch, 1)
    generators = {
        "ours": Generator(ours),
        "ours, compiled": Generator(ours, compiled=True),
        "ours, compiled, int8": Generator(ours, compiled=True, weights="int8"),
    }
    sides = {"transformers": their_side(theirs, prompt, new)}
    sides |= {name: our_side(generator, prompt, new) for name, generator in generators.items()}
    if batch == 1:
        sides["bound (fp32)"] = bound_side(weight_bytes(ours))
    parameters = sum(parameter.numel() for parameter in ours.parameters())
    print(f"\n{parameters:,} parameters, batch {batch}, {PROMPT} + {new} tokens", flush=True)
    speeds = measure(sides, repeats)
    print(f"\n{table(speeds, 'transformers')}\n")
    if batch == 1:
        shares = [
            a / b
            for a, b in zip(
                speeds["ours, compiled"].values, speeds["bound (fp32)"].values, strict=True
            )
        ]
        print(f"ours, compiled: {_spread([100 * share for share in shares], '.0f')} % of the bound")
        check_equal_texts(theirs, generators["ours, compiled"], prompt, new)


def check_equal_texts(theirs: Any, generator: Generator, prompt: Tensor, new: int) -> None:
    """Fail unless both sides say the same; a draw between two tokens may end the comparison."""
    with torch.inference_mode():
        expected = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new, do_sample=False
        )[0, PROMPT:].tolist()
    got = generator.generate(prompt[0].tolist(), max_new_tokens=new, options=GREEDY).run().tokens[0]
    same = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), new)
    print(f"greedy text equal to transformers' for {same} of {new} tokens")
    if same < new // 4:
        raise SystemExit("ours and transformers say different things")


def int8_loss(run: Path | None) -> None:
    """Print what 8-bit weights cost in nats per token, on a run's validation text."""
    if run is None:
        print("\nint8: give --run RUN to measure its loss on a trained model")
        return
    from data.prepare import prepare
    from data.windows import Windows
    from model.load import load_model
    from training.config import from_dict
    from training.run_folder import read_config

    config = from_dict(read_config(run))
    model, _ = load_model(run, log=lambda line: None)
    context = model.config.context_length
    text = prepare(config.data, config.tokenizer, context_length=context, log=lambda line: None)
    windows = Windows(text.val, context, config.data.mode)
    batch = windows.batch(range(min(len(windows), 256)))
    step = DecodeStep(model, weights="int8")
    with torch.inference_mode():
        losses = []
        best = []
        for network in (model, step.model):
            output = network(batch.tokens, batch.targets)
            assert output.loss is not None
            losses.append(output.loss.item())
            best.append(output.logits.argmax(-1))
    equal = (best[0] == best[1]).float().mean().item()
    change = 100 * (losses[1] / losses[0] - 1)
    print(
        f"\nint8 on {run.name}, {batch.targets.numel():,} tokens of validation text: "
        f"{losses[0]:.4f} -> {losses[1]:.4f} nats per token ({change:+.2f} %), "
        f"the same likeliest token at {100 * equal:.1f} % of places"
    )


# --- nanoGPT ------------------------------------------------------------------------------------


def against_nanogpt(checkout: Path, repeats: int) -> None:
    from nanogpt import load_module

    module = load_module(checkout / "model.py")
    shape = NANOGPT_SHAPE
    torch.manual_seed(0)
    theirs = module.GPT(
        module.GPTConfig(
            block_size=shape.context_length,
            vocab_size=shape.vocab_size,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            n_embd=shape.n_embd,
            dropout=0.0,
            bias=False,
        )
    ).eval()
    ours = Decoder(shape).eval()
    options = SamplingOptions(temperature=0.8, top_k=200)
    start = torch.zeros(1, 1, dtype=torch.int64)

    def their_run(new: int) -> Side:
        def run() -> int:
            with torch.no_grad():
                return theirs.generate(start, new, temperature=0.8, top_k=200).shape[1] - 1

        return run

    def our_run(generator: Generator, new: int) -> Side:
        return lambda: (
            generator.generate([0], max_new_tokens=new, options=options)
            .run()
            .report.produced_tokens
        )

    for name, new, at_limit in (("within the context", 64, "stop"), ("past it", 512, "slide")):
        print(f"\nnanoGPT's CPU size, {name}, {new} new tokens", flush=True)
        sides = {
            "nanoGPT": their_run(new),
            f"ours, {at_limit}": our_run(Generator(ours, at_limit=at_limit), new),
            f"ours, {at_limit}, compiled": our_run(
                Generator(ours, at_limit=at_limit, compiled=True), new
            ),
        }
        print(f"\n{table(measure(sides, repeats), 'nanoGPT')}")


# --- Length -------------------------------------------------------------------------------------


def cost_by_length(figure: Path, lengths: list[int], repeats: int) -> None:
    """Milliseconds per token with caches of different lengths, ours compiled and transformers'."""
    from dataclasses import replace

    torch.manual_seed(0)
    tokens = 16
    ours = Decoder(replace(SHAPE, context_length=lengths[-1] + tokens)).eval()
    theirs = their_model(ours)
    step = DecodeStep(ours, compiled=True)
    rows = []
    print(f"\nmilliseconds per token at a length, median of {repeats} runs of {tokens} tokens")
    print("| length | ours, compiled | transformers | ratio |\n|---|---|---|---|")
    with torch.inference_mode():
        cache = FullCache(ours.config)
        for layer in range(SHAPE.n_layer):  # what is stored does not matter to the clock
            cache.keys[layer].normal_()
            cache.values[layer].normal_()
        for length in lengths:
            sides = (
                _our_milliseconds(step, cache, length, tokens),
                _their_milliseconds(theirs, length, tokens),
            )
            for side in sides:
                side()
            times = [[side() for side in sides] for _ in range(repeats)]
            own, peer = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append((length, own, peer))
            print(f"| {length:,} | {own:.2f} | {peer:.2f} | {peer / own:.2f} |", flush=True)
    draw(figure, rows)


def _our_milliseconds(
    step: DecodeStep, cache: FullCache, length: int, tokens: int
) -> Callable[[], float]:
    def run() -> float:
        cache.length = length
        token = torch.zeros(1, 1, dtype=torch.int64)
        started = time.perf_counter()
        for _ in range(tokens):
            token = step(token, cache).argmax(-1, keepdim=True)
        return 1000 * (time.perf_counter() - started) / tokens

    return run


def _their_milliseconds(theirs: Any, length: int, tokens: int) -> Callable[[], float]:
    from transformers import DynamicCache

    shape = (1, SHAPE.kv_heads, length, SHAPE.head_size)
    keys = [torch.randn(shape) for _ in range(SHAPE.n_layer)]

    def run() -> float:
        cache = DynamicCache()
        for layer, key in enumerate(keys):
            cache.update(key, key, layer)
        token = torch.zeros(1, 1, dtype=torch.int64)
        started = time.perf_counter()
        for _ in range(tokens):
            logits = theirs(token, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
        return 1000 * (time.perf_counter() - started) / tokens

    return run


def draw(path: Path, rows: list[tuple[int, float, float]]) -> None:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    from analysis.plots import STYLE

    lengths, own, peer = zip(*rows, strict=True)
    with rc_context({**STYLE, "font.size": 11}):
        figure = Figure(figsize=(6, 3.6), layout="constrained")
        axes = figure.subplots()
        axes.plot(lengths, own, "o-", color="#D55E00", label="glassgpt, compiled")
        axes.plot(lengths, peer, "s--", color="#0072B2", label="transformers")
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens in the cache")
        axes.set_ylabel("milliseconds per token")
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
    print(path)


def main() -> None:
    """Measure what the options name and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--run", type=Path, help="a trained run, for the loss of 8-bit weights")
    parser.add_argument("--lengths", action="store_true", help="the cost of a token up to 8k")
    parser.add_argument("--figure", type=Path, default=Path("docs/decode_length.png"))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a few tokens, one repeat")
    options = parser.parse_args()
    new, repeats = (16, 1) if options.quick else (NEW, options.repeats)
    if options.nanogpt is not None and not (options.nanogpt / "model.py").is_file():
        parser.error(f"--nanogpt {options.nanogpt} holds no model.py")
    if options.run is not None:
        try:
            options.run = resolve_run(options.run)
        except (OSError, ValueError) as error:
            parser.error(f"--run: {error}")

    print(machine_line())
    for batch in options.batches:
        against_transformers(batch, new, repeats)
    int8_loss(options.run)
    if options.nanogpt is not None:
        against_nanogpt(options.nanogpt, repeats)
    if options.lengths:
        cost_by_length(options.figure, LENGTHS[:2] if options.quick else LENGTHS, repeats)


if __name__ == "__main__":
    main()
