"""Text from a trained run: `python sample.py --run runs/latest --prompt "ROMEO:"`.

Standard output gets the prompt and its continuation, as they come; whatever else there is to say
goes to standard error. What cannot work is one line there, and exit code 2.
"""

import argparse
import difflib
import io
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from data.tokenizers import Tokenizer
    from model.checkpoint import Checkpoint
    from model.decoder import Decoder
    from model.generate import Generation
    from model.text_stream import Piece

BAD_INPUT = 2
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C,
BROKEN_PIPE = 141  # and for one whose reader went away
BETWEEN_SAMPLES = "---------------"
SMALL_MODEL = 20_000_000  # parameters

EXAMPLES = r"""
examples:
  python sample.py --prompt "ROMEO:"                     the newest run
  python sample.py --run runs/2026-01-31_12-00-00-nano   a certain run
  python sample.py --prompt "ROMEO:" --stop $'\n\n'      one speech
  python sample.py --num-samples 3 --seed 7 --top-k 20   three texts
  python sample.py --temperature 0 --checkpoint last     the likeliest text, newest checkpoint
  python sample.py --at-limit slide --max-new-tokens 5000
  python sample.py --prompt-file opening.txt > out.txt
  printf "KING" | python sample.py

Prompts and stop texts are taken as they are, a line break at the end of a file included.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample as the command line says: the entry point of `glassgpt-sample`."""
    try:
        if sys.stdout is None:
            raise ValueError("standard output is closed")
        sample(parse(arguments))
    except BrokenPipeError:
        # Python flushes standard output once more at its end, and nobody is left to read it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(BROKEN_PIPE)
    except KeyboardInterrupt:
        say("")
        sys.exit(INTERRUPTED)
    except (ValueError, OSError) as error:
        say(f"error: {' '.join(str(error).split())}")
        sys.exit(BAD_INPUT)


def sample(args: argparse.Namespace) -> None:
    """Load the model, continue the prompt, print."""
    # Imported only once the command line has been read: PyTorch takes seconds.
    from model.checkpoint import is_checkpoint, resolve_run
    from model.generate import Generator
    from model.load import load_model
    from model.sampling import SamplingOptions
    from model.text_stream import stream_text
    from training.devices import resolve_device, resolve_dtype

    options = SamplingOptions(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
    )
    prompt = read_prompt(args)
    device = resolve_device(args.device)
    dtype = resolve_dtype(args.dtype, device)
    if is_checkpoint(Path(args.run)) and args.checkpoint is not None:
        raise ValueError(f"--run {args.run} names a checkpoint already: leave out --checkpoint")
    which = "best" if args.checkpoint is None else args.checkpoint
    model, checkpoint = load_model(args.run, which=which, device=device, dtype=dtype)
    use_one_core_if_small(model)
    tokenizer = load_tokenizer(resolve_run(args.run), checkpoint)
    generator = Generator(
        model,
        use_cache=not args.no_cache,
        at_limit=args.at_limit,
        vocab_size=tokenizer.vocab_size,
    )
    generation = generator.generate(
        encode_prompt(prompt, tokenizer),
        max_new_tokens=args.max_new_tokens,
        options=options,
        num_samples=args.num_samples,
        seed=args.seed,
        eos_id=tokenizer.eos_id,
    )
    pieces = stream_text(generation, tokenizer.stream, args.stop)
    print_samples(prompt, pieces, args.num_samples)
    say(f"step {checkpoint.step} on {device}: {generation.report}")
    say_limit(generation, model.config.context_length)


def use_one_core_if_small(model: "Decoder") -> None:
    """Compute a small model on one core, unless OMP_NUM_THREADS says otherwise.

    One token is too little work to share out, and cores that wait for each other on a busy
    machine make it far slower.
    """
    import torch

    is_small = sum(parameter.numel() for parameter in model.parameters()) < SMALL_MODEL
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


def load_tokenizer(run: Path, checkpoint: "Checkpoint") -> "Tokenizer":
    """Load the run's tokenizer; refuse another one than the model was trained with."""
    from data.tokenizers import Tokenizer
    from model.load import check_tokenizer

    tokenizer = Tokenizer.load(run / "tokenizer.json")
    check_tokenizer(checkpoint, tokenizer.sha256)
    return tokenizer


def encode_prompt(prompt: str, tokenizer: "Tokenizer") -> list[int]:
    """Return the ids to go on from: BOS where there is one, as in training, then the prompt."""
    from training.report import neutral_prompt

    tokenizer.check_known(prompt, "the prompt")
    if not prompt:
        return neutral_prompt(tokenizer)
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return begin + tokenizer.encode(prompt)


# Printing


def print_samples(prompt: str, pieces: Iterable["Piece"], count: int) -> None:
    """Print the samples in order, one of them as it comes and those behind it when it has ended.

    Each is the prompt, its continuation and a line break.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
    waiting = [prompt] + [f"{BETWEEN_SAMPLES}\n{prompt}"] * (count - 1)
    ended: set[int] = set()
    current = 0

    def show() -> None:
        sys.stdout.write(waiting[current])
        sys.stdout.flush()
        waiting[current] = ""

    show()
    for piece in pieces:
        waiting[piece.sample] += piece.text
        if piece.is_last:
            waiting[piece.sample] += "\n"
            ended.add(piece.sample)
        show()
        while current in ended and current + 1 < count:
            current += 1
            show()


def say(line: str) -> None:
    """Print a line that is not text of the model."""
    print(line, file=sys.stderr, flush=True)


def say_limit(generation: "Generation", context_length: int) -> None:
    """Say where the context length cut something off."""
    if generation.report.prompt_tokens > context_length:
        say(f"the prompt is longer than the context of {context_length}: only its end was read")
    if "context" in generation.ends:
        say(f"ended at the context length of {context_length} tokens; --at-limit slide goes on")


# The prompt


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from the command line, a file or standard input; "" if there is none."""
    if args.prompt_file not in (None, "-"):
        try:
            return decode(Path(args.prompt_file).read_bytes(), args.prompt_file)
        except OSError as error:
            raise ValueError(f"--prompt-file {args.prompt_file}: {error.strerror}") from error
    if args.prompt not in (None, "-"):
        return decode(os.fsencode(args.prompt), "--prompt")
    asked_for = "-" in (args.prompt, args.prompt_file)
    if not asked_for and not is_piped():
        return ""
    if not asked_for:
        say("reading the prompt from standard input")
    return decode(sys.stdin.buffer.read(), "standard input")


def decode(raw: bytes, source: str) -> str:
    """Return UTF-8 bytes as text."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise ValueError(f"{source} is not UTF-8: byte 0x{byte:02x} at {error.start}") from error


def is_piped() -> bool:
    """Whether standard input is a pipe or a file, and not a terminal or nothing."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # closed, or replaced by something of Python's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


# The command line


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and end with exit code 2."""
        say(f"error: {message}")
        sys.exit(BAD_INPUT)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; unknown options are answered with the nearest name."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, parser._option_string_actions, n=1)
        parser.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))
    return args


def build_parser() -> Parser:
    """Describe every option."""
    parser = Parser(
        usage="%(prog)s [--run PATH] [--prompt TEXT] [options]",
        description="Print text from a trained run.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument_group("the model").add_argument
    add(
        "--run",
        default="runs/latest",
        metavar="PATH",
        help="run folder, or checkpoint folder inside one (runs/latest: the newest run)",
    )
    add(
        "--checkpoint",
        type=checkpoint_name,
        metavar="WHICH",
        help="best (default), last, or a step",
    )
    add("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add("--dtype", default="auto", help="auto (default), fp32, bf16 or fp16")
    add("--no-cache", action="store_true", help="read the whole context for every token (slow)")

    group = parser.add_argument_group("the prompt (default: the beginning of a document)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    add("--prompt-file", metavar="PATH", help="the same, from a file in UTF-8")

    add = parser.add_argument_group("how much").add_argument
    add("--num-samples", type=int, default=1, metavar="N", help="number of texts (1)")
    add("--max-new-tokens", type=int, default=500, metavar="N", help="new tokens in each (500)")
    add(
        "--stop",
        type=stop_text,
        action="append",
        default=[],
        metavar="TEXT",
        help="end a text before this one; may be given several times",
    )
    add(
        "--at-limit",
        default="stop",
        metavar="WHAT",
        help="at the context length: stop (default), slide (forget the older half) or error "
        "(refuse beforehand)",
    )

    add = parser.add_argument_group("how tokens are drawn").add_argument
    add("--temperature", type=float, default=0.8, metavar="T", help="0: the likeliest (0.8)")
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens; 0: all (default)")
    add("--top-p", type=float, metavar="P", help="only the likeliest that reach the mass P")
    add("--min-p", type=float, metavar="P", help="only those above P times the likeliest")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, tokens that occurred become less likely (1)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="text i is drawn with N + i, whatever its number of companions (0)",
    )
    return parser


def checkpoint_name(text: str) -> str | int:
    """Read `--checkpoint`."""
    if text in ("best", "last"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not best, last or a step") from None


def stop_text(text: str) -> str:
    """Read `--stop`."""
    if not text:
        raise argparse.ArgumentTypeError("a stop text must not be empty")
    return text


if __name__ == "__main__":
    main()
