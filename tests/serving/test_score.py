"""`sample.py --score`: the numbers of evaluation, for any text, in one line."""

import io
import json
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from data.prepare import prepare
from data.tokenizers import Tokenizer
from data.windows import Windows
from model.checkpoint import save_checkpoint
from model.decoder import Decoder
from model.load import load_model
from sample import main
from tests.test_sample import CONFIG, TEXT, make_run
from tests.training import runs
from training.distributed import Ranks
from training.evaluate import evaluate

L = CONFIG.context_length


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("char") / "run")


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("bpe") / "run", "bpe")


@pytest.fixture
def scored(run: Path, tmp_path: Path, capsys) -> Callable[..., dict]:
    """Score a text; return what JSON says of it."""

    def call(text: str, *arguments: str, at: Path = run) -> dict:
        (tmp_path / "text.txt").write_bytes(text.encode())
        main(["--run", str(at), "--score", str(tmp_path / "text.txt"), "--json", *arguments])
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return json.loads(out)

    return call


@pytest.fixture
def refused(run: Path, tmp_path: Path, capsys) -> Callable[..., str]:
    """Score what must be refused; return the one line."""

    def call(text: bytes | None, *arguments: str, at: Path = run) -> str:
        if text is not None:
            (tmp_path / "text.txt").write_bytes(text)
            arguments = ("--score", str(tmp_path / "text.txt"), *arguments)
        with pytest.raises(SystemExit) as end:
            main(["--run", str(at), *arguments])
        out, err = capsys.readouterr()
        assert end.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return call


@torch.no_grad()
def by_hand(at: Path, text: str) -> tuple[float, int]:
    """Nats and number of predicted tokens of a text within one context, in float64."""
    model, tokenizer = load_model(at)[0], Tokenizer.load(at / "tokenizer.json")
    ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids += tokenizer.encode(text)
    logits = model(torch.tensor(ids[:-1])[None]).logits[0].double().log_softmax(-1)
    nats = -sum(float(row[token]) for row, token in zip(logits, ids[1:], strict=True))
    return nats, len(ids) - 1


def test_the_numbers_of_a_short_text(scored, run: Path) -> None:
    text = "déf 中 abc"
    nats, count = by_hand(run, text)
    found = scored(text)
    assert (found["tokens"], found["counted_tokens"]) == (9, 8)
    assert count == 8
    # The first character is predicted by nothing, and its byte is not counted either.
    assert found["counted_bytes"] == len(text.encode()) - 1
    assert found["loss"] == pytest.approx(nats / 8, rel=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(nats / 8), rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / (len(text.encode()) - 1), rel=1e-6
    )
    assert found["step"] == 10


def test_after_bos_every_token_counts(scored, bpe_run: Path) -> None:
    text = "xyz: 中 and more"
    nats, count = by_hand(bpe_run, text)
    found = scored(text, at=bpe_run)
    assert found["tokens"] == found["counted_tokens"] == count
    assert found["counted_bytes"] == len(text.encode())
    assert found["bits_per_byte"] == pytest.approx(
        nats / math.log(2) / len(text.encode()), rel=1e-6
    )


def test_the_line_says_all_of_it(run: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text(TEXT * 3, encoding="utf-8")
    main(["--run", str(run), "--score", str(tmp_path / "text.txt"), "--stride", "8"])
    out, err = capsys.readouterr()
    main(["--run", str(run), "--score", str(tmp_path / "text.txt"), "--stride", "8", "--json"])
    found = json.loads(capsys.readouterr().out)
    total = len(TEXT * 3)
    assert out == (
        f"loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.2f}, "
        f"{found['bits_per_byte']:.4f} bits per byte; {total - 1:,} of {total:,} tokens counted "
        f"(windows of {L}, stride 8)\n"
    )
    assert err.startswith("step 10 on cpu: ")
    assert "tokens/s)" in err


def test_a_stride_of_the_context_is_the_evaluation_of_training(tmp_path: Path, scored) -> None:
    config = runs.config(tmp_path)
    length = config.model.context_length
    text = prepare(config.data, config.tokenizer, context_length=length, log=lambda line: None)
    config.model.vocab_size = text.tokenizer.vocab_size
    config.model.init_std = 0.3
    torch.manual_seed(0)
    model = Decoder(config.model).eval()
    run = tmp_path / "run"
    run.mkdir()
    text.tokenizer.save(run / "tokenizer.json")
    state = {"model_config": config.model.to_dict(), "tokenizer_sha256": text.tokenizer.sha256}
    save_checkpoint(run, 1, {"model": model.state_dict()}, state)

    windows = Windows(text.val, length, "stream")
    expected = evaluate(
        model,
        windows,
        text.tokenizer,
        batch_size=3,
        device=torch.device("cpu"),
        autocast=nullcontext,
        ranks=Ranks(),
    )
    written = text.tokenizer.decode(text.val.read(0, len(windows) * length + 1).tolist())
    found = scored(written, "--stride", str(length), at=run)
    assert found["counted_tokens"] == expected.tokens
    assert found["loss"] == pytest.approx(expected.loss, rel=1e-6)
    assert found["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-6)
    assert found["perplexity"] == pytest.approx(expected.perplexity, rel=1e-6)
    half = scored(written, at=run)
    assert half["method"] == "windows of 16, stride 8"
    assert half["loss"] != pytest.approx(expected.loss, rel=1e-4)


def test_a_stream_within_the_context_is_one_window(scored) -> None:
    text = TEXT[:L]
    window = scored(text)
    for keep in (["--score-stream"], ["--score-stream", "0"]):
        stream = scored(text, *keep)
        assert stream["method"] == "one reading that keeps all tokens"
        assert stream["loss"] == pytest.approx(window["loss"], rel=1e-5)


@pytest.mark.parametrize("sinks", [0, 1, 4])
@torch.no_grad()
def test_a_longer_stream_sees_the_sinks_and_the_last_tokens(scored, run: Path, sinks: int) -> None:
    """The model has one layer, whose keys depend on their tokens alone: windows can be re-read."""
    text = TEXT[: 3 * L]
    model, tokenizer = load_model(run)[0], Tokenizer.load(run / "tokenizer.json")
    ids, nats = tokenizer.encode(text), 0.0
    for end in range(1, len(ids)):
        seen = ids[:end] if end <= L else ids[:sinks] + ids[end - L + sinks : end]
        nats -= float(model(torch.tensor([seen])).logits[0, -1].double().log_softmax(-1)[ids[end]])
    found = scored(text, "--score-stream", str(sinks))
    assert found["method"] == f"one reading that keeps the first {sinks} and the last {L - sinks}"
    assert found["counted_tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(nats / (len(ids) - 1), rel=1e-5)


def test_positions_without_distances_stream_within_the_context(
    scored, refused, tmp_path: Path
) -> None:
    learned = make_run(tmp_path / "learned", position="learned")
    text = TEXT[: L + 1]
    assert scored(text, "--score-stream", at=learned)["loss"] == pytest.approx(
        scored(text, at=learned)["loss"], rel=1e-5
    )
    assert "model.position=learned cannot stream" in refused(
        TEXT[: L + 2].encode(), "--score-stream", at=learned
    )


def test_a_stretched_context_is_scored_in_longer_windows(scored) -> None:
    stretched = ["--rope-scaling", "linear", "--rope-factor", "4"]
    assert scored(TEXT)["method"] == "windows of 32, stride 16"
    found = scored(TEXT, *stretched)
    assert found["method"] == "windows of 128, stride 64"
    assert found["counted_tokens"] == len(TEXT) - 1
    assert scored(TEXT[:100], *stretched, "--score-stream")["loss"] == pytest.approx(
        scored(TEXT[:100], *stretched)["loss"], rel=1e-5
    )


def test_a_dash_reads_standard_input(scored, run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), "ascii"))
    main(["--run", str(run), "--score", "-", "--json"])
    assert json.loads(capsys.readouterr().out) == scored(TEXT)


def test_texts_that_cannot_be_scored_are_one_line(refused, bpe_run: Path, tmp_path: Path) -> None:
    assert "text.txt is empty: there is nothing to score" in refused(b"")
    assert "a text of 1 tokens has nothing to score" in refused(b"a")
    assert "text.txt is not UTF-8: byte 0xff at 2" in refused(b"ab\xff\x00")
    unknown = refused(b"abQ")
    assert "text.txt holds characters the tokenizer has never seen: 'Q' at 2" in unknown
    assert "No such file" in refused(None, "--score", str(tmp_path / "none.txt"))
    assert "Is a directory" in refused(None, "--score", str(tmp_path))


def test_one_character_counts_after_bos(scored, bpe_run: Path) -> None:
    assert scored("a", at=bpe_run)["counted_tokens"] == 1


def test_options_that_make_no_sense_are_one_line(refused) -> None:
    assert "stride=0 must be from 1 to the context of 32 tokens" in refused(b"abc", "--stride", "0")
    assert "stride=33 must be" in refused(b"abc", "--stride", "33")
    assert "leave out the prompt" in refused(b"abc", "--prompt", "a")
    assert "do not go together" in refused(b"abc", "--interactive")
    assert "leave out one of them" in refused(b"abc", "--stride", "3", "--score-stream")
    assert "sinks=32 must be at least 0 and below the 32" in refused(b"abc", "--score-stream", "32")
    for option in (["--stride", "0"], ["--score-stream", "0"], ["--json"]):
        assert f"{option[0]} goes with --score FILE" in refused(None, *option)


@pytest.mark.parametrize(
    "option",
    [
        ["--serve"],
        ["--prompts-file", "prompts.jsonl"],
        ["--output", "texts.jsonl"],
        ["--num-samples", "2"],
        ["--temperature", "0"],
        ["--at-limit", "stream"],
        ["--cache", "int8"],
        ["--no-cache"],
        ["--compile", "true"],
        ["--weights", "int8"],
        ["--logprobs", "1"],
        ["--beams", "2"],
        ["--draft", "runs/small"],
    ],
    ids=lambda option: option[0],
)
def test_options_of_generated_text_are_not_left_out_in_silence(refused, option: list[str]) -> None:
    assert f"{option[0]} has no meaning with --score" in refused(b"abc", *option)
