"""Generated tokens as text, piece by piece: whole characters only, up to a stop string.

A decoder for streams turns ids into text and holds back unfinished characters. Here text is held
back, too, while it could be the beginning of a stop string, however the tokens cut it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from model.generate import Report
from model.sampling import TokenLogprob


class TokenStream(Protocol):
    """Samples that produce their tokens while one iterates, in whatever way they are decoded."""

    @property
    def tokens(self) -> list[list[int]]:
        """What each sample has produced."""

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        """How likely these tokens were, where that was asked for."""

    @property
    def ends(self) -> list[str | None]:
        """Why each sample ended, None while it goes on."""

    @property
    def report(self) -> Report:
        """What it has cost so far."""

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        """Steps, each with (sample, token) of the samples that went on."""

    def stop(self, sample: int) -> None:
        """End one sample."""


class StreamDecoder(Protocol):
    """What is needed of a tokenizer: ids one at a time in, complete characters out."""

    def step(self, token_id: int) -> str:
        """Return the text that `token_id` completes, possibly none."""

    def flush(self) -> str:
        """Return the text of what is left, when no more ids come."""


class Piece(NamedTuple):
    """Some more text of one sample; `is_last` comes once for each sample, maybe with no text."""

    sample: int
    text: str
    is_last: bool


def stream_text(
    generation: TokenStream, new_decoder: Callable[[], StreamDecoder], stop: Sequence[str] = ()
) -> Iterator[Piece]:
    """Run a generation; yield the text of its samples piece by piece, as soon as it is certain.

    A sample ends before the first of the `stop` strings that its text completes. Raises
    ValueError for an empty stop string.
    """
    if not all(stop):
        raise ValueError("a stop text must not be empty")
    texts = {sample: TextStream(new_decoder(), stop) for sample in range(len(generation.ends))}
    for step in generation:
        for sample, token in step:
            if text := texts[sample].feed(token):
                yield Piece(sample, text, is_last=False)
            if texts[sample].stopped:
                generation.stop(sample)
                generation.ends[sample] = "stopped"  # also where this was the last token anyway
        for sample in [sample for sample in texts if generation.ends[sample]]:
            yield Piece(sample, texts.pop(sample).finish(), is_last=True)


def collect_texts(
    generation: TokenStream, new_decoder: Callable[[], StreamDecoder], stop: Sequence[str] = ()
) -> list[str]:
    """Run a generation to its end and return the text of each sample."""
    texts = [""] * len(generation.ends)
    for piece in stream_text(generation, new_decoder, stop):
        texts[piece.sample] += piece.text
    return texts


class TextStream:
    """The text of one sample: what is certain goes out, what may be a stop string waits."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str]):
        self.stopped = False
        self._decoder = decoder
        self._stop = stop
        self._waiting = ""

    def feed(self, token: int) -> str:
        """Return the text that has become certain with `token`."""
        return self._release(self._decoder.step(token))

    def finish(self) -> str:
        """Return what was held back, after the last token."""
        if self.stopped:
            return ""
        certain = self._release(self._decoder.flush())
        return certain if self.stopped else certain + self._waiting

    def _release(self, text: str) -> str:
        self._waiting += text
        found = [stop for stop in self._stop if stop in self._waiting]
        if found:
            # The one completed first, so that the result is the same however tokens cut the text.
            begin, _ = min(map(self._place, found), key=lambda place: (place[1], place[0]))
            self.stopped = True
            return self._waiting[:begin]
        certain = len(self._waiting) - self._could_begin_a_stop()
        text, self._waiting = self._waiting[:certain], self._waiting[certain:]
        return text

    def _place(self, stop: str) -> tuple[int, int]:
        """Where a stop string that occurs begins and ends."""
        begin = self._waiting.index(stop)
        return begin, begin + len(stop)

    def _could_begin_a_stop(self) -> int:
        """Length of the longest end of the waiting text that is the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, len(stop))
                if self._waiting.endswith(stop[:length])
            ),
            default=0,
        )
