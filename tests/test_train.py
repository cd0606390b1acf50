"""The training command, run as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train as train_module
from model.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint
from tests.training import runs
from train import train
from training.run_folder import read_status
from training.step import NonFiniteError

ROOT = Path(__file__).parents[1]
TINY = [
    "model.context_length=16",
    "model.n_layer=1",
    "model.n_head=2",
    "model.n_kv_head=1",
    "model.n_embd=16",
    "optim.warmup_steps=1",
    "train.max_steps=4",
    "train.batch_size=4",
    "train.log_every=1",
    "train.eval_every=2",
    "train.eval_windows=4",
    "train.samples=1",
    "train.sample_tokens=5",
    "telemetry.probe_windows=4",
    "telemetry.report=false",
    "tracker=none",
    "name=tiny",
]


def start(folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start the training command in `folder`, which holds a text."""
    (folder / "text.txt").write_text(runs.TEXT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, str(ROOT / "train.py"), *arguments],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def command(folder: Path, *arguments: str) -> tuple[int, str, str]:
    return finish(start(folder, *arguments))


@pytest.fixture
def called(monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """The command without a process of its own, whose start takes longer than a tiny run."""

    def call(folder: Path, *arguments: str) -> tuple[int, str, str]:
        (folder / "text.txt").write_text(runs.TEXT, encoding="utf-8")
        code = 0
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "argv", ["train.py", *arguments])
            patch.setenv("HYDRA_FULL_ERROR", "0")  # restored afterwards; the command sets it
            try:
                train_module.main()
            except SystemExit as end:
                code = end.code
        return code, *capsys.readouterr()

    return call


def test_a_run_leaves_a_folder_that_tells_the_whole_story(tmp_path):
    code, out, err = command(tmp_path, "data.path=text.txt", *TINY, "telemetry.report=true")
    assert code == 0, err
    run = Path((tmp_path / "runs" / "latest").read_text().strip())
    assert run.is_relative_to(tmp_path)
    assert out.splitlines()[-1] == f"run folder {run}"
    assert "--- sample 1 ---" in out
    expected = {"config.yaml", "tokenizer.json", "metrics.jsonl", "log.txt", "status"}
    expected |= {"checkpoints", "plots", "attention", "report.html"}
    assert {path.name for path in run.iterdir()} == expected
    assert (run / "log.txt").read_text() == out  # what was said, all of it
    assert {path.name for path in (run / "plots").iterdir()} >= {"loss.png"}
    assert read_status(run) == "done"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    keys = {key for row in rows for key in row}
    of_heads = {key for key in keys if key.startswith(("train/attn/", "probe/"))}
    assert {"train/attn/entropy_norm/mean", "probe/attn/alpha0_max"} <= of_heads
    assert keys - of_heads == {
        "step",
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "train/tokens_per_s",
        "train/tokens",
        "train/epoch",
        "val/loss",
        "val/perplexity",
        "val/bits_per_byte",
    }
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 2, 4]
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["train/tokens"] for row in rows if "train/tokens" in row] == [64, 128, 192, 256]
    best = min((row for row in rows if "val/loss" in row), key=lambda row: row["val/loss"])
    marked = best_checkpoint(run)
    assert marked is not None
    assert load_checkpoint(marked).step == best["step"]


def test_help_is_a_page_about_this_program(tmp_path, called):
    code, out, _ = called(tmp_path, "--help")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("Train a glassgpt model:")
    assert "python train.py resume=latest" in out
    assert any(line.startswith("model: ") and "nano" in line for line in lines)
    assert "max_steps: " in out
    assert max(len(line) for line in lines) < 160


def test_a_dry_run_shows_the_plan_and_leaves_no_run(tmp_path, called):
    code, out, err = called(tmp_path, "data.path=text.txt", "dry_run=true", *TINY)
    assert code == 0, err
    assert not (tmp_path / "runs").exists()
    for part in (
        "attn.q_proj.weight",
        "memory per rank",
        "schedule",
        "would write runs/<time>-tiny",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ("model.n_heads=3",),
            "error: model.n_heads is not a setting (did you mean 'model.n_head'",
        ),
        (("--lr", "1"), "error: --lr is not a flag: settings are written optim.lr=value"),
        (("data.path=nowhere.txt",), "error: data.path=nowhere.txt does not exist"),
    ],
)
def test_mistakes_end_with_one_line_and_no_run(tmp_path, called, arguments, expected):
    assert_refused(tmp_path, called(tmp_path, *arguments), expected)


def test_a_text_too_short_for_a_window_ends_with_one_line_and_no_run(tmp_path):
    assert_refused(
        tmp_path,
        command(tmp_path, "data.path=text.txt", "model.context_length=5000"),
        "error: the val split has 1179 tokens, but one window of model.context_length=5000",
    )


def assert_refused(folder: Path, ended: tuple[int, str, str], expected: str) -> None:
    code, _, err = ended
    assert code == 2
    assert err.startswith(expected)
    assert len(err.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_multirun_gives_each_job_its_folder_and_status(tmp_path, called):
    code, _, err = called(
        tmp_path,
        "data.path=text.txt",
        "-m",
        *TINY,
        "optim.lr=1e-3,1e30",
        "optim.grad_clip=0",
        "optim.kind=sgd",
    )
    assert code == 1  # the second job's loss is soon no number
    assert "error: step" in err
    folders = sorted(path.parent for path in (tmp_path / "runs").glob("*/config.yaml"))
    assert [read_status(folder) for folder in folders] == ["done", "failed"]


def test_sigterm_saves_and_the_run_goes_on(tmp_path, called):
    arguments = ["data.path=text.txt", *TINY, "train.max_steps=100000", "train.eval_every=100000"]
    process = start(tmp_path, *arguments)
    metrics = None
    deadline = time.monotonic() + 120
    while metrics is None and time.monotonic() < deadline:
        time.sleep(0.1)
        written = [
            p for p in tmp_path.glob("runs/*/metrics.jsonl") if "train/loss" in p.read_text()
        ]
        metrics = written[0] if written else None
    process.send_signal(signal.SIGTERM)
    code, out, err = finish(process)
    assert code == 128 + signal.SIGTERM, err
    assert metrics is not None
    run = metrics.parent
    assert read_status(run) == "preempted"
    step = load_checkpoint(list_checkpoints(run)[-1]).step
    assert f"stopped by SIGTERM after step {step}; resume={run}" in out
    code, out, err = called(tmp_path, "resume=latest", f"train.max_steps={step + 2}")
    assert code == 0, err
    assert read_status(run) == "done"
    assert f"resumed at step {step}" in out


def test_two_ranks_train_the_model_of_one(tmp_path, called):
    """1 x 8 and 2 x 4 sequences: equal losses, weights and evaluations; rank 0 owns the folder."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    arguments = ["data.path=text.txt", *TINY, "train.batch_size=8", "train.eval_windows=null"]
    arguments += ["data.mode=document", "optim.kind=adamw"]
    code, _, err = called(tmp_path / "one", *arguments)
    assert code == 0, err
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    together = start(tmp_path / "two", *arguments, "train.micro_batch_size=2", launcher=launcher)
    code, out, err = finish(together)
    assert code == 0, err
    assert out.count("--- sample 1 ---") == 1
    folders = [path.parent for path in (tmp_path / "two").glob("runs/*/config.yaml")]
    assert len(folders) == 1
    one, two = runs.rows(runs.newest(tmp_path / "one")), runs.rows(folders[0])
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        assert b == pytest.approx(a, rel=2e-5)
    weights = [
        load_checkpoint(list_checkpoints(run)[-1]).tensors["model"]
        for run in (runs.newest(tmp_path / "one"), folders[0])
    ]
    for name, tensor in weights[0].items():
        assert torch.allclose(tensor, weights[1][name], rtol=1e-4, atol=2e-6), name


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_what_was_good(tmp_path, monkeypatch):
    real = train_module.take_step

    def poisoned(model, optimizers, scaler, batches, **rest):
        if poisoned.step == 4:
            with torch.no_grad():
                next(model.parameters())[0] = torch.nan
        poisoned.step += 1
        return real(model, optimizers, scaler, batches, **rest)

    poisoned.step = 0
    monkeypatch.setattr(train_module, "take_step", poisoned)
    with pytest.raises(NonFiniteError, match=r"step 4: loss nan.*last finite loss \d"):
        train(runs.config(tmp_path), [])
    run = runs.newest(tmp_path)
    assert read_status(run) == "failed"
    kept = load_checkpoint(list_checkpoints(run)[-1])
    assert kept.step == 3
    assert all(t.isfinite().all() for t in kept.tensors["model"].values())


def test_training_goes_on_when_a_checkpoint_cannot_be_written(tmp_path, monkeypatch, capsys):
    def full(*args, **rest):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.checkpoint.save_file", full)
    run = runs.run(tmp_path)
    out = capsys.readouterr().out
    assert "No space left on device" in out
    assert "training goes on" in out
    assert "warning: no checkpoint of step 6 could be saved; there is none at all" in out
    assert read_status(run) == "done"
    assert list_checkpoints(run) == []


def test_patience_ends_a_run_early_and_the_last_step_is_saved(tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.4, 2.3])
    real = train_module.evaluate

    def scripted(*args, **rest):
        found = real(*args, **rest)
        return type(found)(next(losses), found.bits_per_byte, found.tokens, found.windows)

    monkeypatch.setattr(train_module, "evaluate", scripted)
    run = runs.run(
        tmp_path,
        train__max_steps=100,
        train__eval_every=2,
        train__patience=2,
        train__checkpoint_every=100,
    )
    assert read_status(run) == "done"
    assert runs.rows(run)[-1]["step"] == 6
    steps = [load_checkpoint(path).step for path in list_checkpoints(run)]
    assert steps == [2, 6]  # the best and the last


@pytest.mark.parametrize("mode", ["stream", "document"])
def test_a_run_with_a_visible_prefix_ends_with_samples(tmp_path, mode, capsys):
    options = {"model__mask": "prefix", "model__prefix": 4, "data__mode": mode}
    run = runs.run(tmp_path, **options)
    assert "--- sample 1 ---" in capsys.readouterr().out
    # 16 positions a window less the targets at 0 to 2, which stand in the prefix.
    (last,) = (row for row in runs.rows(run) if row["step"] == 6 and "train/tokens" in row)
    assert last["train/tokens"] == 6 * 4 * 13


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path):
    from training.run_folder import create_run_folder

    folders = {create_run_folder(tmp_path, "same") for _ in range(3)}
    assert len(folders) == 3


def test_a_disabled_tracker_and_mfu(tmp_path):
    run = runs.run(tmp_path, train__peak_tflops=0.001)
    used = [row["train/mfu"] for row in runs.rows(run) if "train/mfu" in row]
    assert len(used) == 6
    assert all(value > 0 for value in used)
