"""A batch of requests as text: whole characters only, each up to its first stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from model.batching import ContinuousBatch, Handle, Request
from model.text_stream import StreamDecoder, TextStream


class HandlePiece(NamedTuple):
    """Some more text of one request; `is_last` comes once for each, maybe with no text."""

    handle: Handle
    text: str
    is_last: bool


class TextBatch:
    """Turns the tokens of a `ContinuousBatch` into text, as `stream_text` does for one call."""

    def __init__(self, batch: ContinuousBatch, new_decoder: Callable[[], StreamDecoder]):
        self.batch = batch
        self._new_decoder = new_decoder
        self._texts: dict[Handle, TextStream] = {}

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.batch.running or self.batch.waiting)

    def submit(self, request: Request, stop: Sequence[str] = ()) -> Handle:
        """Let a request wait for its turn; it ends before the first of the `stop` strings.

        Raises ValueError in one line for an empty stop string or a request that cannot be met.
        """
        if not all(stop):
            raise ValueError("a stop text must not be empty")
        handle = self.batch.submit(request)
        self._texts[handle] = TextStream(self._new_decoder(), stop)
        return handle

    def cancel(self, handle: Handle) -> None:
        """End a request; no further piece of it comes."""
        self.batch.cancel(handle)
        self._texts.pop(handle, None)

    def step(self) -> list[HandlePiece]:
        """Produce a token of every request that runs; return the text that has become certain."""
        step = self.batch.step()
        pieces, ended = [], list(step.ended)
        for handle, token in step.tokens:
            stream = self._texts[handle]
            if text := stream.feed(token):
                pieces.append(HandlePiece(handle, text, is_last=False))
            if stream.stopped:
                if handle.end is None:
                    self.batch.cancel(handle)
                    ended.append(handle)
                handle.end = "stopped"
        for handle in ended:
            rest = self._texts.pop(handle).finish()
            pieces.append(HandlePiece(handle, rest, is_last=True))
        return pieces
