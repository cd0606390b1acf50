"""Ways to decode, chosen on the command line: token by token, with drafts, or as beams.

Whatever the way, what comes out is iterated over and printed alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from model.beam import Beam, beam_search
from model.drafts import LookUp
from model.generate import Generator, Report
from model.load import check_tokenizer, load_model
from model.sampling import SamplingOptions, TokenLogprob
from model.speculative import speculate
from model.text_stream import TokenStream
from serving.command_line import TEMPERATURE
from serving.session import Session

DRAFT_TOKENS = 5
LENGTH_PENALTY = 1.0


def check_method(args: argparse.Namespace, options: SamplingOptions) -> None:
    """Raise ValueError in one line for options that have no part in the way chosen."""
    speculates = args.draft is not None or args.lookup is not None
    if args.draft_tokens is not None and not speculates:
        raise ValueError("--draft-tokens says how much to draft: it needs --draft or --lookup")
    if args.beams is None:
        if args.length_penalty is not None:
            raise ValueError("--length-penalty compares beams: it needs --beams")
        return
    if args.beams > 0 and not 0 < args.num_samples <= args.beams:
        raise ValueError(
            f"--num-samples {args.num_samples} must be from 1 to the number of beams, {args.beams}"
        )
    if args.logprobs is not None:
        raise ValueError("--beams compares whole texts and says their scores: leave out --logprobs")
    unused = ["temperature"] if options.temperature not in (0, TEMPERATURE) else []
    unused += [
        field.name
        for field in dataclasses.fields(options)
        if field.name != "temperature" and getattr(options, field.name) != field.default
    ]
    if unused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        raise ValueError(f"--beams draws nothing, from the model's own probabilities: no {names}")


def start(
    generator: Generator,
    session: Session,
    args: argparse.Namespace,
    prompt: Sequence[int],
    options: SamplingOptions,
) -> TokenStream:
    """Begin to decode in the way that the command line asks for."""
    if args.beams is not None:
        return _beams(generator, args, prompt, session.tokenizer.eos_id)
    draft: Generator | LookUp | None = None
    if args.lookup is not None:
        draft = LookUp(args.lookup)
    elif args.draft is not None:
        draft = _open_draft(session, args)
    request = {
        "max_new_tokens": args.max_new_tokens,
        "options": options,
        "num_samples": args.num_samples,
        "seed": args.seed,
        "eos_id": session.tokenizer.eos_id,
        "logprobs": args.logprobs,
    }
    if draft is None:
        return generator.generate(prompt, **request)
    draft_tokens = DRAFT_TOKENS if args.draft_tokens is None else args.draft_tokens
    return speculate(generator, prompt, draft=draft, draft_tokens=draft_tokens, **request)


def _open_draft(session: Session, args: argparse.Namespace) -> Generator:
    """Load the draft model; refuse one that was trained with another tokenizer."""
    dtype = session.model.embed.weight.dtype
    model, checkpoint = load_model(args.draft, device=session.device, dtype=dtype)
    check_tokenizer(checkpoint, session.tokenizer.sha256)
    return dataclasses.replace(session, model=model, generators={}).generator(args)


def _beams(
    generator: Generator, args: argparse.Namespace, prompt: Sequence[int], eos_id: int | None
) -> FoundBeams:
    started = time.perf_counter()
    beams = beam_search(
        generator,
        prompt,
        num_beams=args.beams,
        max_new_tokens=args.max_new_tokens,
        length_penalty=LENGTH_PENALTY if args.length_penalty is None else args.length_penalty,
        eos_id=eos_id,
    )
    seconds = time.perf_counter() - started
    return FoundBeams(beams[: args.num_samples], len(prompt), args.beams, seconds)


@dataclass(slots=True)
class BeamReport(Report):
    """What a search cost, and how likely what it found is."""

    num_beams: int = 0
    seconds: float = 0.0
    found: Sequence[Beam] = ()

    def __str__(self) -> str:
        values = ", ".join(f"{beam.logprob:.3f} ({beam.score:.3f})" for beam in self.found)
        return (
            f"read {self.prompt_tokens} tokens, searched with {self.num_beams} beams in "
            f"{self.seconds:.3f} s; log-probability (score) of what was found: {values}"
        )


class FoundBeams:
    """The best beams of a search, given out like samples, one after the other."""

    def __init__(self, beams: Sequence[Beam], prompt_tokens: int, num_beams: int, seconds: float):
        self.tokens: list[list[int]] = [[] for _ in beams]
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in beams]  # a beam has but a score
        self.ends: list[str | None] = [None] * len(beams)
        self.report: Report = BeamReport(
            prompt_tokens=prompt_tokens,
            produced_tokens=sum(len(beam.tokens) for beam in beams),
            num_beams=num_beams,
            seconds=seconds,
            found=beams,
        )
        self._beams = beams

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for sample, beam in enumerate(self._beams):
            for token in beam.tokens:
                if self.ends[sample] is None:
                    self.tokens[sample].append(token)
                    yield [(sample, token)]
            if self.ends[sample] is None:
                self.ends[sample] = beam.end
            yield []  # so that the end is seen

    def stop(self, sample: int) -> None:
        """Give out no more of one beam."""
        self.ends[sample] = "stopped"
