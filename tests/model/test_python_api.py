"""The examples of the Python interface do what they say, as they stand."""

import inspect
import re
from pathlib import Path
from textwrap import dedent

import pytest

import model.generate
from sample import main
from tests.test_sample import ROOT, make_run


def examples() -> dict[str, str]:
    """Code in the docstring of model.generate and in the README, by where it stands."""
    docstring = inspect.getdoc(model.generate) or ""
    (indented,) = re.findall(r"(?m)^    from (?s:.*?)(?=^\S)", docstring)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", readme)
    found = {"docstring": dedent(indented)}
    for number, block in enumerate(block for block in blocks if "Generator(" in block):
        found[f"README {number}"] = block
    return found


@pytest.mark.parametrize("place", examples())
def test_an_example_streams_what_the_command_prints(
    place: str, tmp_path: Path, capsys, monkeypatch
) -> None:
    run = make_run(tmp_path / "runs" / "one", "byte", context_length=256)
    (tmp_path / "runs" / "latest").write_text(str(run), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(examples()[place], {})
    out = capsys.readouterr().out
    same = ["--max-new-tokens", "100", "--temperature", "0.8", "--top-p", "0.9", "--seed", "7"]
    main(["--prompt", "ROMEO:", *same])
    text = capsys.readouterr().out
    assert text.startswith("ROMEO:")
    shown = text.removeprefix("ROMEO:").removesuffix("\n")
    assert out.startswith(shown)
    assert "['length'] read 6 tokens in " in out.removeprefix(shown)
