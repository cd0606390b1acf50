"""`sample.py --interactive`: prompts typed in one after the other, and commands between them.

Texts, tables and help go to standard output, reports and errors to standard error, so that a
script can drive it through pipes. A text draws with a seed of its own: the one that `/seed` or
`--seed` says, then the next.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator

from model.generate import Generation
from model.text_stream import Piece, stream_text
from serving.command_line import MANY, METHODS, ONLY_FOR_MANY, build_parser, refuse_options
from serving.looking import describe_last_look
from serving.printing import print_samples, say, say_limit, use_utf8
from serving.prompts import decode, encode_prompt
from serving.session import Session, open_run, sampling_options

# Options of the command line that are commands here, under the same names.
SETTINGS = (
    "temperature",
    "top-k",
    "top-p",
    "min-p",
    "repetition-penalty",
    "seed",
    "max-new-tokens",
    "at-limit",
)

HELP = """\
A line is a prompt, and each prompt begins a new text. An empty line goes on with the last text,
or begins a document if there is none. A line that ends in \\ goes on in the next one, and // at
the beginning stands for a / of the text. Ctrl-C stops a text, Ctrl-D ends. Each text draws with
the seed after that of the last one.

  /show [LAYER]   where the last token looked: each head's weights on the tokens
  /reset          forget the text
  /help           this
  /quit           end

Settings for the texts to come; a name alone says the value, "off" takes a limit away:
"""


class Quit(Exception):
    """The user has asked to end."""


def interact(args: argparse.Namespace) -> None:
    """Load the model, then answer line after line until the input ends."""
    refuse_options(args, "--interactive", (*MANY, *ONLY_FOR_MANY, *METHODS, "logprobs"))
    sampling_options(args)  # refuses what is out of range before the model is loaded
    session = open_run(args)
    interactive = Interactive(session, args)
    interactive.check_settings()
    use_utf8()
    say(
        f"step {session.checkpoint.step} on {session.device}, a context of "
        f"{session.model.config.context_length} tokens; type a prompt, or /help"
    )
    lines = _Lines()
    while True:
        try:
            interactive.answer(lines.next())
        except (EOFError, Quit):
            return
        except KeyboardInterrupt:
            say("\nCtrl-D or /quit ends")
        except ValueError as error:
            say(f"error: {' '.join(str(error).split())}")


class Interactive:
    """The text so far and the settings, with an answer to every line.

    Attributes:
        args: the options in force, which commands change.
        ids: tokens of the text so far, BOS and prompt included; empty when there is none.
    """

    def __init__(self, session: Session, args: argparse.Namespace) -> None:
        self.args = args
        self.ids: list[int] = []
        self._session = session
        self._options = build_parser()._option_string_actions
        self._commands: dict[str, Callable[[str], None]] = {
            "show": self._show,
            "reset": self._reset,
            "help": self._help,
            "quit": self._quit,
        }

    def answer(self, line: str) -> None:
        """Do what a line asks for.

        Raises ValueError in one line for what cannot be done, and Quit at the end.
        """
        if line.startswith("/") and not line.startswith("//"):
            self._command(line)
        elif line:
            prompt = line[1:] if line.startswith("//") else line
            self._write(prompt, encode_prompt(prompt, self._session.tokenizer))
        else:
            self._write("", self.ids or encode_prompt("", self._session.tokenizer))

    def check_settings(self) -> None:
        """Raise ValueError for settings that no prompt could be continued with."""
        self._start([0] * max(1, self._session.model.config.prefix))

    # Texts

    def _write(self, shown: str, ids: list[int]) -> None:
        """Print a text that goes on from `ids`, after the part of the prompt that is `shown`."""
        generation = self._start(ids)
        seed = self.args.seed
        self.args.seed += 1
        kept = _Kept(stream_text(generation, self._session.tokenizer.stream, self.args.stop))
        try:
            print_samples(shown, kept, 1)
        except KeyboardInterrupt:
            print(flush=True)
            say("stopped")
        self.ids = self._ids_after(ids, generation, kept.text)
        say(f"seed {seed}: {generation.report}")
        say_limit(generation, self._session.generator(self.args))

    def _start(self, ids: list[int]) -> Generation:
        return self._session.generator(self.args).generate(
            ids,
            max_new_tokens=self.args.max_new_tokens,
            options=sampling_options(self.args),
            seed=self.args.seed,
            eos_id=self._session.tokenizer.eos_id,
        )

    def _ids_after(self, ids: list[int], generation: Generation, text: str) -> list[int]:
        """Tokens of the whole text; of one cut short, by a stop text or Ctrl-C, what was shown."""
        if generation.ends[0] in ("stopped", None):
            return ids + self._session.tokenizer.encode(text)
        return ids + generation.tokens[0]

    # Commands

    def _command(self, line: str) -> None:
        name, _, value = line[1:].partition(" ")
        value = value.strip()
        if name in self._commands:
            self._commands[name](value)
        elif name in SETTINGS:
            self._set(name, value)
        else:
            near = difflib.get_close_matches(name, [*self._commands, *SETTINGS], n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help names them all"
            raise ValueError(f"unknown command /{name}; {hint}")

    def _set(self, name: str, text: str) -> None:
        field = name.replace("-", "_")
        before = getattr(self.args, field)
        if text:
            setattr(self.args, field, self._value(name, text))
            try:
                self.check_settings()
            except ValueError:
                setattr(self.args, field, before)
                raise
        say(self._setting(name))

    def _value(self, name: str, text: str) -> object:
        """Read a value as the command line would."""
        option = self._options[f"--{name}"]
        if text == "off" and option.default is None:
            return None
        if option.type not in (int, float):
            return text
        try:
            return option.type(text)
        except ValueError:
            kind = "a whole number" if option.type is int else "a number"
            raise ValueError(f"/{name} takes {kind}, not {text!r}") from None

    def _setting(self, name: str) -> str:
        value = getattr(self.args, name.replace("-", "_"))
        return f"/{name} {'off' if value is None else value}"

    def _show(self, value: str) -> None:
        if not self.ids:
            raise ValueError("/show looks at the last text, and there is none yet")
        if value and not value.isdecimal():
            raise ValueError(f"/show takes the number of a layer, not {value!r}")
        layer = int(value) if value else None
        session = self._session
        print(describe_last_look(session.model, self.ids, session.tokenizer, layer), flush=True)

    def _reset(self, value: str) -> None:
        self.ids = []
        say("the text is forgotten")

    def _help(self, value: str) -> None:
        print(HELP)
        for name in SETTINGS:
            print(f"  {self._setting(name):26} {self._options[f'--{name}'].help}")
        sys.stdout.flush()

    def _quit(self, value: str) -> None:
        raise Quit


class _Kept:
    """Pieces of a text that pass through, and their text in one."""

    def __init__(self, pieces: Iterator[Piece]) -> None:
        self.text = ""
        self._pieces = pieces

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self.text += piece.text
            yield piece


class _Lines:
    """Lines typed in, with history where there is readline; or those of a pipe or file."""

    def __init__(self) -> None:
        self._typed = sys.stdin is not None and sys.stdin.isatty()
        if self._typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - from here on `input` edits and remembers lines

    def next(self) -> str:
        r"""Return the next line, joined with those after it while it ends in a backslash.

        Raises EOFError at the end, and ValueError for a line that is not UTF-8.
        """
        line = self._one("> ")
        while line.endswith("\\"):
            line = f"{line[:-1]}\n{self._one('. ')}"
        return line

    def _one(self, prompt: str) -> str:
        if self._typed:
            return input(prompt if sys.stdout.isatty() else "")
        raw = b"" if sys.stdin is None else sys.stdin.buffer.readline()
        if not raw:
            raise EOFError
        return decode(raw, "the line").removesuffix("\n").removesuffix("\r")
