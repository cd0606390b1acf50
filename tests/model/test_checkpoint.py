"""Checkpoints survive kills, full disks and damage, and come back bit for bit."""

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from model.checkpoint import (
    CheckpointError,
    best_checkpoint,
    list_checkpoints,
    load_checkpoint,
    mark_best,
    newest_valid,
    prune,
    resolve_run,
    save_checkpoint,
    set_aside_after,
)


def save(run: Path, *steps: int) -> None:
    for step in steps:
        save_checkpoint(run, step, {"model": {"w": torch.full((3,), float(step))}}, {"step": step})


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def flip_bit(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# What goes in comes out


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(5, 7),
        torch.randn(5, 7).bfloat16(),
        torch.randn(4).half(),
        torch.randn(2, 2).double(),
        torch.tensor(3.5),
        torch.tensor(7),
        torch.tensor([True, False]),
        torch.arange(16, dtype=torch.uint8),
        torch.empty(0, 3),
        torch.randn(6, 4).T,
        torch.randn(10, 10)[2:5, ::3],
        torch.randn(3, 1).expand(3, 4),
        torch.nn.Parameter(torch.randn(3)),
        torch.tensor([float("nan"), float("inf"), -0.0]),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
def test_a_tensor_comes_back_bit_for_bit(tmp_path: Path, tensor: torch.Tensor) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"t": tensor}}, {})
    back = load_checkpoint(path).tensors["model"]["t"]
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    assert torch.equal(back.flatten().view(torch.uint8), raw)


def test_groups_and_state_come_back(tmp_path: Path) -> None:
    tensors = {"model": {"a": torch.randn(2)}, "optimizer": {"a/exp_avg": torch.randn(2)}}
    state = {"model_config": {"n_layer": 2}, "best": None, "rng": [3, [1, 2], None], "text": "é\n"}
    path = save_checkpoint(tmp_path, 2000, tensors | {"random": {}}, state)
    checkpoint = load_checkpoint(path)
    assert path == tmp_path / "checkpoints" / "step-00002000"
    assert (checkpoint.step, checkpoint.path, checkpoint.state) == (2000, path, state)
    assert checkpoint.tensors.keys() == {"model", "optimizer", "random"}
    assert torch.equal(
        checkpoint.tensors["optimizer"]["a/exp_avg"], tensors["optimizer"]["a/exp_avg"]
    )


def test_only_the_groups_asked_for_are_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {}, "optimizer": {"m": torch.ones(1)}}, {})
    flip_bit(path / "optimizer.safetensors")
    assert load_checkpoint(path, groups=["model"]).tensors == {"model": {}}
    with pytest.raises(CheckpointError, match="has no scaler: it holds only model, optimizer"):
        load_checkpoint(path, groups=["scaler"])


def test_tied_tensors_are_stored_once_and_tied_again(tmp_path: Path) -> None:
    embed = torch.randn(100, 16)
    path = save_checkpoint(
        tmp_path, 1, {"model": {"embed.weight": embed, "lm_head.weight": embed}}, {}
    )
    model = load_checkpoint(path).tensors["model"]
    assert (path / "model.safetensors").stat().st_size < 1.5 * embed.nbytes
    assert torch.equal(model["lm_head.weight"], embed)
    assert model["lm_head.weight"] is model["embed.weight"]


def test_views_of_one_memory_are_kept_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    views = {"whole": whole, "square": whole.view(3, 4), "turned": whole.view(3, 4).T}
    views |= {"head": whole[:4], "tail": whole[8:]}
    model = load_checkpoint(save_checkpoint(tmp_path, 1, {"model": views}, {})).tensors["model"]
    assert all(torch.equal(model[name], views[name]) for name in views)
    model["head"].zero_()
    assert torch.equal(model["whole"], whole)


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path = save_checkpoint(tmp_path, 1, {"model": {"a": torch.ones(1)}}, {})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


def test_state_that_is_not_plain_data_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, {"model": {}}, {"path": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_pickled(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 1, {"model": {"a": torch.ones(1)}}, {})
    assert sorted(names(path.iterdir())) == ["manifest.json", "model.safetensors", "state.json"]
    json.loads((path / "state.json").read_text())
    json.loads((path / "manifest.json").read_text())


# Damage is found and passed over


@pytest.mark.parametrize("file", ["model.safetensors", "state.json"])
@pytest.mark.parametrize("position", [0, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, file: str, position: int) -> None:
    save(tmp_path, 1, 2)
    newest = tmp_path / "checkpoints" / "step-00000002"
    flip_bit(newest / file, position)
    with pytest.raises(CheckpointError, match=f"{file} is damaged: its sha256") as error:
        load_checkpoint(newest)
    said: list[str] = []
    checkpoint = newest_valid(tmp_path, said.append)
    assert checkpoint is not None
    assert checkpoint.step == 1
    assert said == [
        f"skipping a checkpoint: {error.value}",
        f"falling back to {tmp_path / 'checkpoints' / 'step-00000001'}",
    ]


def test_every_flipped_bit_of_a_manifest_is_harmless_or_found(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 7, {"model": {"w": torch.ones(2)}}, {"a": 1})
    manifest = path / "manifest.json"
    original = manifest.read_bytes()
    for position in range(len(original)):
        flip_bit(manifest, position)
        said: list[str] = []
        checkpoint = newest_valid(tmp_path, said.append)
        if checkpoint is None:
            assert len(said) == 1
        else:
            assert torch.equal(checkpoint.tensors["model"]["w"], torch.ones(2))
        manifest.write_bytes(original)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "model.safetensors").unlink(), "lacks model.safetensors"),
        (lambda path: (path / "manifest.json").unlink(), "it is not a complete checkpoint"),
        (lambda path: (path / "state.json").write_text(""), "0 bytes instead of"),
        (lambda path: (path / "manifest.json").write_text(""), "manifest.json is damaged"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json is damaged"),
        (
            lambda path: (path / "manifest.json").write_text('{"version": 2, "files": {}}'),
            "format 2, this program reads 1",
        ),
        (
            lambda path: (path / "manifest.json").write_text(
                '{"version": 1, "files": {"state.json": 3}}'
            ),
            "cannot be read",
        ),
    ],
)
def test_damage_is_one_line_that_names_the_folder(tmp_path: Path, damage, message: str) -> None:
    save(tmp_path, 5)
    path = tmp_path / "checkpoints" / "step-00000005"
    damage(path)
    with pytest.raises(CheckpointError, match=message) as error:
        load_checkpoint(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
    assert newest_valid(tmp_path, lambda line: None) is None


def test_a_missing_checkpoint_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step-1 does not exist"):
        load_checkpoint(tmp_path / "step-1")
    assert newest_valid(tmp_path) is None


# A save that fails costs nothing but itself


def test_a_full_disk_is_one_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step 2 was not saved in .*File too large") as e:
            save_checkpoint(tmp_path, 2, {"model": {"w": torch.zeros(50_000)}}, {})
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            save_checkpoint(tmp_path, 1, {"model": {}}, {"text": "x" * 60_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(e.value)
    assert names((tmp_path / "checkpoints").iterdir()) == ["step-00000001"]
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.state == {"step": 1}


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(CheckpointError, match="step 3 was not saved"):
        save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step 3 was not marked as best"):
        mark_best(tmp_path, 3)


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 4)
    save_checkpoint(tmp_path, 4, {"model": {"w": torch.zeros(1)}}, {"new": True})
    assert names((tmp_path / "checkpoints").iterdir()) == ["step-00000004"]
    assert load_checkpoint(tmp_path / "checkpoints" / "step-00000004").state == {"new": True}


KILLED_SAVES = '''
"""Saves steps in forked children, kills each at some point, and checks what is left."""
import os, random, signal, sys, time
from pathlib import Path
import torch
from model import checkpoint as module

run = Path(sys.argv[1])
torch.set_num_threads(1)
tensors = {group: {"w": torch.zeros(400_000)} for group in ("model", "optimizer")}

def save(step, attempt):
    for named in tensors.values():
        named["w"][:] = step
    module.save_checkpoint(run, step, tensors, {"step": step, "attempt": attempt})

def fork(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return child

def die_at_call(number, step, attempt):
    """Save, and kill this process at the `number`-th call that changes the disk for good."""
    calls = 0
    def counted(function):
        def wrapper(*args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return wrapper
    os.fsync = counted(os.fsync)
    Path.rename = counted(Path.rename)
    module.save_file = counted(module.save_file)
    module.shutil.rmtree = counted(module.shutil.rmtree)
    save(step, attempt)

def check(last_good):
    found = module.newest_valid(run, log=print)
    assert found is not None, "nothing left"
    assert found.step >= last_good, (found.step, last_good)
    assert found.state["step"] == found.step
    for named in found.tensors.values():
        assert torch.equal(named["w"], torch.full((400_000,), float(found.step)))
    return found.step

save(1, 0)
killed = 0
for number in range(1, 20):
    for step in (1, 1000 + number):                # replacing the only good one, then a new one
        good = check(1)
        child = fork(lambda: die_at_call(number, step if step > 1 else good, number))
        killed += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        check(good)
module.prune(run, keep_last_n=1)
assert killed > 20, killed

good, random_kills = check(1), 0
started = time.perf_counter(); save(2000, 0); duration = time.perf_counter() - started
random.seed(0)
for attempt in range(30):
    good = check(good)
    child = fork(lambda: save(2001 + attempt, attempt))
    time.sleep(random.random() * 1.2 * duration)
    os.kill(child, signal.SIGKILL)
    random_kills += os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    check(good)
assert random_kills > 5, random_kills
module.prune(run, keep_last_n=2)
assert not [p for p in (run / "checkpoints").iterdir() if not p.name.startswith("step-000")]
print("killed", killed, random_kills)
'''


def test_a_kill_in_the_middle_of_a_save_never_loses_the_last_good_checkpoint(
    tmp_path: Path,
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", KILLED_SAVES, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert "skipping" not in result.stdout  # a kill never even leaves a damaged one in the list


# The list of checkpoints


def test_order_is_numeric_and_strangers_are_ignored(tmp_path: Path) -> None:
    save(tmp_path, 100, 20, 100_000_000, 99_999_999)
    folder = tmp_path / "checkpoints"
    (folder / "step-final").mkdir()
    (folder / "notes.txt").write_text("")
    (folder / "step-00000200").write_text("a file")
    (folder / "step-00000300.bak").mkdir()
    assert names(list_checkpoints(tmp_path)) == [
        "step-00000020",
        "step-00000100",
        "step-99999999",
        "step-100000000",
    ]
    checkpoint = newest_valid(tmp_path)
    assert checkpoint is not None
    assert checkpoint.step == 100_000_000
    assert list_checkpoints(tmp_path / "no such run") == []


def test_best_is_marked_and_survives_pruning(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    assert best_checkpoint(tmp_path) is None
    mark_best(tmp_path, 3)
    mark_best(tmp_path, 2)
    assert best_checkpoint(tmp_path) == tmp_path / "checkpoints" / "step-00000002"
    prune(tmp_path, keep_last_n=1)
    assert names(list_checkpoints(tmp_path)) == ["step-00000002", "step-00000004"]


def test_a_mark_of_a_checkpoint_that_is_gone_counts_as_none(tmp_path: Path) -> None:
    save(tmp_path, 1)
    mark_best(tmp_path, 9)
    assert best_checkpoint(tmp_path) is None


def test_prune_keeps_the_newest_and_sweeps_what_kills_left(tmp_path: Path) -> None:
    save(tmp_path, 8, 9, 10, 11)
    folder = tmp_path / "checkpoints"
    (folder / ".building-step-00000012").mkdir()
    (folder / "step-00000011.replaced").mkdir()
    (folder / "mine").mkdir()
    prune(tmp_path, keep_last_n=2)
    assert sorted(names(folder.iterdir())) == ["mine", "step-00000010", "step-00000011"]
    with pytest.raises(ValueError, match="keep_last_n=0: at least 1"):
        prune(tmp_path, keep_last_n=0)


def test_checkpoints_of_an_abandoned_future_are_set_aside(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    mark_best(tmp_path, 3)
    moved = set_aside_after(tmp_path, 1)
    assert names(moved) == ["step-00000002.set-aside", "step-00000003.set-aside"]
    assert names(list_checkpoints(tmp_path)) == ["step-00000001"]
    assert best_checkpoint(tmp_path) is None
    assert load_checkpoint(moved[1]).step == 3
    save(tmp_path, 2)
    prune(tmp_path, keep_last_n=1)
    assert names(list_checkpoints(tmp_path)) == ["step-00000002"]
    assert set_aside_after(tmp_path, 2) == []


# Where a run is


def test_a_run_is_found_by_each_of_its_names(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "runs" / "2026-01-01-nano"
    save(run, 5)
    latest = tmp_path / "runs" / "latest"
    monkeypatch.chdir(tmp_path)
    assert resolve_run("runs/2026-01-01-nano") == Path("runs/2026-01-01-nano")
    assert resolve_run("runs/2026-01-01-nano/checkpoints/step-00000005") == run
    for text in (f"{run}\n", "runs/2026-01-01-nano", "2026-01-01-nano", "/moved/2026-01-01-nano"):
        latest.write_text(text)
        assert resolve_run("runs/latest").resolve() == run


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no run at runs/latest; runs holds b-run, a-run$"),
        ("runs/c-run\n", "no run at runs/c-run; runs holds latest, b-run, a-run$"),
        ("", "runs/latest is neither a run folder nor a file that names one"),
        ("a\nb\n", "neither"),
        (b"\xff\xfe", "neither"),
    ],
)
def test_a_run_that_is_not_there_is_one_line(tmp_path, monkeypatch, content, message) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a-run", "b-run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    if content is not None:
        raw = content if isinstance(content, bytes) else content.encode()
        (tmp_path / "runs" / "latest").write_bytes(raw)
    with pytest.raises(FileNotFoundError, match=message):
        resolve_run("runs/latest")


def test_the_error_says_so_when_there_are_no_runs_at_all(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no run at runs/latest; there is no folder runs"):
        resolve_run("runs/latest")
