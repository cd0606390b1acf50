"""A thousand requests with random parameters: every status is known beforehand."""

from __future__ import annotations

import gc
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.serving.serving import Serving, serving
from tests.serving.tiny_run import make_tiny_run

CONTEXT = 24
ALPHABET = "abc déf\nxyz: 中"
OTHERS = "QRé🙂"  # which the tokenizer has never seen, but for one
FEW_MEGABYTES = 4 * 2**20


def text(dice: random.Random, longest: int = 10) -> str:
    return "".join(dice.choice(ALPHABET) for _ in range(dice.randint(0, longest)))


def ids(dice: random.Random) -> list[int]:
    return [dice.randrange(8) for _ in range(dice.randint(1, CONTEXT))]


def good(dice: random.Random) -> dict[str, Any]:
    """A request that can be met."""
    one = dice.choice([text, ids])
    several = [one(dice) for _ in range(dice.randint(1, 3))]
    body: dict[str, Any] = {"prompt": dice.choice([several[0], several])}
    fields: dict[str, Any] = {
        "model": "fuzz",
        "temperature": dice.choice([0, 1e-30, 0.7, 3, 1e30, 10**300]),
        "top_p": dice.choice([1e-9, 0.5, 1]),
        "top_k": dice.choice([0, 1, 5, 10**20]),
        "min_p": dice.choice([0, 0.1, 1.0]),
        "repetition_penalty": dice.choice([0.5, 1, 1.5, 10**20, 1e-300]),
        "n": dice.randint(1, 2),
        "seed": dice.choice([0, 7, 2**62]),
        "stop": dice.choice(["a", "中", ["x", "bc"], "no end like this"]),
        "echo": dice.choice([True, False]),
        "user": "someone",
        "presence_penalty": dice.choice([0, 1.5, -1e300, 10**300]),
        "frequency_penalty": dice.choice([0.0, -0.5, 1e30, -(10**20)]),
        "logit_bias": dice.choice([{}, {"0": 5, "3": -100.0}]),
        "typical_p": dice.choice([0.5, 1]),
        "suffix": None,
        "stream_options": None,
    }
    for name in dice.sample(sorted(fields), dice.randint(0, 8)):
        body[name] = fields[name]
    if "echo" not in body:
        body["logprobs"] = dice.choice([None, None, 0, 5])
    if dice.random() < 0.95:
        body["max_tokens"] = dice.randint(1, 5)
    if dice.random() < 0.3:
        body["stream"] = True
        if dice.random() < 0.5:
            body["stream_options"] = {"include_usage": dice.choice([True, False])}
    return body


def bad(dice: random.Random) -> tuple[dict[str, Any], int]:
    """A request with one fault, and the status it gets."""
    not_a_number = dice.choice(["1", True, [], {}, float("nan"), -float("inf"), 10**400])
    not_whole = dice.choice(["1", False, 1.5, [1], {}, float("inf")])
    not_a_text = dice.choice([0, 1.5, True, {}])
    fault: dict[str, Any] = {
        "model": dice.choice([3, ["fuzz"]]),
        "prompt": dice.choice(
            [
                None,
                [],
                dice.choice(OTHERS[:2]),
                "a" * (CONTEXT + 1),
                [[0] * (CONTEXT + 1)],
                [99],
                [-1, 0],
                [0, "a"],
                [[]],
                {"text": "a"},
                7,
                True,
                ["a"] * 65,
                "\ud800",
            ]
        ),
        "max_tokens": dice.choice([0, -3, CONTEXT + 1, 10**30, not_whole]),
        "temperature": dice.choice([-1, -1e-9, not_a_number]),
        "top_p": dice.choice([0, -0.5, 1.1, not_a_number]),
        "top_k": dice.choice([-1, -(10**30), not_whole]),
        "min_p": dice.choice([-0.1, 1.5, not_a_number]),
        "repetition_penalty": dice.choice([0, -1, not_a_number]),
        "n": dice.choice([0, -1, 17, 10**9, not_whole]),
        "seed": dice.choice([-1, 2**63, not_whole]),
        "stop": dice.choice(["", [""], ["a"] * 5, "a" * 300, [3], not_a_text]),
        "echo": dice.choice([0, "true", []]),
        "stream": dice.choice([1, "false", {}]),
        "stream_options": dice.choice([{"include_usage": 1}, {"more": True}, [], "usage"]),
        "user": not_a_text,
        "typical_p": dice.choice([0, 2, not_a_number]),
        "presence_penalty": not_a_number,
        "frequency_penalty": not_a_number,
        "logit_bias": dice.choice([[], "1", {"99999": 1}, {"-1": 1}, {"1": "x"}, {"1": 101}]),
        "logprobs": dice.choice([-1, 100, "yes"]),
        "best_of": dice.choice([5, "x"]),
        "suffix": dice.choice(["end", 3]),
        "max_new_tokens": 5,
        "": 1,
        "Prompt": "a",
    }
    name = dice.choice(sorted(fault))
    if name == "model" and dice.random() < 0.5:
        return good(dice) | {"model": "another"}, 404
    return good(dice) | {name: fault[name]}, 400


def garbage(dice: random.Random) -> bytes:
    """Bytes that are no request, whatever they are."""
    whole = json.dumps(good(dice)).encode()
    return dice.choice(
        [
            whole[: dice.randrange(len(whole))],
            whole + b"}",
            b"[" * dice.randint(1, 5000),
            dice.randbytes(dice.randint(0, 50)) + b"\xff",
            b"[1, 2]",
            b'"prompt"',
        ]
    )


def check(response: httpx.Response, status: int, sent: Any) -> None:
    assert response.status_code == status, (sent, response.text)
    if status != 200:
        error = response.json()["error"]
        assert error["message"], sent
        assert "\n" not in error["message"], sent
        return
    if response.headers["content-type"].startswith("text/event-stream"):
        *chunks, last = response.text.strip().split("\n\n")
        assert last == "data: [DONE]", (sent, response.text)
        choices = [
            choice
            for chunk in chunks
            for choice in json.loads(chunk.removeprefix("data: "))["choices"]
            if choice["finish_reason"]
        ]
    else:
        choices = response.json()["choices"]
    several = isinstance(sent["prompt"], list) and not isinstance(sent["prompt"][0], int)
    count = (len(sent["prompt"]) if several else 1) * sent.get("n", 1)
    assert sorted(choice["index"] for choice in choices) == list(range(count)), sent
    assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}, sent


def resident_bytes() -> int:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ask_many(server: Serving, client: httpx.Client, seeds: range) -> None:
    """Send one request for each seed, four at a time."""

    def ask(seed: int) -> None:
        dice = random.Random(seed)
        sent: Any
        if dice.random() < 0.1:
            sent, status = garbage(dice), 400
            content = sent
        else:
            sent, status = bad(dice) if dice.random() < 0.5 else (good(dice), 200)
            content = json.dumps(sent).encode()
        check(client.post("/v1/completions", content=content), status, (seed, sent)[1])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, seeds))
    assert server.is_empty


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc")
def test_a_thousand_random_requests(tmp_path: Path, capfd) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    run = make_tiny_run(tmp_path / "fuzz", "char", CONTEXT)
    with (
        serving(run, "--max-concurrent", "6", "--max-waiting", "40") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        ask_many(server, client, range(200))
        early = resident_bytes()
        ask_many(server, client, range(200, 1000))
        growth = resident_bytes() - early
        assert growth < FEW_MEGABYTES
        server.handles.clear()
        assert client.get("/health").json()["texts"] == 0
    assert capfd.readouterr().err == ""
    torch.set_num_threads(before)
