"""The options of `sample.py`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import NoReturn

from generation.printing import say

BAD_INPUT = 2
COMPILING_PAYS = 10_000  # new tokens

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
  python sample.py --prompt-file opening.txt > out.txt
  printf "KING" | python sample.py

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
    add(
        "--compile",
        default="auto",
        choices=("auto", "true", "false"),
        help="compile the step that produces a token: some tens of seconds, once, then faster; "
        f"auto (default): where at least {COMPILING_PAYS:,} new tokens are asked for",
    )
    add(
        "--weights",
        default="full",
        choices=("full", "int8"),
        help="full (default), or int8: linear layers in 8 bits, on a CPU, not exact",
    )
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
        help="at the context length: stop (default), slide (forget the older half), stream (keep "
        "the first tokens and the last ones; of a longer prompt these alone are read) or error "
        "(refuse beforehand)",
    )

    add = parser.add_argument_group("what is remembered of tokens read").add_argument
    add(
        "--cache",
        default="full",
        metavar="KIND",
        help="keys and values: full (default), int8 (in 8 bits) or evicting (the most looked at)",
    )
    add(
        "--sinks",
        type=int,
        default=4,
        metavar="K",
        help="first tokens that stream and evicting never forget, and int8 keeps exactly (4)",
    )
    add("--budget", type=int, metavar="N", help="tokens that evicting keeps for each head")

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
