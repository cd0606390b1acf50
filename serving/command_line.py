"""The options of `sample.py`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from serving.printing import say

BAD_INPUT = 2
COMPILING_PAYS = 10_000  # new tokens
TEMPERATURE = 0.8
SINKS = 4
METHODS = ("draft", "lookup", "beams", "draft_tokens", "length_penalty")
CACHES = ("cache", "sinks", "budget")
OF_EACH_TEXT = (
    "num_samples",
    "max_new_tokens",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
)
ONLY_TO_SERVE = ("host", "port", "max_waiting")
ONLY_FOR_ONE = ("logprobs", *METHODS, *CACHES, "compile", "interactive", "score")
ONLY_FOR_MANY = (*ONLY_TO_SERVE, "output", "max_concurrent", "cache_tokens")
MANY = ("prompts_file", "serve")

EXAMPLES = r"""
examples:
  python sample.py --prompt "ROMEO:"                     the newest run
  python sample.py --run runs/2026-01-31_12-00-00-nano   a certain run
  python sample.py --prompt "ROMEO:" --stop $'\n\n'      one speech
  python sample.py --num-samples 3 --seed 7 --top-k 20   three texts
  python sample.py --temperature 0 --checkpoint last     the likeliest text, newest checkpoint
  python sample.py --at-limit slide --max-new-tokens 5000
  python sample.py --at-limit stream --max-new-tokens 100000   in constant memory
  python sample.py --cache evicting --budget 64          forget what is not looked at
  python sample.py --draft runs/small --prompt "ROMEO:"  the same kind of text, sooner
  python sample.py --beams 8 --max-new-tokens 40         the likeliest text that is found
  python sample.py --prompt-file opening.txt > out.txt
  printf "KING" | python sample.py
  python sample.py --interactive                         prompts typed one after the other
  python sample.py --score chapter.txt                   how well a text is predicted
  python sample.py --score book.txt --score-stream 4     the same, keeping 4 sinks and a window
  python sample.py --rope-scaling yarn --rope-factor 4   four times the trained context
  python sample.py --prompts-file prompts.jsonl --output texts.jsonl
  python sample.py --serve --port 8000                   an OpenAI-compatible endpoint

Prompts and stop texts are taken as they are, a line break at the end of a file included.
"""


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
    if misfit := options_at_odds(args):
        parser.error(misfit)
    return args


def options_at_odds(args: argparse.Namespace) -> str | None:
    """Say which options have no meaning together, if any."""
    has_prompt = args.prompt is not None or args.prompt_file is not None
    if args.score is None:
        given = {
            "--stride": args.stride is not None,
            "--score-stream": args.score_stream is not None,
            "--json": args.json,
        }
        if any(given.values()):
            return f"{next(filter(given.get, given))} goes with --score FILE"
    elif has_prompt:
        return "--score reads the text to score from its file: leave out the prompt"
    elif args.interactive:
        return "--score and --interactive do not go together"
    elif args.score_stream is not None and args.stride is not None:
        return "--stride is for windows, and --score-stream has none: leave out one of them"
    if args.interactive and has_prompt:
        return "--interactive asks for prompts itself: leave out the prompt"
    if args.interactive and args.num_samples != 1:
        return f"--interactive writes one text at a time, not --num-samples {args.num_samples}"
    if (args.rope_scaling is None) != (args.rope_factor is None):
        return "--rope-scaling and --rope-factor go together: give both"
    return None


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
    add(
        "--compile",
        default="auto",
        choices=("auto", "true", "false"),
        help="compile the step that produces a token: some tens of seconds, once (on a CPU the "
        "result is kept on disk), then faster; "
        f"auto (default): where at least {COMPILING_PAYS:,} new tokens are asked for",
    )
    add(
        "--weights",
        default="full",
        choices=("full", "int8"),
        help="full (default), or int8: linear layers in 8 bits, on a CPU, not exact",
    )
    add("--no-cache", action="store_true", help="read the whole context for every token (slow)")

    add(
        "--rope-scaling",
        metavar="HOW",
        help="stretch the context of a RoPE model: linear, ntk or yarn (none: just go on)",
    )
    add("--rope-factor", type=float, metavar="F", help="to F times the trained context")

    group = parser.add_argument_group("the prompt (default: the beginning of a document)")
    add = group.add_mutually_exclusive_group().add_argument
    add("--prompt", metavar="TEXT", help="text to continue; - reads standard input")
    add("--prompt-file", metavar="PATH", help="the same, from a file in UTF-8")
    add(
        "--prompts-file",
        metavar="PATH",
        help='many prompts: JSON Lines of {"prompt": TEXT}, with an id, and max_new_tokens, seed, '
        "stop, temperature, top_p and so on where they differ from the options here",
    )
    add("--serve", action="store_true", help="answer requests over HTTP at POST /v1/completions")

    add = parser.add_argument_group("many texts: with --prompts-file or --serve").add_argument
    add("--output", metavar="PATH", help="JSON Lines for --prompts-file (standard output)")
    add("--max-concurrent", type=int, default=16, metavar="N", help="texts made together (16)")
    add(
        "--cache-tokens",
        type=int,
        metavar="N",
        help="memory for keys and values of N tokens (a whole context for each text)",
    )
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="0: any free one (8000)")
    add("--max-waiting", type=int, default=64, metavar="N", help="texts that may wait (64)")

    add = parser.add_argument_group("other uses").add_argument
    add("-i", "--interactive", action="store_true", help="prompts typed in, /help for commands")
    add("--score", metavar="FILE", help="loss, perplexity, bits per byte of a text; - reads input")
    add(
        "--stride",
        type=int,
        metavar="N",
        help="score windows of the context length that begin N tokens apart, each counting only "
        "tokens not yet counted (half the context)",
    )
    add(
        "--score-stream",
        type=int,
        nargs="?",
        const=4,
        metavar="K",
        help="score in one reading, token by token, that keeps the first K tokens (4) and the last "
        "ones, as many as the context holds",
    )
    add("--json", action="store_true", help="print the score as one line of JSON")

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
        help="at the context length: stop (default), slide (forget the older half), stream (keep "
        "the first tokens and the last ones; of a longer prompt these alone are read) or error "
        "(refuse beforehand)",
    )

    add = parser.add_argument_group("what is remembered of tokens read").add_argument
    add(
        "--cache",
        default="full",
        metavar="KIND",
        help="keys and values: full (default), int8, int4 (in 8 or 4 bits) or evicting (the most "
        "looked at)",
    )
    add(
        "--sinks",
        type=int,
        default=SINKS,
        metavar="K",
        help="first tokens that stream and evicting never forget, int8 and int4 keep exactly "
        f"({SINKS})",
    )
    add("--budget", type=int, metavar="N", help="tokens that evicting keeps for each head")

    add = parser.add_argument_group("how tokens are drawn").add_argument
    add(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        metavar="T",
        help=f"0: the likeliest ({TEMPERATURE})",
    )
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens; 0: all (default)")
    add("--top-p", type=float, metavar="P", help="only the likeliest that reach the mass P")
    add("--min-p", type=float, metavar="P", help="only those above P times the likeliest")
    add("--typical-p", type=float, metavar="P", help="only the most typical that reach the mass P")
    add(
        "--repetition-penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, tokens that occurred become less likely (1)",
    )
    add(
        "--presence-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="taken off the logit of each token produced before (0)",
    )
    add(
        "--frequency-penalty",
        type=float,
        default=0.0,
        metavar="R",
        help="the same, as many times as the token was produced (0)",
    )
    add(
        "--logit-bias",
        type=id_and_bias,
        action="append",
        default=[],
        metavar="ID=B",
        help="add B, from -100 to 100, to the logit of a token (--logprobs shows ids); may be "
        "given several times",
    )
    add(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="text i is drawn with N + i, whatever its number of companions (0)",
    )
    add(
        "--logprobs",
        type=int,
        metavar="N",
        help="print after the texts, on standard error, the model's own probability of each token "
        "and of the N likeliest in its place",
    )
    add_methods(parser)
    return parser


def add_methods(parser: Parser) -> None:
    """Describe the ways to decode other than one token at a time."""
    group = parser.add_argument_group("other ways to decode (at most one)")
    add = group.add_mutually_exclusive_group().add_argument
    add(
        "--draft",
        metavar="RUN",
        help="let the model of a smaller run with the same tokenizer draft tokens, which the model "
        "accepts or corrects: sooner, and equally distributed",
    )
    add(
        "--lookup",
        type=int,
        nargs="?",
        const=3,
        metavar="N",
        help="the same, drafting what followed the last time that up to N tokens were said (3)",
    )
    add(
        "--beams",
        type=int,
        metavar="N",
        help="search for the likeliest text with N beams; --num-samples of the best are printed, "
        "each up to its first stop text",
    )
    add = group.add_argument
    add("--draft-tokens", type=int, metavar="K", help="draft up to K tokens at a time (5)")
    add(
        "--length-penalty",
        type=float,
        metavar="A",
        help="compare beams by log-probability / length^A; 0 favours short ones (1)",
    )


def refuse_options(args: argparse.Namespace, mode: str, names: Iterable[str]) -> None:
    """Raise ValueError for options that were given but have no meaning together with `mode`."""
    parser = build_parser()
    for name in names:
        if getattr(args, name) != parser.get_default(name):
            raise ValueError(f"--{name.replace('_', '-')} has no meaning with {mode}")


def checkpoint_name(text: str) -> str | int:
    """Read `--checkpoint`."""
    if text in ("best", "last"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not best, last or a step") from None


def id_and_bias(text: str) -> tuple[int, float]:
    """Read `--logit-bias`."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=B, such as 17=-2.5") from None


def stop_text(text: str) -> str:
    """Read `--stop`."""
    if not text:
        raise argparse.ArgumentTypeError("a stop text must not be empty")
    return text
