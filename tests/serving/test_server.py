"""The endpoint as clients see it: texts, streams, limits, clients that leave, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from data.tokenizers import Tokenizer
from sample import main
from serving.printing import BETWEEN_SAMPLES
from tests.serving.serving import Serving, serving, wait_until
from tests.serving.tiny_run import make_tiny_run

ROOT = Path(__file__).parents[2]
CONTEXT = 48
LONG = {"prompt": "abc", "max_tokens": 20_000, "temperature": 0}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny", "bpe", CONTEXT)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a context that takes a while to fill."""
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "long", "char", 20_000)


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[Serving]:
    with serving(run, "--max-concurrent", "4", "--max-waiting", "60") as running:
        yield running


@pytest.fixture(scope="module")
def narrow(long_run: Path) -> Iterator[Serving]:
    """A server with room for one text, and one that waits."""
    with serving(long_run, "--max-concurrent", "1", "--max-waiting", "1") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def printed(run: Path, capsys) -> Callable[..., list[str]]:
    """The oracle: the continuations that `sample.py` prints."""

    def call(prompt: str, *arguments: str) -> list[str]:
        main(["--run", str(run), "--prompt", prompt, *arguments])
        texts = capsys.readouterr().out.removesuffix("\n").split(f"\n{BETWEEN_SAMPLES}\n")
        return [text.removeprefix(prompt) for text in texts]

    return call


def post(server: Serving, body: Any, **options: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, **options)


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """The data of each server-sent event, JSON read, and "[DONE]" as it is."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def whole_text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The characters that some ids complete."""
    decoder = tokenizer.stream()
    return "".join(decoder.step(token) for token in ids)


# Texts


@pytest.mark.parametrize("prompt", ["abc d", "déf 中", ""])
def test_greedy_text_is_that_of_the_command_line(client, printed, prompt: str) -> None:
    answer = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=9)
    assert [choice.text for choice in answer.choices] == printed(
        prompt, "--temperature", "0", "--max-new-tokens", "9"
    )
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 9
    assert answer.usage.total_tokens == 9 + answer.usage.prompt_tokens


def test_choices_and_options_are_those_of_the_command_line(client, printed) -> None:
    answer = client.completions.create(
        model="tiny",
        prompt="xyz",
        n=3,
        seed=5,
        max_tokens=20,
        temperature=1.7,
        top_p=0.9,
        presence_penalty=0.5,
        frequency_penalty=-0.1,
        logit_bias={"70": 3, "71": -100},
        extra_body={"top_k": 40, "min_p": 0.01, "typical_p": 0.95, "repetition_penalty": 1.2},
    )
    expected = printed(
        *["xyz", "--num-samples", "3", "--seed", "5", "--max-new-tokens", "20"],
        *["--temperature", "1.7", "--top-p", "0.9", "--top-k", "40", "--min-p", "0.01"],
        *["--repetition-penalty", "1.2", "--typical-p", "0.95", "--presence-penalty", "0.5"],
        *["--frequency-penalty=-0.1", "--logit-bias", "70=3", "--logit-bias", "71=-100"],
    )
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(expected)) == 3


def test_many_prompts_as_texts_and_as_ids(client, server: Serving) -> None:
    encode = server.service.tokenizer.encode
    prompts = ["abc", "déf 中 xyz", "x"]
    how = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    single = [client.completions.create(prompt=prompt, **how) for prompt in prompts]
    together = client.completions.create(prompt=prompts, n=2, echo=True, **how)
    assert [choice.text for choice in together.choices] == [
        prompt + answer.choices[0].text
        for prompt, answer in zip(prompts, single, strict=True)
        for _ in range(2)
    ]
    assert together.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in single)
    assert together.usage.completion_tokens == 2 * 18
    # Ids are taken as they are: the text's ids with what begins a document in front.
    begin = [server.service.tokenizer.bos_id]
    ids = [begin + encode(prompt) for prompt in prompts]
    for given in (ids, ids[0]):
        answer = client.completions.create(prompt=given, **how)
        assert [choice.text for choice in answer.choices] == [
            single[i].choices[0].text for i in range(len(answer.choices))
        ]


def test_without_a_seed_texts_differ(client, server: Serving) -> None:
    no_end = {str(server.service.tokenizer.eos_id): -100}
    answers = [
        client.completions.create(model="tiny", prompt="abc", logit_bias=no_end) for _ in range(2)
    ]
    assert answers[0].choices[0].text != answers[1].choices[0].text
    assert answers[0].usage.completion_tokens == 16
    assert answers[0].id != answers[1].id


def test_why_a_text_ends(client, server: Serving) -> None:
    how = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 20}
    whole = client.completions.create(**how).choices[0].text
    for stop in (whole[7:9], ["no!", whole[7:9]]):
        choice = client.completions.create(**how, stop=stop).choices[0]
        assert choice.text == whole[: whole.index(whole[7:9])]
        assert choice.finish_reason == "stop"
    full = client.completions.create(
        model="tiny", prompt=[server.service.tokenizer.encode("a") * CONTEXT], max_tokens=9
    )
    assert full.choices[0].finish_reason == "length"
    assert full.usage.completion_tokens <= 1
    # Of 1,000 draws among 270 tokens some are the end, as good as certainly.
    hot = client.completions.create(
        model="tiny", prompt="", n=16, seed=1, temperature=90, max_tokens=47
    )
    assert {choice.finish_reason for choice in hot.choices} == {"stop", "length"}
    assert hot.usage.completion_tokens < 16 * 47


def test_logprobs_are_the_models_own(client, server: Serving) -> None:
    tokenizer, model = server.service.tokenizer, server.service.engine._texts.batch._single.model
    prompt = [5, 70, 71, 9]
    how = {"model": "tiny", "prompt": [prompt], "max_tokens": 12, "seed": 2, "temperature": 2}
    answer = client.completions.create(**how, logprobs=2).choices[0]
    handle = server.handles[-1]
    log_p = model(torch.tensor([prompt + handle.tokens])).logits[0].log_softmax(-1)[3:-1]
    said, top = answer.logprobs, log_p.topk(2)
    chosen = log_p.gather(1, torch.tensor(handle.tokens)[:, None])[:, 0].tolist()
    assert said.token_logprobs == pytest.approx(chosen, abs=1e-4)
    for entry, values in zip(said.top_logprobs, top.values.tolist(), strict=True):
        assert list(entry.values()) == pytest.approx(values, abs=1e-4)
    offsets = [len(whole_text(tokenizer, handle.tokens[:i])) for i in range(12)]
    assert said.text_offset == offsets
    raw = [tokenizer.token_bytes[token] for token in handle.tokens]
    for name, token_bytes in zip(said.tokens, raw, strict=True):
        if name.startswith("bytes:"):
            assert name == "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)
        else:
            assert name.encode() == token_bytes
    assert any(name.startswith("bytes:") for name in said.tokens)
    # In a stream they come in parts.
    parts = [
        chunk.choices[0] for chunk in client.completions.create(**how, logprobs=2, stream=True)
    ]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for part in parts for value in getattr(part.logprobs, field)]
        assert joined == getattr(said, field)
    assert (
        client.completions.create(**how, logprobs=0).choices[0].logprobs.top_logprobs == [{}] * 12
    )


# Streams


def test_a_stream_is_the_text_in_pieces(client) -> None:
    how = {"model": "tiny", "prompt": ["xyz", "中"], "n": 2, "seed": 3, "temperature": 3}
    whole = client.completions.create(**how, max_tokens=30, echo=True)
    stream = client.completions.create(
        **how, max_tokens=30, echo=True, stream=True, stream_options={"include_usage": True}
    )
    texts, reasons = [""] * 4, [None] * 4
    chunks = list(stream)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert reasons[choice.index] is None  # nothing comes after the last
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(chunks) > 20


def test_pieces_never_cut_a_character_and_honour_stop_texts(client, server: Serving) -> None:
    """A text of two-byte characters, each of two tokens, by a model that says nothing else."""
    tokenizer = server.service.tokenizer
    ids = tokenizer.encode("ж")
    assert len(ids) == 2
    batch = server.service.engine._texts.batch
    forward = batch._forward

    def alternating(tokens: torch.Tensor, **options: Any) -> Any:
        output = forward(tokens, **options)
        following = torch.where(tokens[:, -1] == ids[0], ids[1], ids[0])
        logits = torch.nn.functional.one_hot(following, output.logits.shape[-1])[:, None] * 99.0
        return output._replace(logits=logits)

    batch._forward = alternating
    try:
        how = {"model": "tiny", "prompt": "abc", "max_tokens": 9, "stream": True}
        pieces = [chunk.choices[0].text for chunk in client.completions.create(**how)]
        assert [piece for piece in pieces if piece] == ["ж", "ж", "ж", "ж", "�"]
        stopped = list(client.completions.create(**how, stop=["жжж"]))
        assert [chunk.choices[0].text for chunk in stopped] == [""]
        assert stopped[0].choices[0].finish_reason == "stop"
    finally:
        batch._forward = forward


def test_the_end_of_a_stream_is_marked(server: Serving) -> None:
    body = {"prompt": "abc", "stream": True, "max_tokens": 3, "temperature": 0}
    response = post(server, body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(response)
    assert last == "[DONE]"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


# Many at a time


def test_clients_at_the_same_time_get_what_each_gets_alone(client, server: Serving) -> None:
    def ask(i: int) -> tuple[str, str]:
        answer = client.completions.create(
            model="tiny", prompt="abc xyz"[: 1 + i % 7], seed=i, max_tokens=5 + i, temperature=2
        )
        return answer.choices[0].text, answer.choices[0].finish_reason

    alone = [ask(i) for i in range(12)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, range(12))) == alone
    assert server.is_empty


def test_beyond_the_queue_is_429_and_a_stream_left_makes_room(narrow: Serving) -> None:
    url = f"{narrow.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        first = client.completions.create(model="long", stream=True, **LONG)
        next(iter(first))  # it runs
        second = client.completions.create(model="long", stream=True, **LONG)  # it waits
        with pytest.raises(openai.RateLimitError, match="takes 2 texts at a time; try again"):
            client.completions.create(model="long", prompt="abc", max_tokens=1)
        assert narrow.service.engine.active == 2
        first.close()
        wait_until(lambda: narrow.service.engine.active == 1)
        next(iter(second))  # its turn
        second.close()
        wait_until(lambda: narrow.is_empty)
        assert [handle.end for handle in narrow.handles] == ["stopped", "stopped"]
        assert client.completions.create(model="long", prompt="abc", max_tokens=1).choices[0].text


def test_a_client_that_stops_waiting_is_forgotten(narrow: Serving) -> None:
    before = len(narrow.handles)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{narrow.url}/v1/completions", json=LONG, timeout=0.5)
    wait_until(lambda: len(narrow.handles) > before and narrow.is_empty)
    assert narrow.handles[-1].end == "stopped"


def test_a_client_that_leaves_while_it_asks_harms_nobody(server: Serving) -> None:
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
        )
    assert post(server, {"prompt": "abc"}).status_code == 200


def test_a_failing_model_is_500_and_the_server_goes_on(server: Serving, capfd) -> None:
    batch = server.service.engine._texts.batch
    forward = batch._forward

    def failing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of\nmemory")

    batch._forward = failing
    try:
        response = post(server, {"prompt": ["abc", "x"], "n": 3})
        streamed = list(events(post(server, {"prompt": "abc", "stream": True})))
    finally:
        batch._forward = forward
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert [event["error"]["code"] for event in streamed] == ["model_failed"]
    assert "error: RuntimeError: out of memory\n" in capfd.readouterr().err
    assert server.is_empty
    assert post(server, {"prompt": "abc"}).status_code == 200


# The other addresses, and what is refused


def test_models_and_health(client, server: Serving) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    health = httpx.get(f"{server.url}/health").json()
    assert health == {
        "status": "ok",
        "model": "tiny",
        "texts": 0,
        "free_blocks": 4 * CONTEXT // 16,
        "blocks": 4 * CONTEXT // 16,
    }


def test_clients_raise_the_error_that_fits(client) -> None:
    with pytest.raises(openai.BadRequestError, match=r"top_p=2.0 must be above 0") as error:
        client.completions.create(model="tiny", prompt="abc", top_p=2.0)
    assert error.value.param == "top_p"
    assert error.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError, match=r"model 'gpt' is not served here; .* 'tiny'"):
        client.completions.create(model="gpt", prompt="abc")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body is not a JSON object"),
        ({}, "there is no prompt"),
        ({"prompt": None}, "there is no prompt"),
        ({"prompt": []}, "prompt=[] holds no prompt"),
        ({"prompt": 3}, "prompt=3 must be a text, token ids, or a list of either"),
        ({"prompt": [[]]}, "prompt=[] must be"),
        ({"prompt": ["a", 3]}, "prompt=3 must be"),
        ({"prompt": ["a", [True]]}, "prompt=[True] must be"),
        ({"prompt": [-1]}, "prompt has the id -1; ids are 0 to 2"),
        ({"prompt": ["a"] * 65}, "65 prompts are given; at most 64 are taken"),
        ({"prompt": "a " * 48}, "tokens, the context holds 48"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 must be from 1 to 48"),
        ({"prompt": "a", "max_tokens": 49}, "max_tokens=49 must be from 1 to 48"),
        ({"prompt": "a", "max_tokens": 2.0}, "max_tokens=2.0 must be a whole number"),
        ({"prompt": "a", "n": 17}, "n=17 must be from 1 to 16"),
        ({"prompt": ["a"] * 13, "n": 5}, "are 65 texts; this server takes 64 at a time"),
        ({"prompt": "a", "stop": ["x"] * 5}, "stop has 5 texts; at most 4"),
        ({"prompt": "a", "stop": ""}, "stop has a text of 0 characters; it must be 1 to 256"),
        ({"prompt": "a", "stop": "x" * 257}, "a text of 257 characters"),
        ({"prompt": "a", "stream": 1}, "stream=1 must be true or false"),
        ({"prompt": "a", "stream_options": {}}, "has no meaning without stream=true"),
        ({"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "unknown field 'x'"),
        ({"prompt": "a", "seed": -1}, "seed=-1 must be"),
        ({"prompt": "a", "seed": 2**63}, "must be a number from 0 to"),
        ({"prompt": "a", "temperature": "hot"}, "temperature='hot' must be a number"),
        ({"prompt": "a", "temperature": 10**400}, "must be a number"),
        ({"prompt": "a", "logprobs": 6}, "logprobs=6 must be from 0 to 5"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "with echo=true, are not supported"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias names 'x', which is no id"),
        ({"prompt": "a", "logit_bias": {"1": None}}, "logit_bias=None must be a number"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias names the id 999"),
        ({"prompt": "a", "logit_bias": {"1": 101}}, "must be from -100 to 100"),
        ({"prompt": "a", "best_of": 2}, "best_of=2 is not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix='b' is not supported"),
        ({"prompt": "a", "max_token": 3}, "unknown field 'max_token'; did you mean 'max_tokens'?"),
        ({"prompt": "a", "x" * 999: 3}, "unknown field 'xxxx"),
    ],
)
def test_what_is_wrong_is_400_and_one_line(server: Serving, body: Any, message: str) -> None:
    response = post(server, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert len(error["message"]) < 400
    assert error["type"] == "invalid_request_error"
    assert error.keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "the body is not JSON"),
        (b"{", "the body is not JSON"),
        (b"\xff\xfe{}", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON that can be read"),
        (b'{"prompt": ' + b"[" * 700 + b"]" * 700 + b"}", "must be a text, token ids"),
        (b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", "the body is not JSON that can be read"),
        (b'{"prompt": "\\ud83d"}', "must be a text"),
        (b'{"prompt": "a", "\\ud83d": 1}', "unknown field '\\ud83d'"),
        (b'{"prompt": "a", "top_p": NaN}', "top_p=nan must be"),
        (b'{"prompt": "a", "temperature": Infinity}', "temperature=inf must be"),
        (b'{"prompt": "a", "presence_penalty": 1e999}', "presence_penalty=inf must be a finite"),
    ],
)
def test_bytes_that_are_no_request_are_400(server: Serving, raw: bytes, message: str) -> None:
    response = httpx.post(f"{server.url}/v1/completions", content=raw)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_other_errors_have_the_same_shape(server: Serving) -> None:
    url = f"{server.url}/v1/completions"
    large = httpx.post(url, content=b'{"prompt": "' + b"a" * 2**20 + b'"}')
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    assert "the body is larger than 1048576 bytes" in large.json()["error"]["message"]
    wrong = httpx.get(url)
    assert (wrong.status_code, wrong.json()["error"]["type"]) == (405, "invalid_request_error")
    nothing = httpx.get(f"{server.url}/v1/nothing")
    assert (nothing.status_code, nothing.json()["error"]["message"]) == (
        404,
        "GET /v1/nothing: Not Found",
    )


# The program


@pytest.mark.parametrize(
    "ending", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_ends_what_is_under_way_and_then_the_server(long_run: Path, ending) -> None:
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), "--run", str(long_run), "--serve", "--port", "0"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
    )
    try:
        assert program.stderr is not None
        line = program.stderr.readline()
        found = re.fullmatch(
            r"step 10 on cpu: serving long at (http://127.0.0.1:\d+)/v1 .*\n", line
        )
        assert found, line
        url = f"{found[1]}/v1/completions"
        with httpx.stream("POST", url, json=LONG | {"stream": True}, timeout=60) as response:
            stream = events(response)
            assert next(stream)["choices"][0]["text"]
            program.send_signal(ending)
            *_, last = stream
        assert last["error"]["message"] == "this server is shutting down"
        assert program.wait(timeout=30) == 0
        assert program.stderr.read() == ""
    finally:
        program.kill()
        program.wait()
        program.stderr.close()


def test_what_cannot_be_served_is_one_line(run: Path, capsys, monkeypatch) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["--run", str(run), "--serve", *arguments])
        out, err = capsys.readouterr()
        assert (end.value.code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("error: ")
        return err

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen at 127.0.0.1, port {port}: " in refused("--port", port)
    assert "cannot listen at no.such.host.invalid" in refused("--host", "no.such.host.invalid")
    assert "--port 65536 must be from 0" in refused("--port", "65536")
    assert "max_waiting=-1 must be at least 0" in refused("--max-waiting", "-1")
    free = ["--port", "0"]
    assert "max_concurrent=0 must be at least 1" in refused(*free, "--max-concurrent", "0")
    assert "cache_tokens=3 must hold at least" in refused(*free, "--cache-tokens", "3")
    assert "at_limit=slide is for one prompt" in refused(*free, "--at-limit", "slide")
    assert "--temperature has no meaning with --serve" in refused("--temperature", "1")
    assert "no run at" in refused(*free, "--run", str(run / "none"))
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    error = refused()
    assert "--serve needs uvicorn, which is not installed: pip install -e '.[serve]'" in error
