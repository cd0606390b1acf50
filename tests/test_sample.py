"""The command line: what goes to which stream, prompts from everywhere, errors in one line."""

import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer
from model.checkpoint import mark_best, save_checkpoint
from model.config import ModelConfig
from model.decoder import Decoder
from sample import main
from serving.printing import BETWEEN_SAMPLES

ROOT = Path(__file__).parents[1]
CONFIG = ModelConfig(context_length=32, n_layer=1, n_head=2, n_embd=16, init_std=0.2)
TEXT = "abc déf\nxyz: 中\n" * 30
GREEDY = ["--temperature", "0"]


def make_run(run: Path, kind: str = "char", *steps: int, **changes: Any) -> Path:
    """A run folder with untrained models whose weights follow from the step."""
    run.mkdir(parents=True)
    config = TokenizerConfig(kind=kind, vocab_size=270)
    tokenizer = build_tokenizer(config, [TEXT], [])
    tokenizer.save(run / "tokenizer.json")
    model_config = ModelConfig(**CONFIG.to_dict() | {"vocab_size": tokenizer.vocab_size} | changes)
    for step in steps or (10,):
        torch.manual_seed(step)
        save_checkpoint(
            run,
            step,
            {"model": Decoder(model_config).state_dict()},
            {"model_config": model_config.to_dict(), "tokenizer_sha256": tokenizer.sha256},
        )
    return run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small only lose by sharing out their work, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a character model, in its own folder of runs with `latest`."""
    run = make_run(tmp_path_factory.mktemp("work") / "runs" / "one", "char", 10, 20, 30)
    mark_best(run, 20)
    (run.parent / "latest").write_text(f"{run}\n")
    return run


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("bpe") / "run", "bpe")


Sampled = tuple[str, str]


@pytest.fixture
def sampled(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Sampled]:
    """Run `main` on the character model; return what it wrote to both streams."""

    def call(*arguments: str, at: Path = run) -> Sampled:
        main(["--run", str(at), "--max-new-tokens", "20", *arguments])
        out, err = capsys.readouterr()
        return out, err

    return call


@pytest.fixture
def refused(run: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `main` on what must be refused; return its one line."""

    def call(*arguments: str, at: Path = run) -> str:
        with pytest.raises(SystemExit) as end:
            main(["--run", str(at), *arguments])
        out, err = capsys.readouterr()
        assert end.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return call


# What is printed


def test_standard_output_is_the_prompt_its_continuation_and_a_line_break(sampled) -> None:
    out, err = sampled("--prompt", "abc d")
    assert out.startswith("abc d")
    assert out.endswith("\n")
    assert len(out) == 5 + 20 + 1
    assert err.startswith("step 20 on cpu: read 5 tokens in ")
    assert "produced 20 in " in err
    assert " tokens/s)" in err


def test_the_cache_and_the_number_of_companions_change_nothing(sampled) -> None:
    out = sampled("--prompt", "abc", "--seed", "5")[0]
    assert sampled("--prompt", "abc", "--seed", "5", "--no-cache")[0] == out
    three = sampled("--prompt", "abc", "--seed", "4", "--num-samples", "3")[0]
    texts = three.removesuffix("\n").split(f"\n{BETWEEN_SAMPLES}\n")
    assert len(texts) == 3
    assert texts[1] + "\n" == out
    assert len(set(texts)) == 3
    assert sampled("--prompt", "abc", "--seed", "6")[0] != out


def test_temperature_zero_does_not_depend_on_the_seed(sampled) -> None:
    assert sampled(*GREEDY, "--seed", "1")[0] == sampled(*GREEDY, "--seed", "2")[0]


def test_options_reach_the_draw(sampled) -> None:
    greedy = sampled(*GREEDY, "--prompt", "abc")[0]
    hot = ["--prompt", "abc", "--temperature", "50"]
    assert sampled(*hot)[0] != greedy
    for option in (["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"]):
        assert sampled(*hot, *option)[0] == greedy
    assert sampled(*hot, "--typical-p", "1e-6")[0] != sampled(*hot)[0]
    for option in ("--repetition-penalty", "--presence-penalty", "--frequency-penalty"):
        assert sampled(*GREEDY, "--prompt", "abc", option, "9")[0] != greedy
    biased = sampled("--prompt", "abc", "--logit-bias", "3=-50", "--logit-bias", "4=99")[0]
    assert len(set(biased[3:-1])) == 1


def test_a_stop_text_ends_the_text_before_it(sampled) -> None:
    whole = sampled("--prompt", "abc", "--temperature", "9")[0]
    stop = whole[8:10]
    out, err = sampled("--prompt", "abc", "--temperature", "9", "--stop", "no!", "--stop", stop)
    assert out == whole[: whole.index(stop, 3)] + "\n"
    assert "produced 20" not in err


def test_log_probabilities_are_a_table_on_standard_error(sampled) -> None:
    out, err = sampled("--prompt", "abc", "--logprobs", "2", "--num-samples", "2")
    assert out == sampled("--prompt", "abc", "--num-samples", "2")[0]
    header, *lines = err.splitlines()[1:22]
    assert err.startswith("--- text 0 ---\n")
    assert header.split() == ["log", "p", "p", "id", "token", "likeliest"]
    text = out.splitlines(keepends=True)
    assert len(lines) == 20
    log_p, p, token_id, rest = lines[0].split(maxsplit=3)
    assert float(p) == pytest.approx(math.exp(float(log_p)), abs=1e-4)
    assert rest.startswith(repr("".join(text)[3]))
    assert int(token_id) >= 0


@pytest.mark.parametrize("draft", [["--draft-tokens", "3", "--draft"], ["--lookup", "2"]])
def test_drafts_change_no_greedy_text(sampled, run: Path, draft: list[str]) -> None:
    if draft[-1] == "--draft":
        draft = [*draft, str(run / "checkpoints" / "step-00000010")]
    plain = sampled(*GREEDY, "--prompt", "abcabc", "--num-samples", "2")[0]
    out, err = sampled(*GREEDY, "--prompt", "abcabc", "--num-samples", "2", *draft)
    assert out == plain
    assert " drafted tokens accepted " in err
    assert err.endswith(" tokens per call of the model\n")
    err = sampled("--prompt", "a" * 30, "--max-new-tokens", "9", *draft)[1]
    assert err.endswith("ended at the context length of 32 tokens\n")


def test_beams_are_printed_best_first(sampled) -> None:
    greedy = sampled(*GREEDY, "--prompt", "abc")[0]
    assert sampled("--beams", "1", "--prompt", "abc")[0] == greedy
    best = sampled("--beams", "4", "--prompt", "abc")[0]
    out, err = sampled("--beams", "4", "--prompt", "abc", "--num-samples", "3")
    texts = out.removesuffix("\n").split(f"\n{BETWEEN_SAMPLES}\n")
    assert len(set(texts)) == 3
    assert texts[0] + "\n" == best
    scores = [float(value) for value in re.findall(r"\((-[\d.]+)\)", err)]
    assert len(scores) == 3
    assert scores == sorted(scores, reverse=True)
    total = sampled("--beams", "4", "--prompt", "abc", "--length-penalty", "0")[1]
    assert re.search(r"(-[\d.]+) \(\1\)", total)
    stop = best[8:10]
    assert sampled("--beams", "4", "--prompt", "abc", "--stop", stop)[0] == (
        best[: best.index(stop, 3)] + "\n"
    )


def test_the_checkpoint_is_best_last_or_a_step(sampled, run: Path) -> None:
    assert sampled()[1].startswith("step 20 ")
    assert sampled("--checkpoint", "last")[1].startswith("step 30 ")
    assert sampled("--checkpoint", "10")[1].startswith("step 10 ")
    assert sampled(at=run / "checkpoints" / "step-00000010")[1].startswith("step 10 ")
    assert sampled(at=run.parent / "latest")[1].startswith("step 20 ")


def test_the_newest_run_is_the_default(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(run.parents[1])
    main(["--max-new-tokens", "3"])
    assert capsys.readouterr().err.startswith("step 20 ")


def test_the_limit_of_the_context(sampled, refused) -> None:
    out, err = sampled("--prompt", "a" * 30, "--max-new-tokens", "9")
    assert len(out) == 30 + 3 + 1
    assert "ended at the context length of 32 tokens; --at-limit slide or stream goes on" in err
    out, err = sampled("--prompt", "a" * 30, "--max-new-tokens", "99", "--at-limit", "slide")
    assert len(out) == 30 + 99 + 1
    assert "context" not in err
    err = sampled("--prompt", "a" * 40, "--at-limit", "slide")[1]
    assert "the prompt is longer than the context of 32: only its end was read" in err
    assert "has room for 3" in refused("--prompt", "a" * 30, "--at-limit", "error")


def test_a_stream_goes_on_past_the_context(sampled, refused) -> None:
    out, err = sampled("--prompt", "a" * 30, "--max-new-tokens", "99", "--at-limit", "stream")
    assert len(out) == 30 + 99 + 1
    assert "context" not in err
    how = ["--at-limit", "stream", "--sinks", "2", "--max-new-tokens", "40", *GREEDY]
    out, err = sampled("--prompt", "xyz: abc d" * 4, *how)
    assert "longer than the context of 32: only its beginning and its end were read" in err
    read = ("xyz: abc d" * 4)[:2] + ("xyz: abc d" * 4)[-30:]
    assert sampled("--prompt", read, *how)[0][32:] == out[40:]
    assert "sinks=32 must be" in refused("--at-limit", "stream", "--sinks", "32")
    assert "--sinks 2 has no meaning with --cache full" in refused("--sinks", "2")


def test_the_error_of_an_inexact_cache_is_printed(sampled, refused) -> None:
    assert "logits off" not in sampled("--prompt", "abc")[1]
    for kind in ("int8", "int4"):
        err = sampled("--prompt", "abc", "--cache", kind, "--sinks", "0")[1]
        assert f"cache {kind}, " in err
        assert "logits off by at most " in err
    err = sampled("--prompt", "abc", "--cache", "evicting", "--budget", "8", "--sinks", "2")[1]
    assert f"cache evicting, {2 * 8 * 2 * 8 * 4:,} bytes: logits off by at most " in err
    assert "cache=evicting needs a budget" in refused("--cache", "evicting")
    assert "did you mean 'int8'" in refused("--cache", "itn8")
    assert "not cache=int8" in refused("--cache", "int8", "--at-limit", "stream")


def test_a_stretched_context_goes_on_past_the_trained_one(sampled, refused) -> None:
    stretched = ["--rope-scaling", "yarn", "--rope-factor", "2", "--temperature", "0"]
    out, err = sampled("--prompt", "a" * 30, "--max-new-tokens", "99", *stretched)
    assert len(out) == 64 + 1 + 1
    assert "ended at the context length of 64 tokens" in err
    assert (
        sampled("--prompt", "a" * 30, "--max-new-tokens", "99", *stretched, "--no-cache")[0] == out
    )
    assert "rope_factor=0.5 must be from 1" in refused(*stretched, "--rope-factor", "0.5")
    assert "rope_scaling='cubic' is not one of" in refused(*stretched, "--rope-scaling", "cubic")
    for half in (stretched[:2], stretched[2:4]):
        assert "--rope-scaling and --rope-factor go together: give both" in refused(*half)


def test_a_small_model_uses_one_core_unless_told_otherwise(sampled, monkeypatch) -> None:
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    sampled()
    assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    sampled()
    assert torch.get_num_threads() == 1


# Prompts


def test_a_prompt_from_a_file_is_taken_as_it_is(sampled, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_bytes("déf\n中\n".encode())
    out, err = sampled("--prompt-file", str(tmp_path / "prompt.txt"))
    assert out.startswith("déf\n中\n")
    assert "read 6 tokens" in err


@pytest.mark.parametrize("how", [["--prompt", "-"], ["--prompt-file", "-"]])
def test_a_prompt_from_standard_input(sampled, monkeypatch, how: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("déf".encode()), "ascii"))
    assert sampled(*how)[0].startswith("déf")


def test_without_a_prompt_a_line_break_begins_the_text(sampled) -> None:
    out, err = sampled()
    assert "read 1 tokens" in err
    assert len(out) == 20 + 1
    assert sampled("--prompt", "\n")[0] == "\n" + out
    assert sampled("--prompt", "")[0] == out


def test_a_prompt_begins_with_bos_where_there_is_one(sampled, bpe_run: Path) -> None:
    tokenizer = Tokenizer.load(bpe_run / "tokenizer.json")
    n_ids = len(tokenizer.encode("xyz"))
    assert f"read {1 + n_ids} tokens" in sampled("--prompt", "xyz", at=bpe_run)[1]
    assert "read 1 tokens" in sampled(at=bpe_run)[1]


def test_the_end_token_ends_a_text(sampled, bpe_run: Path) -> None:
    # Of 1200 draws among 270 tokens some are the end, as good as certainly.
    out, err = sampled(*["--num-samples", "60", "--temperature", "99"], at=bpe_run)
    assert "<|endoftext|>" not in out
    assert "produced 1200 " not in err


def test_ids_beyond_the_tokenizer_are_never_printed(sampled, tmp_path: Path) -> None:
    padded = make_run(tmp_path / "padded", vocab_size=512)
    assert len(sampled("--temperature", "100", at=padded)[0]) == 21


# Errors


def test_bad_values_are_one_line(refused) -> None:
    assert "temperature=-1.0 must be 0" in refused("--temperature", "-1")
    assert "top_k=-5 must be" in refused("--top-k", "-5")
    assert "max_new_tokens=0 must be at least 1" in refused("--max-new-tokens", "0")
    assert "num_samples=0 must be at least 1" in refused("--num-samples", "0")
    assert "seed=-1 must be" in refused("--seed", "-1")
    assert "argument --top-k: invalid int value: 'many'" in refused("--top-k", "many")
    assert "at_limit='wrap' is not one of stop, slide, error" in refused("--at-limit", "wrap")
    assert "a stop text must not be empty" in refused("--stop", "")
    assert "typical_p=2.0 must be" in refused("--typical-p", "2")
    assert "'x=1' is not ID=B" in refused("--logit-bias", "x=1")
    assert "logit_bias names the id 999" in refused("--logit-bias", "999=1")
    assert "logprobs=-1 must be from 0" in refused("--logprobs", "-1")
    assert "dtype" in refused("--dtype", "fp8")
    assert "device" in refused("--device", "gpu")


def test_ways_to_decode_that_do_not_fit_are_one_line(refused, run: Path, tmp_path: Path) -> None:
    assert "not allowed with" in refused("--beams", "2", "--lookup")
    assert "num_beams=0" in refused("--beams", "0")
    assert "to the number of beams, 2" in refused("--beams", "2", "--num-samples", "3")
    assert "--num-samples 0 must be" in refused("--beams", "2", "--num-samples", "0")
    assert "no --temperature, --top-k" in refused(
        "--beams", "2", "--top-k", "3", "--temperature", "2"
    )
    assert "leave out --logprobs" in refused("--beams", "2", "--logprobs", "1")
    assert "length_penalty=-1.0" in refused("--beams", "2", "--length-penalty", "-1")
    assert "it needs --beams" in refused("--length-penalty", "1")
    assert "it needs --draft or --lookup" in refused("--draft-tokens", "3")
    assert "draft_tokens=0 must be" in refused("--lookup", "--draft-tokens", "0")
    assert "lookup=0 must be" in refused("--lookup", "0")
    for way in (["--beams", "2"], ["--lookup"]):
        assert "at_limit=slide does not go with" in refused(*way, "--at-limit", "slide")
    assert "no run at" in refused("--draft", str(run.parent / "two"))
    other = make_run(tmp_path / "other", "bpe")
    assert "was trained with another tokenizer" in refused("--draft", str(other))


def test_bad_names_are_one_line_that_says_what_exists(refused, run: Path, tmp_path: Path) -> None:
    assert "no run at" in refused(at=run.parent / "two")
    assert "runs holds one, latest" in refused(at=run.parent / "two")
    assert "steps 10, 20, 30" in refused("--checkpoint", "15")
    assert "'newest' is not best, last or a step" in refused("--checkpoint", "newest")
    assert "leave out --checkpoint" in refused(
        "--checkpoint", "10", at=run / "checkpoints" / "step-00000010"
    )
    assert "unknown option --promt; did you mean --prompt?" in refused("--promt", "x")
    assert "not allowed with" in refused("--prompt", "x", "--prompt-file", "y")
    assert "No such file" in refused("--prompt-file", str(tmp_path / "none.txt"))
    assert "Is a directory" in refused("--prompt-file", str(tmp_path))


def test_a_prompt_that_cannot_be_read_is_one_line(refused, tmp_path: Path) -> None:
    unknown = refused("--prompt", "abQ dZ!")
    assert "the prompt holds characters" in unknown
    assert "'Q' at 2, 'Z' at 5, '!' at 6" in unknown
    assert "the prompt has 33 tokens, the context holds 32" in refused("--prompt", "a" * 33)
    (tmp_path / "bad.txt").write_bytes(b"abc\xff")
    assert "bad.txt is not UTF-8: byte 0xff at 3" in refused(
        "--prompt-file", str(tmp_path / "bad.txt")
    )
    assert "--prompt is not UTF-8: byte 0xff at 1" in refused("--prompt", os.fsdecode(b"a\xff"))


def test_another_tokenizer_is_refused(refused, tmp_path: Path) -> None:
    changed = make_run(tmp_path / "changed")
    build_tokenizer(TokenizerConfig(kind="char"), ["abc"], []).save(changed / "tokenizer.json")
    assert "was trained with another tokenizer" in refused(at=changed)
    (changed / "tokenizer.json").unlink()
    assert "no such tokenizer file" in refused(at=changed)


def test_a_damaged_checkpoint_is_one_line(refused, tmp_path: Path) -> None:
    damaged = make_run(tmp_path / "damaged")
    (damaged / "checkpoints" / "step-00000010" / "state.json").write_text("{}")
    mark_best(damaged, 10)
    assert "state.json is damaged" in refused(at=damaged)


# As a program of its own


def start(*arguments: str, **options) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "ascii"}
    environment.pop("PYTHONUNBUFFERED", None)
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
        **options,
    )


LONG = ["--at-limit", "slide", "--max-new-tokens", "1000000"]


def test_a_pipe_goes_in_and_utf8_comes_out_wherever_it_runs(run: Path) -> None:
    program = start("--run", str(run), "--max-new-tokens", "5", stdin=subprocess.PIPE)
    out, err = program.communicate("déf 中".encode(), timeout=60)
    assert program.returncode == 0, err
    assert out.decode("utf-8").startswith("déf 中")
    assert len(out.decode("utf-8")) == 5 + 5 + 1
    assert b"reading the prompt from standard input" in err


@pytest.mark.parametrize(
    ("ending", "compiling"),
    [("reader gone", "false"), ("interrupt", "auto")],  # which for so long a text compiles
)
def test_text_streams_and_the_program_ends_quietly(run: Path, ending: str, compiling: str) -> None:
    how = [*LONG, "--compile", compiling]
    program = start("--run", str(run), *how, stdin=subprocess.DEVNULL)
    assert program.stdout is not None
    assert program.stderr is not None
    # The first characters do not wait for a full buffer.
    assert 1 <= len(program.stdout.read1(1 << 16)) < 1000
    if ending == "interrupt":
        program.send_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while program.poll() is None and time.monotonic() < deadline:
            program.stdout.read1(1 << 16)
    else:
        program.stdout.close()
    assert program.wait(timeout=30) == (130 if ending == "interrupt" else 141)
    said = program.stderr.read().splitlines()
    assert all(line.startswith(b"compiling for this model") for line in said if line)
    program.stderr.close()
    program.stdout.close()


def test_help_is_quick_and_shows_examples() -> None:
    program = start("--help")
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 0
    assert b"examples:" in out
    modules = (
        "import sys, sample; print(sorted({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    )
    imported = subprocess.run(
        [sys.executable, "-c", modules], capture_output=True, cwd=ROOT, check=True, timeout=60
    )
    assert imported.stdout.strip() == b"[]"
