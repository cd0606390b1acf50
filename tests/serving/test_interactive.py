"""The interactive mode, driven as a script and as a terminal."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from analysis.inside import inside
from analysis.weights import row_weights
from data.tokenizers import Tokenizer
from kernels.attention import Stats
from model.generate import Generation
from model.load import load_model
from sample import main
from serving.looking import describe_last_look, token_text
from tests.model.tiny import tiny_model, tiny_tokens
from tests.test_sample import ROOT, make_run

FEW = ["--max-new-tokens", "6"]
ENDLESS = ["--at-limit", "slide", "--max-new-tokens", "1000000"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("char") / "run")


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("bpe") / "run", "bpe")


@pytest.fixture
def typed(run: Path, capsys, monkeypatch) -> Callable[..., tuple[str, str]]:
    """Give lines to the interactive mode; return what it wrote to both streams."""

    def call(text: str | bytes, *arguments: str, at: Path = run) -> tuple[str, str]:
        raw = text.encode() if isinstance(text, str) else text
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), "ascii"))
        main(["--run", str(at), "--interactive", *FEW, *arguments])
        return capsys.readouterr()

    return call


@pytest.fixture
def sampled(run: Path, capsys) -> Callable[..., str]:
    """What the plain command prints."""

    def call(*arguments: str, at: Path = run) -> str:
        main(["--run", str(at), *FEW, *arguments])
        return capsys.readouterr().out

    return call


# Texts


def test_each_prompt_is_what_the_plain_command_prints_with_the_next_seed(typed, sampled) -> None:
    out, err = typed("abc\nxyz: 中\nabc\n", "--seed", "5")
    texts = [
        sampled("--prompt", prompt, "--seed", seed)
        for prompt, seed in (("abc", "5"), ("xyz: 中", "6"), ("abc", "7"))
    ]
    assert out == "".join(texts)
    assert texts[0] != texts[2]
    assert err.startswith("step 10 on cpu, a context of 32 tokens; type a prompt, or /help\n")
    assert [line[:7] for line in err.splitlines()[1:]] == ["seed 5:", "seed 6:", "seed 7:"]


def test_an_empty_line_goes_on_with_the_text(typed, sampled) -> None:
    out, _ = typed("abc\n\n", "--temperature", "0")
    first, more = out.splitlines()
    assert len(first) == 3 + 6
    assert first + more + "\n" == sampled(
        "--prompt", "abc", "--temperature", "0", "--max-new-tokens", "12"
    )


def test_an_empty_line_without_a_text_begins_a_document(typed, sampled, bpe_run: Path) -> None:
    assert typed("\n", at=bpe_run)[0] == sampled(at=bpe_run)
    out, err = typed("abc\n/reset\n\n", "--seed", "3")
    assert out == sampled("--prompt", "abc", "--seed", "3") + sampled("--seed", "4")
    assert "the text is forgotten" in err


def test_lines_are_joined_by_a_backslash_and_a_slash_can_be_text(typed, sampled) -> None:
    assert typed("abc\\\nxyz\\\n\n/quit\n")[0] == sampled("--prompt", "abc\nxyz\n")
    assert "'/' at 0" in typed("//abc\n")[1]  # the tokenizer has never seen it
    assert typed("abc\r\n")[0] == sampled("--prompt", "abc")


@pytest.mark.parametrize("end", [7, 9])  # amid the new characters, and with the last of them
def test_a_stop_text_is_not_part_of_what_goes_on(typed, sampled, end: int) -> None:
    varied = ["--temperature", "0", "--repetition-penalty", "9"]
    whole = sampled("--prompt", "abc", *varied)
    stop = whole[end - 3 : end]
    shown = whole[: whole.index(stop, 3)]
    assert len(shown) == end - 3
    more = sampled("--prompt", shown, "--seed", "1", "--stop", stop, *varied)
    out, _ = typed("abc\n\n", "--stop", stop, *varied)
    assert out == shown + "\n" + more.removeprefix(shown)


def test_ctrl_c_stops_the_text_and_not_the_program(typed, sampled, monkeypatch) -> None:
    whole = sampled("--prompt", "abc", "--temperature", "0", "--max-new-tokens", "20")
    step, left = Generation.__next__, [4]

    def interrupted(generation: Generation):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(generation)

    monkeypatch.setattr(Generation, "__next__", interrupted)
    out, err = typed("abc\n\n", "--temperature", "0")
    # What was shown is the text that goes on.
    assert out == whole[:6] + "\n" + whole[6:12] + "\n"
    assert "stopped" in err


# Commands


def test_settings_concern_the_texts_to_come(typed, sampled) -> None:
    out, err = typed("/temperature 0\n/max-new-tokens 3\nabc\n/seed 9\n/temperature 2\nabc\n")
    short = ["--prompt", "abc", "--max-new-tokens", "3"]
    assert out == sampled(*short, "--temperature", "0") + sampled(
        *short, "--temperature", "2", "--seed", "9"
    )
    assert "/temperature 0.0\n/max-new-tokens 3\n" in err


def test_every_setting_reaches_the_draw(typed) -> None:
    (greedy,) = typed("abc\n", "--temperature", "0")[0].splitlines()
    for setting in ("/top-k 1", "/top-p 1e-6", "/min-p 1"):
        assert typed(f"{setting}\nabc\n", "--temperature", "50")[0].strip() == greedy
    out = typed("/repetition-penalty 9\nabc\n", "--temperature", "0")[0]
    assert out.strip() != greedy
    out = typed("/at-limit slide\n/max-new-tokens 50\nabc\n")[0]
    assert len(out) == 3 + 50 + 1


def test_a_name_alone_says_the_value_and_off_takes_a_limit_away(typed) -> None:
    _, err = typed("/top-k\n/top-k 5\n/top-k\n/top-k off\n/at-limit\n")
    assert err.splitlines()[1:] == [
        "/top-k off",
        "/top-k 5",
        "/top-k 5",
        "/top-k off",
        "/at-limit stop",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/temprature 3", "unknown command /temprature; did you mean /temperature?"),
        ("/hepl", "unknown command /hepl; did you mean /help?"),
        ("/", "unknown command /; /help names them all"),
        ("/temperature -1", "temperature=-1.0 must be 0 (most likely token) or a finite positive"),
        ("/temperature hot", "/temperature takes a number, not 'hot'"),
        ("/temperature off", "/temperature takes a number, not 'off'"),
        ("/top-k 2.5", "/top-k takes a whole number, not '2.5'"),
        ("/seed -1", "seed=-1 must be a number from 0"),
        ("/max-new-tokens 0", "max_new_tokens=0 must be at least 1"),
        ("/at-limit wrap", "at_limit='wrap' is not one of stop, slide, error"),
        ("/show", "/show looks at the last text, and there is none yet"),
        ("abQ", "the prompt holds characters the tokenizer has never seen: 'Q' at 2"),
        ("a" * 40, "the prompt has 40 tokens, the context holds 32"),
        (b"ab\xff", "the line is not UTF-8: byte 0xff at 2"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(typed, line: str | bytes, message: str) -> None:
    raw = line if isinstance(line, bytes) else line.encode()
    out, err = typed(raw + b"\nabc\n")
    assert out == typed("abc\n")[0]
    lines = err.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith(f"error: {message}")


def test_a_full_context_says_what_to_do(typed) -> None:
    _, err = typed("abc\n\n\n/at-limit slide\n\n", "--max-new-tokens", "40")
    assert err.count("ended at the context length of 32 tokens") == 1
    assert "error: the prompt has 33 tokens, the context holds 32; shorten the prompt" in err
    assert "seed 1: read 33 tokens in " in err
    assert ", produced 40 in " in err


def test_help_names_every_command_and_its_value(typed) -> None:
    out, _ = typed("/help\n", "--top-k", "7")
    commands = set(re.findall(r"^  (/[a-z-]+)", out, flags=re.MULTILINE))
    assert commands == {
        *("/show", "/reset", "/help", "/quit", "/temperature", "/top-k", "/top-p", "/min-p"),
        *("/repetition-penalty", "/seed", "/max-new-tokens", "/at-limit"),
    }
    assert "/top-k 7 " in out
    assert "An empty line goes on with the last text" in out
    for command in commands - {"/quit", "/show"}:
        assert "unknown" not in typed(f"{command}\n")[1]


def test_quit_ends_before_the_lines_behind_it(typed) -> None:
    assert typed("/quit\nabc\n")[0] == ""


class Unreadable(io.RawIOBase):
    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        raise OSError(5, "Input/output error")


def test_input_that_cannot_be_read_ends_it(run: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Unreadable())))
    with pytest.raises(SystemExit) as end:
        main(["--run", str(run), "-i"])
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("error: [Errno 5] Input/output error\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0 must be"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--prompt", "a"], "--interactive asks for prompts itself: leave out the prompt"),
        (["--num-samples", "2"], "--interactive writes one text at a time, not --num-samples 2"),
        (["--serve"], "--serve has no meaning with --interactive"),
        (["--prompts-file", "a"], "--prompts-file has no meaning with --interactive"),
        (["--output", "a"], "--output has no meaning with --interactive"),
        (["--logprobs", "1"], "--logprobs has no meaning with --interactive"),
        (["--beams", "2"], "--beams has no meaning with --interactive"),
        (["--lookup"], "--lookup has no meaning with --interactive"),
    ],
)
def test_bad_options_end_it_before_it_begins(run: Path, capsys, arguments, message) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--run", str(run), "-i", *arguments])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


# Where the last token looked


def test_show_reads_the_text_so_far(typed, run: Path) -> None:
    out, _ = typed("abc\n/show\n/show 0\n", "--temperature", "0")
    text, table = out.split("\n", 1)
    model, tokenizer = load_model(run)[0], Tokenizer.load(run / "tokenizer.json")
    expected = describe_last_look(model, tokenizer.encode(text), tokenizer)
    assert table == f"{expected}\n" * 2  # the model has one layer
    _, err = typed("abc\n/show 1\n/show x\n")
    assert "error: layer 1 is outside 0 .. 0 (model.n_layer)" in err
    assert "error: /show takes the number of a layer, not 'x'" in err


class Letters:
    """A tokenizer of 17 ids: a newline, letters, half a character and a BOS."""

    vocab_size = 17
    bos_id = 16
    token_bytes = (b"\n", b"\xe4\xb8", *(bytes([97 + i]) for i in range(14)), b"")


@pytest.mark.parametrize(
    "changes", [{}, {"sink_logit": "zero"}, {"windows": [3]}, {"position": "alibi"}]
)
def test_the_table_holds_the_weights_and_statistics_of_the_last_row(changes: dict) -> None:
    model, ids = tiny_model(**changes), tiny_tokens(1, 40)[0].tolist()
    lines = describe_last_look(model, ids, Letters()).splitlines()
    assert f"{token_text(ids[-1], Letters())}, the last of 32 tokens read" in lines[0]
    assert ("nothing" in lines[1]) == ("sink_logit" in changes)
    assert len(lines) == 2 + 2 * 4
    stats = Stats(entropy_tokens=True, null_mass=True)
    with torch.no_grad():
        _, views = inside(model, torch.tensor([ids[-32:]]), stats=stats)
    for number, line in enumerate(lines[2:]):
        view, head = views[number // 4], number % 4
        weights = row_weights(view, torch.tensor([[31]]))[0, head, 0]
        cells = line.split()
        assert cells[:2] == [str(number // 4), str(head)]
        assert cells[2] == f"{float(weights[0]):.3f}"
        assert cells[3] == f"{float(view.result.entropy_tokens[0, head, 31]):.2f}"
        if "sink_logit" in changes:
            assert cells[4] == f"{float(view.result.null_mass[0, head, 31]):.3f}"
            assert float(cells[4]) > 0
        best = weights.argsort(descending=True)[: 3 if "windows" in changes else 5].tolist()
        assert line.endswith(
            "  ".join(
                f"{token_text(ids[-32:][place], Letters())} {float(weights[place]):.3f} "
                f"({31 - place})"
                for place in best
            )
        )


def test_tokens_are_shown_with_everything_visible() -> None:
    shown = [token_text(token, Letters()) for token in (0, 1, 2, 16, 17)]
    assert shown == [r"'\n'", r"b'\xe4\xb8'", "'a'", "<bos>", "<id 17>"]


# As a program at a terminal


@pytest.mark.parametrize(
    "compiling",
    ["false", pytest.param("auto", marks=pytest.mark.slow)],  # it does, for so long
)
def test_a_terminal_has_a_prompt_ctrl_c_and_ctrl_d(run: Path, compiling: str) -> None:
    how = [*ENDLESS, "--compile", compiling]
    ours, theirs = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, str(ROOT / "sample.py"), "--run", str(run), "-i", *how],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
    )
    os.close(theirs)
    screen = bytearray()

    def wait_for(pattern: bytes, after: int = 0, every_second: Callable = lambda: None) -> int:
        """Read the screen until a pattern is there; return where it ends."""
        deadline = time.monotonic() + 60
        while not (found := re.compile(pattern).search(screen, after)):
            assert time.monotonic() < deadline, bytes(screen[-500:])
            if select.select([ours], [], [], 1)[0]:
                screen.extend(os.read(ours, 1 << 16))
            else:
                every_second()
        return found.end()

    def interrupt() -> None:
        program.send_signal(signal.SIGINT)

    try:
        seen = wait_for(b"> ")
        os.write(ours, b"abc\n")
        seen = wait_for(b"\nabc(.|\n){20}", seen)
        interrupt()
        seen = wait_for(b"stopped\r\nseed 0: .*\r\n> ", seen)
        # One that comes just before the program waits for a key is only noticed with the next.
        interrupt()
        wait_for(b"Ctrl-D or /quit ends\r\n> ", seen, interrupt)
        os.write(ours, b"\x04")
        assert program.wait(timeout=30) == 0
    finally:
        program.kill()
        program.wait()
        os.close(ours)
