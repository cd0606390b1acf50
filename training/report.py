"""The end of a run: samples, pictures and the numbers that matter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from data.prepare import Prepared
from data.tokenizers import Tokenizer
from model.checkpoint import list_checkpoints, step_of
from model.decoder import Decoder
from model.generate import Generator
from model.sampling import SamplingOptions
from model.text_stream import collect_texts
from training.config import TrainConfig
from training.evaluate import Evaluation
from training.state import Counters
from training.throughput import Meter


def sample_texts(model: Decoder, text: Prepared, config: TrainConfig, seed: int) -> list[str]:
    """Draw the samples that a run ends with, each from the beginning of a text.

    A model with a visible prefix needs one of full length: the first tokens of the validation text.
    """
    if config.samples == 0 or config.sample_tokens == 0:
        return []
    tokenizer = text.tokenizer
    was_training = model.training
    model.eval()
    generator = Generator(model, vocab_size=tokenizer.vocab_size, at_limit="slide")
    prompt = neutral_prompt(tokenizer)
    if len(prompt) < model.config.prefix:
        prompt = text.val.read(0, model.config.prefix).tolist()
    generation = generator.generate(
        prompt,
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
    looking: str | None = None,
) -> str:
    """Return the report that a run closes with.

    Args:
        run: its folder.
        counters: where the loop stands.
        final: the last evaluation, if one was made.
        samples: texts to show.
        meter: has measured the training of this process, evaluation and saving left out.
        looking: what telemetry says it has cost, if it was on.
    """
    lines = []
    for number, text in enumerate(samples, start=1):
        lines += [f"--- sample {number} " + "-" * 60, text.strip("\n")]
    lines.append("-" * 73)
    lines.append(
        f"{counters.step:,} steps, {counters.tokens:,} tokens; {meter.step_seconds:.0f} s of "
        f"training in this process ({meter.average_tokens_per_s():,.0f} tokens/s)"
    )
    if looking is not None:
        lines.append(looking)
    if final is not None:
        lines.append(str(final))
    if counters.best_loss is not None and counters.best_step != counters.step:
        lines.append(f"best validation loss {counters.best_loss:.4f} at step {counters.best_step}")
    saved = [step_of(path) for path in list_checkpoints(run)]
    if counters.step not in saved:
        newest = f"the newest is of step {saved[-1]}" if saved else "there is none at all"
        lines.append(f"warning: no checkpoint of step {counters.step} could be saved; {newest}")
    lines.append(f"run folder {run}")
    return "\n".join(lines)


def draw_pictures(run: Path, log: Callable[[str], None], *, with_heads: bool) -> None:
    """Write the run's pictures and, `with_heads`, those of its heads and ``report.html``.

    What fails, as for want of a plotting library, costs itself, one line and nothing else.
    """
    drawings = {"plots were drawn": _plot_run}
    if with_heads:
        drawings |= {"plots of heads were drawn": _plot_heads, "report was written": _write_report}
    for what, draw in drawings.items():
        try:
            draw(run)
        except Exception as error:
            log(f"warning: no {what}: {error}")


def _plot_run(run: Path) -> None:
    from analysis.plots import plot_run

    plot_run(run)


def _plot_heads(run: Path) -> None:
    from analysis.head_plots import plot_heads

    plot_heads(run)


def _write_report(run: Path) -> None:
    from analysis.report import write_report

    write_report(run)
