"""Text from a trained run: `python sample.py --run runs/latest --prompt "ROMEO:"`.

Standard output gets the prompt and its continuation, as they come; whatever else there is to say
goes to standard error. What cannot work is one line there, and exit code 2.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from serving.command_line import BAD_INPUT, ONLY_FOR_MANY, parse, refuse_options
from serving.printing import (
    print_samples,
    say,
    say_cache_error,
    say_limit,
    say_logprobs,
)
from serving.prompts import encode_prompt, read_prompt

INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C,
BROKEN_PIPE = 141  # and for one whose reader went away


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample as the command line says: the entry point of `glassgpt-sample`."""
    try:
        if sys.stdout is None:
            raise ValueError("standard output is closed")
        run(parse(arguments))
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


def run(args: argparse.Namespace) -> None:
    """Do what the command line asks for."""
    # Each use is imported only once the command line has been read: PyTorch takes seconds.
    if args.score is not None:
        from serving.score import score

        score(args)
    elif args.interactive:
        from serving.interactive import interact

        interact(args)
    elif args.serve:
        from serving.server import serve

        serve(args)
    elif args.prompts_file is not None:
        from serving.prompts_file import continue_file

        continue_file(args)
    else:
        sample(args)


def sample(args: argparse.Namespace) -> None:
    """Continue one prompt and print it."""
    from model.generate import Generation
    from model.text_stream import stream_text
    from serving.methods import check_method, start
    from serving.session import open_run, sampling_options

    refuse_options(args, "a single prompt", ONLY_FOR_MANY)
    options = sampling_options(args)
    check_method(args, options)
    prompt = read_prompt(args)
    session = open_run(args)
    tokenizer = session.tokenizer
    generator = session.generator(args)
    ids = encode_prompt(prompt, tokenizer)
    generation = start(generator, session, args, ids, options)
    pieces = stream_text(generation, tokenizer.stream, args.stop)
    print_samples(prompt, pieces, len(generation.ends))
    if args.logprobs is not None:
        say_logprobs(generation, tokenizer)
    say(f"step {session.checkpoint.step} on {session.device}: {generation.report}")
    say_limit(generation, generator, goes_on=isinstance(generation, Generation))
    if isinstance(generation, Generation):
        say_cache_error(generator, ids, generation)


if __name__ == "__main__":
    main()
