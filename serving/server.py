"""`sample.py --serve`: a small OpenAI-compatible completions endpoint.

POST /v1/completions, GET /v1/models, GET /health. The server library runs in the main thread and
only moves text; one other thread generates (see `serving.engine`).
"""

# No postponed annotations here: the server library looks at those of the handlers.
import argparse
import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from model.checkpoint import resolve_run
from serving.command_line import OF_EACH_TEXT, ONLY_FOR_ONE, refuse_options
from serving.completions import (
    MAX_BODY,
    Answer,
    ApiError,
    Completion,
    bad_request,
    read_completion,
)
from serving.engine import Closed, Engine, Full, Job, Piece
from serving.printing import say
from serving.session import Session, open_run
from serving.texts import open_batch

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI, Request

    Update = Piece | Exception

CLIENT_GONE = 499  # nobody is left to read the answer
CLOSE_SECONDS = 5  # how long a closing server waits for connections
FROM_EACH_REQUEST = (
    "prompt",
    "prompt_file",
    "prompts_file",
    "output",
    *OF_EACH_TEXT,
    *ONLY_FOR_ONE,
)


def serve(args: argparse.Namespace) -> None:
    """Answer requests until SIGINT or SIGTERM.

    Raises ValueError or OSError in one line for what cannot work: before the model is loaded
    where that is known, and before the first request otherwise.
    """
    check_installed()
    refuse_options(args, "--serve", FROM_EACH_REQUEST)
    if args.max_waiting < 0:
        raise ValueError(f"max_waiting={args.max_waiting} must be at least 0")
    with listen(args.host, args.port) as listener:
        session = open_run(args)
        service = Service(args, session)
        host, port = listener.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        say(
            f"step {session.checkpoint.step} on {session.device}: serving {service.model} at "
            f"http://{host}:{port}/v1 (Ctrl-C ends it)"
        )
        try:
            new_server(service).run(sockets=[listener])
        finally:
            service.engine.close()
            service.engine.join()


def check_installed() -> None:
    """Raise ValueError with what to install where the server library is missing."""
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--serve needs {error.name}, which is not installed: pip install -e '.[serve]'"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """Open the socket; ValueError in one line if that address cannot be had."""
    if not 0 <= port < 2**16:
        raise ValueError(f"--port {port} must be from 0 (any free one) to {2**16 - 1}")
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"cannot listen at {host}, port {port}: {error}") from error


def new_server(service: "Service") -> "uvicorn.Server":
    """The HTTP server: it ends on a signal, after ending what is under way, and returns."""
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            # The library's own would raise the signal again in the end: not exit code 0.
            self.force_exit = self.should_exit  # asked for a second time
            self.should_exit = True
            service.engine.close()

    config = uvicorn.Config(
        new_app(service),
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
    return Server(config)


class Service:
    """What the handlers share: the engine, the tokenizer, and the name of the model."""

    def __init__(self, args: argparse.Namespace, session: Session):
        self.model = model_name(args.run)
        self.created = int(time.time())
        self.tokenizer = session.tokenizer
        self.context_length = session.model.config.context_length
        self.max_choices = args.max_concurrent + args.max_waiting
        self.engine = Engine(open_batch(args, session), max_texts=self.max_choices)

    def read(self, raw: bytes) -> Completion:
        """Check the body of a request; raises ApiError for what cannot be met."""
        completion = read_completion(
            raw,
            model=self.model,
            tokenizer=self.tokenizer,
            context_length=self.context_length,
            max_choices=self.max_choices,
        )
        try:
            for request in completion.requests:
                self.engine.check(request)
        except ValueError as error:
            raise bad_request(error) from error
        return completion

    def begin(self, completion: Completion) -> tuple[Job, "asyncio.Queue[Update]"]:
        """Start generating; updates arrive in the queue. ApiError if there is no room."""
        updates: asyncio.Queue[Update] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(update: "Update") -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
                loop.call_soon_threadsafe(updates.put_nowait, update)

        try:
            return self.engine.submit(completion.requests, completion.stop, tell), updates
        except Full:
            raise ApiError(
                429,
                f"this server is busy: it takes {self.max_choices} texts at a time; try again",
                code="rate_limit_exceeded",
            ) from None
        except Closed as closed:
            raise as_api_error(closed) from None


def model_name(run: str) -> str:
    """The name of the run folder."""
    return resolve_run(run).resolve().name


def as_api_error(error: Exception) -> ApiError:
    """What clients are told when a job could not be finished."""
    if isinstance(error, Closed):
        return ApiError(503, "this server is shutting down", code="shutting_down")
    say(f"error: {' '.join(f'{type(error).__name__}: {error}'.split())}")
    return ApiError(500, "the model failed; the server's log says why", code="model_failed")


def new_app(service: Service) -> "FastAPI":
    """The three addresses, and errors in OpenAI's shape."""
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.exceptions import HTTPException as StarletteHTTPException
    from starlette.requests import ClientDisconnect

    app = FastAPI(openapi_url=None)

    @app.get("/health", response_model=None)
    async def health() -> Response:
        engine = service.engine
        free, blocks = engine.blocks
        counts = {"texts": engine.active, "free_blocks": free, "blocks": blocks}
        return JSONResponse({"status": "ok", "model": service.model} | counts)

    @app.get("/v1/models", response_model=None)
    async def models() -> Response:
        model = {"id": service.model, "object": "model", "created": service.created}
        return JSONResponse({"object": "list", "data": [model | {"owned_by": "glassgpt"}]})

    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request) -> Response:
        raw = await read_body(request)
        completion = await asyncio.to_thread(service.read, raw)
        job, updates = service.begin(completion)
        answer = Answer(completion, service.model, service.tokenizer)
        if completion.stream:
            events = stream_events(service.engine, job, updates, completion, answer)
            return StreamingResponse(events, media_type="text/event-stream")
        try:
            body = await unless_gone(request, whole_answer(updates, completion, answer))
        finally:
            service.engine.cancel(job)
        return Response(status_code=CLIENT_GONE) if body is None else JSONResponse(body)

    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        headers = {"Retry-After": "1"} if error.status in (429, 503) else None
        return JSONResponse(error.body(), status_code=error.status, headers=headers)

    @app.exception_handler(StarletteHTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}"
        body = ApiError(error.status_code, message).body()
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def client_gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)

    @app.exception_handler(Exception)  # the library also logs it
    async def fault(request: Request, error: Exception) -> Response:
        body = ApiError(500, "a fault of the server; its log says more").body()
        return JSONResponse(body, status_code=500)

    return app


async def read_body(request: "Request") -> bytes:
    """Read a body, up to its limit."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise ApiError(413, f"the body is larger than {MAX_BODY} bytes", code="body_too_large")
    return bytes(body)


async def unless_gone(request: "Request", work: Any) -> Any:
    """Wait for `work`; None if the client goes away first, and then it is given up."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()


async def pieces_of(
    updates: "asyncio.Queue[Update]", completion: Completion
) -> AsyncIterator[Piece]:
    """Every piece until each text has had its last; ApiError if the job could not be finished."""
    going = len(completion.requests)
    while going:
        update = await updates.get()
        if isinstance(update, Exception):
            raise as_api_error(update)
        yield update
        going -= update.finish_reason is not None


async def whole_answer(
    updates: "asyncio.Queue[Update]", completion: Completion, answer: Answer
) -> dict[str, Any]:
    """The answer once all texts are there."""
    count = len(completion.requests)
    texts, last = [""] * count, {}
    async for piece in pieces_of(updates, completion):
        texts[piece.choice] += piece.text
        last[piece.choice] = piece
    return answer.whole([last[i]._replace(text=texts[i]) for i in range(count)])


async def stream_events(
    engine: Engine,
    job: Job,
    updates: "asyncio.Queue[Update]",
    completion: Completion,
    answer: Answer,
) -> AsyncIterator[bytes]:
    """Server-sent events: text as it comes, at last [DONE]; a job that failed ends with an error.

    When the client goes away the server library gives up this iterator, which cancels the job.
    """
    tokens = [0] * len(completion.requests)
    try:
        for opening in answer.openings():
            yield as_event(opening)
        async for piece in pieces_of(updates, completion):
            tokens[piece.choice] = piece.tokens
            if piece.text or piece.finish_reason:
                yield as_event(answer.chunk(piece))
        if completion.include_usage:
            yield as_event(answer.usage_chunk(sum(tokens)))
        yield b"data: [DONE]\n\n"
    except ApiError as error:
        yield as_event(error.body())
    finally:
        engine.cancel(job)


def as_event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(body)}\n\n".encode()
