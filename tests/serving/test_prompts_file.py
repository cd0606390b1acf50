"""`--prompts-file`: each answer is that of a call of its own, and errors name file and line."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sample import main
from tests.serving.tiny_run import make_tiny_run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture(scope="module")
def byte_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_run(tmp_path_factory.mktemp("runs") / "bytes", "bpe")


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Write lines, objects as JSON and texts as they are; return the file."""

    def write(*lines: Any) -> Path:
        path = tmp_path / "prompts.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def answered(run: Path, capsys) -> Callable[..., list[dict[str, Any]]]:
    """Run `main` on a file; return the answers from standard output."""

    def call(path: Path, *arguments: str, at: Path = run) -> list[dict[str, Any]]:
        main(["--run", str(at), "--prompts-file", str(path), *arguments])
        out, err = capsys.readouterr()
        assert err.startswith("step 10 on cpu: ")
        assert err.count("\n") == 1
        return [json.loads(line) for line in out.splitlines()]

    return call


@pytest.fixture
def refused(run: Path, capsys) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["--run", str(run), *arguments])
        out, err = capsys.readouterr()
        assert end.value.code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return call


def alone(run: Path, capsys, prompt: str, *arguments: str) -> str:
    """The oracle: the continuation that a call of its own prints."""
    main(["--run", str(run), "--prompt", prompt, *arguments])
    return capsys.readouterr().out.removeprefix(prompt).removesuffix("\n")


LINES: list[dict[str, Any]] = [
    {"prompt": "abc", "max_new_tokens": 5},
    {"prompt": "x" * 30, "id": "long"},
    {"prompt": "déf 中", "temperature": 0, "id": 7},
    {"prompt": "", "seed": 12, "top_k": 3},
    {"prompt": "xyz: ", "top_p": 0.7, "min_p": 0.01, "repetition_penalty": 1.3},
    {"prompt": "abc", "presence_penalty": 0.9, "frequency_penalty": -0.3, "typical_p": 0.9},
    {"prompt": "abc", "temperature": None},
]


@pytest.mark.parametrize("concurrent", ["1", "4"])
def test_each_answer_is_that_of_a_call_of_its_own(
    run: Path, prompts, answered, capsys, concurrent: str
) -> None:
    how = ["--max-new-tokens", "9", "--temperature", "1.5", "--seed", "40"]
    answers = answered(prompts(*LINES), *how, "--max-concurrent", concurrent)
    assert [answer["id"] for answer in answers] == [1, "long", 7, 4, 5, 6, 7]
    for i, (line, answer) in enumerate(zip(LINES, answers, strict=True)):
        own = [f"--{name.replace('_', '-')}={value}" for name, value in line.items() if value]
        own = [option for option in own if not option.startswith(("--prompt", "--id"))]
        if line.get("temperature") == 0:
            own.append("--temperature=0")
        seed = str(line.get("seed", 40 + i))
        expected = alone(run, capsys, line["prompt"], *how, "--seed", seed, *own)
        assert answer["text"] == expected
    assert [answer["tokens"] for answer in answers] == [5, 3, 9, 9, 9, 9, 9]
    assert {answer["finish_reason"] for answer in answers} == {"length"}


def test_stop_texts_end_an_answer(run: Path, prompts, answered, capsys) -> None:
    how = ["--temperature", "0", "--max-new-tokens", "20"]
    whole = alone(run, capsys, "abc", *how)
    first, second = whole[6:8], whole[12:15]
    lines = [{"prompt": "abc"}, {"prompt": "abc", "stop": second}]
    lines.append({"prompt": "abc", "stop": ["no!", second, first]})
    answers = answered(prompts(*lines), *how, "--stop", first)
    to_first, to_second = whole[: whole.index(first)], whole[: whole.index(second)]
    assert [answer["text"] for answer in answers] == [
        to_first,
        to_second,
        min(to_first, to_second, key=len),
    ]
    assert {answer["finish_reason"] for answer in answers} == {"stop"}
    assert answers[0]["tokens"] <= len(to_first) + len(first)


def test_characters_of_several_tokens_and_the_end_token(
    byte_run: Path, prompts, answered, capsys
) -> None:
    lines = [{"prompt": "xyz" if i % 2 else "", "temperature": 3} for i in range(40)]
    answers = answered(prompts(*lines), "--max-new-tokens", "30", at=byte_run)
    assert "�" in "".join(answer["text"] for answer in answers)
    assert {answer["finish_reason"] for answer in answers} == {"stop", "length"}
    for i in (0, 1, 17):
        how = ["--temperature", "3", "--seed", str(i), "--max-new-tokens", "30"]
        assert answers[i]["text"] == alone(byte_run, capsys, lines[i]["prompt"], *how)


def test_answers_go_to_a_file_and_blank_lines_are_passed_over(
    run: Path, prompts, tmp_path: Path, capsys
) -> None:
    path, output = prompts("", {"prompt": "abc"}, "  \r", {"prompt": "déf"}), tmp_path / "out"
    output.write_text("from before, and longer than what comes\n" * 9)
    main(["--run", str(run), "--prompts-file", str(path), "--output", str(output)])
    out, err = capsys.readouterr()
    assert out == ""
    assert "2 texts" in err
    answers = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert [answer["id"] for answer in answers] == [2, 4]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{oops", ":2 is not JSON: Expecting property name"),
        ("[" * 100_000, ":2 is not JSON that can be read: "),
        ("1" * 5000, ":2 is not JSON that can be read: "),
        ('["abc"]', ":2 is not a JSON object"),
        ({}, ":2: there is no prompt"),
        ({"prompt": None}, ":2: there is no prompt"),
        ({"prompt": 3}, ":2: prompt=3 must be a text"),
        ('{"prompt": "\\ud800"}', ":2: prompt='\\ud800' must be a text"),
        ({"prompt": "a", "promt": 1}, ":2: unknown field 'promt'; did you mean 'prompt'?"),
        ({"prompt": "a", "zzz": 1}, ":2: unknown field 'zzz'; known: prompt, "),
        ({"prompt": "Q"}, ":2: the prompt holds characters"),
        ({"prompt": "a" * 33}, ":2: the prompt has 33 tokens, the context holds 32"),
        ({"prompt": "a", "max_new_tokens": 0}, ":2: max_new_tokens=0 must be at least 1"),
        ({"prompt": "a", "max_new_tokens": 1.5}, ":2: max_new_tokens=1.5 must be a whole"),
        ({"prompt": "a", "max_new_tokens": True}, ":2: max_new_tokens=True must be a whole"),
        ({"prompt": "a", "temperature": -1}, ":2: temperature=-1 must be 0"),
        ({"prompt": "a", "temperature": 10**400}, ":2: temperature=1000"),
        ('{"prompt": "a", "temperature": NaN}', ":2: temperature=nan must be"),
        ({"prompt": "a", "top_k": "3"}, ":2: top_k='3' must be a whole number"),
        ({"prompt": "a", "top_p": 0}, ":2: top_p=0 must be above 0"),
        ({"prompt": "a", "seed": -1}, ":2: seed=-1 must be"),
        ({"prompt": "a", "stop": ""}, ":2: a stop text must not be empty"),
        ({"prompt": "a", "stop": ["b", 3]}, ":2: stop=['b', 3] must be a text or a list"),
        ({"prompt": "a", "logit_bias": {"a": 1}}, ":2: logit_bias names 'a', which is no id"),
        ({"prompt": "a", "logit_bias": {"90": 1}}, ":2: logit_bias names the id 90"),
        ({"prompt": "a", "id": 1.5}, ":2: id=1.5 must be a text or a whole number"),
    ],
)
def test_what_cannot_work_names_file_and_line_before_anything_is_generated(
    prompts, refused, tmp_path: Path, line: Any, message: str
) -> None:
    path, output = prompts({"prompt": "abc"}, line), tmp_path / "out"
    error = refused("--prompts-file", str(path), "--output", str(output))
    assert f"{path}{message}" in error
    assert len(error) < len(str(path)) + 300
    assert not output.exists()


def test_bad_files_and_options_are_one_line(prompts, refused, tmp_path: Path) -> None:
    path = str(prompts({"prompt": "abc"}))
    file = ["--prompts-file", path]
    assert "No such file" in refused("--prompts-file", str(tmp_path / "none"))
    assert "Is a directory" in refused("--prompts-file", str(tmp_path))
    (tmp_path / "empty").write_text("\n \n")
    assert "holds no prompt" in refused("--prompts-file", str(tmp_path / "empty"))
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xff"}')
    assert "is not UTF-8: byte 0xff" in refused("--prompts-file", str(tmp_path / "latin"))
    assert "is the file that the prompts come from" in refused(*file, "--output", path)
    assert "is a folder" in refused(*file, "--output", str(tmp_path))
    assert "No such file" in refused(*file, "--output", str(tmp_path / "no" / "out"))
    assert "--num-samples has no meaning with --prompts-file" in refused(
        *file, "--num-samples", "2"
    )
    assert "--beams has no meaning with --prompts-file" in refused(*file, "--beams", "2")
    assert "--port has no meaning with --prompts-file" in refused(*file, "--port", "1")
    assert "--no-cache reads one prompt at a time" in refused(*file, "--no-cache")
    assert "at_limit=slide is for one prompt" in refused(*file, "--at-limit", "slide")
    assert "max_concurrent=0 must be at least 1" in refused(*file, "--max-concurrent", "0")
    error = refused(*file, "--cache-tokens", "16")
    assert ":1: a prompt of 3 tokens with max_new_tokens=500 needs room for 32" in error
    assert "top_p=2.0 must be" in refused(*file, "--top-p", "2")
    assert "--output has no meaning with a single prompt" in refused("--output", "x")
    assert "not allowed with" in refused(*file, "--prompt", "x")


def test_equal_prompts_get_different_texts_unless_their_seed_is_the_same(prompts, answered) -> None:
    prompt = {"prompt": "abc", "temperature": 2}
    texts = [answer["text"] for answer in answered(prompts(prompt, prompt, prompt | {"seed": 0}))]
    assert texts[0] != texts[1]
    assert texts[0] == texts[2]
