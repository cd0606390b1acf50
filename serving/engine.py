"""One thread that generates, for many that ask: what stands between a server and the model.

Only that thread touches the batch. Whoever asks leaves a job, is called back from that thread for
every piece of text, and may cancel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from model.batching import Handle, Request
from model.text_batch import TextBatch
from serving.texts import finish_reason


class Full(Exception):
    """No room for a job at the moment."""


class Closed(Exception):
    """The engine has been closed; no more text comes."""


class Piece(NamedTuple):
    """Some more text of one request of a job."""

    choice: int  # the request's place in its job
    text: str
    finish_reason: str | None  # "stop" or "length" with the last piece
    tokens: int  # produced by this request so far
    handle: Handle


Listener = Callable[[Piece | Exception], None]


@dataclass(eq=False, slots=True)
class Job:
    """Some requests that belong together, and who wants to know."""

    requests: Sequence[Request]
    stop: Sequence[str]
    listener: Listener
    going: dict[Handle, int] = field(default_factory=dict)  # the index of each request
    ended: bool = False


class Engine:
    """Runs a `TextBatch` in a thread of its own until it is closed.

    At most `max_texts` requests are taken at a time, those that run and those that wait.
    """

    def __init__(self, texts: TextBatch, *, max_texts: int):
        self.max_texts = max_texts
        self._texts = texts
        self._jobs: dict[Handle, Job] = {}
        self._changed = threading.Condition()
        # Under the condition's lock:
        self._orders: list[Callable[[], None]] = []
        self._active = 0  # requests taken and not ended
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._thread.start()

    @property
    def active(self) -> int:
        """Requests taken and not ended."""
        return self._active

    @property
    def running(self) -> int:
        """Requests that run."""
        return self._texts.batch.running

    @property
    def blocks(self) -> tuple[int, int]:
        """Blocks of the cache that are free, and all of them."""
        return self._texts.batch.free_blocks, self._texts.batch.blocks

    def check(self, request: Request) -> None:
        """Raise ValueError in one line for a request that can never be met."""
        self._texts.batch.check(request)

    def submit(self, requests: Sequence[Request], stop: Sequence[str], listener: Listener) -> Job:
        """Take requests that have been checked; `listener` is called in the engine's thread.

        It gets pieces until each request has had its last, or one exception and no more. Raises
        Full or Closed, and then takes none of them.
        """
        job = Job(requests, stop, listener)
        with self._changed:
            if self._closing:
                raise Closed
            if self._active + len(requests) > self.max_texts:
                raise Full
            self._active += len(requests)
            self._order(lambda: self._begin(job))
        return job

    def cancel(self, job: Job) -> None:
        """End a job; its listener may still hear of what was under way."""
        with self._changed:
            self._order(lambda: self._drop(job))

    def close(self) -> None:
        """End everything; listeners of jobs under way get `Closed`. Does not wait."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def join(self) -> None:
        """Wait for the thread to end, after `close`."""
        self._thread.join()

    # --- in the thread ------------------------------------------------------------------------

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._orders or self._closing) and self._texts.is_idle:
                    self._changed.wait()
                orders, self._orders = self._orders, []
                closing = self._closing
            for order in orders:
                order()
            if closing:
                self._fail(Closed())
                return
            try:
                pieces = self._texts.step()
            except Exception as error:  # the model's: its requests are lost, the engine goes on
                self._fail(error)
                continue
            for handle, text, is_last in pieces:
                self._deliver(handle, text, is_last)

    def _begin(self, job: Job) -> None:
        for index, request in enumerate(job.requests):
            handle = self._texts.submit(request, job.stop)
            job.going[handle] = index
            self._jobs[handle] = job

    def _deliver(self, handle: Handle, text: str, is_last: bool) -> None:
        job, reason = self._jobs[handle], None
        index = job.going[handle]
        if is_last:
            reason = finish_reason(handle)
            del self._jobs[handle], job.going[handle]
            job.ended = not job.going
            self._release(1)
        job.listener(Piece(index, text, reason, len(handle.tokens), handle))

    def _drop(self, job: Job) -> None:
        """Forget what is left of a job."""
        if job.ended:
            return
        job.ended = True
        for handle in job.going:
            self._texts.cancel(handle)
            del self._jobs[handle]
        self._release(len(job.going))
        job.going.clear()

    def _fail(self, error: Exception) -> None:
        """End every job with an error."""
        for job in set(self._jobs.values()):
            self._drop(job)
            job.listener(error)

    def _release(self, count: int) -> None:
        with self._changed:
            self._active -= count
