"""The end of a run: samples, pictures and the numbers that matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.tokenizers import Tokenizer
from model.decoder import Decoder
from model.generate import Generator
from model.sampling import SamplingOptions
from model.text_stream import collect_texts
from training.config import TrainConfig
from training.evaluate import Evaluation
from training.state import Counters
from training.throughput import Meter


def sample_texts(model: Decoder, tokenizer: Tokenizer, config: TrainConfig, seed: int) -> list[str]:
    """Draw the samples that a run ends with, from a newline, BOS or whatever id comes first."""
    if config.samples == 0 or config.sample_tokens == 0:
        return []
    was_training = model.training
    model.eval()
    generator = Generator(model, vocab_size=tokenizer.vocab_size, at_limit="slide")
    generation = generator.generate(
        neutral_prompt(tokenizer),
        max_new_tokens=config.sample_tokens,
        options=SamplingOptions(temperature=0.8),
        num_samples=config.samples,
        seed=seed,
        eos_id=tokenizer.eos_id,
    )
    texts = collect_texts(generation, tokenizer.stream)
    model.train(was_training)
    return texts


def neutral_prompt(tokenizer: Tokenizer) -> list[int]:
    """Return what text may begin with: BOS, else a newline, else the first id there is."""
    if tokenizer.bos_id is not None:
        return [tokenizer.bos_id]
    try:
        return tokenizer.encode("\n")
    except ValueError:
        return [0]


def describe_end(
    run: Path,
    counters: Counters,
    final: Evaluation | None,
    samples: list[str],
    meter: Meter,
) -> str:
    """Return the report that a run closes with.

    Args:
        run: its folder.
        counters: where the loop stands.
        final: the last evaluation, if one was made.
        samples: texts to show.
        meter: has measured the training of this process, evaluation and saving left out.
    """
    lines = []
    for number, text in enumerate(samples, start=1):
        lines += [f"--- sample {number} " + "-" * 60, text.strip("\n")]
    lines.append("-" * 73)
    lines.append(
        f"{counters.step:,} steps, {counters.tokens:,} tokens; {meter.seconds:.0f} s of training "
        f"in this process ({meter.average_tokens_per_s():,.0f} tokens/s)"
    )
    if final is not None:
        lines.append(str(final))
    if counters.best_loss is not None and counters.best_step != counters.step:
        lines.append(f"best validation loss {counters.best_loss:.4f} at step {counters.best_step}")
    lines.append(f"run folder {run}")
    return "\n".join(lines)


def draw_plots(run: Path, log: Callable[[str], None]) -> None:
    """Write the run's pictures; a failure costs the pictures and nothing else."""
    from analysis.plots import plot_run

    try:
        plot_run(run)
    except Exception as error:
        log(f"warning: no plots were drawn: {error}")
