"""A server in this process, on a free port of the loopback."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from model.batching import Handle
from serving.command_line import parse
from serving.server import Service, listen, new_server
from serving.session import open_run


class Serving:
    """The server's address, its parts, and every request that has reached the model."""

    def __init__(self, service: Service, port: int):
        self.service = service
        self.url = f"http://127.0.0.1:{port}"
        self.handles: list[Handle] = []
        texts = service.engine._texts
        submit = texts.submit

        def recording(*arguments: object) -> Handle:
            self.handles.append(submit(*arguments))
            return self.handles[-1]

        texts.submit = recording  # type: ignore[method-assign]

    @property
    def is_empty(self) -> bool:
        free, blocks = self.service.engine.blocks
        engine = self.service.engine
        nothing_kept = not (engine._jobs or engine._texts._texts)
        return engine.active == 0 and free == blocks and nothing_kept


@contextlib.contextmanager
def serving(run: Path, *options: str) -> Iterator[Serving]:
    args = parse(["--run", str(run), "--serve", "--port", "0", *options])
    with listen(args.host, args.port) as listener:
        service = Service(args, open_run(args))
        server = new_server(service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Serving(service, listener.getsockname()[1])
        finally:
            server.handle_exit(15, None)
            thread.join()
            service.engine.join()


def wait_until(happens: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)
