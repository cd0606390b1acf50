"""One rank costs nothing, two ranks agree: checked with two real gloo processes under torchrun."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from training.distributed import Ranks, StopFlag, sync_gradients

ROOT = Path(__file__).parents[2]


# --- One rank -------------------------------------------------------------------------------------


def test_without_torchrun_there_is_one_rank() -> None:
    ranks = Ranks.from_environment({})
    model = nn.Linear(2, 2)
    with ranks.connect(torch.device("mps")):
        assert (ranks.rank, ranks.world, ranks.local_rank, ranks.is_main) == (0, 1, 0, True)
        assert ranks.all_reduce_sum([1, 2.5]) == [1.0, 2.5]
        assert ranks.broadcast_object("folder") == "folder"
        assert ranks.gather_objects("me") == ["me"]
        assert ranks.wrap(model, torch.device("cpu")) is model
        with ranks.main_first(), sync_gradients(model, last=False):
            pass
    assert not torch.distributed.is_initialized()


def test_torchruns_environment_is_read() -> None:
    ranks = Ranks.from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (ranks.rank, ranks.world, ranks.local_rank, ranks.is_main) == (3, 4, 1, False)


def test_half_an_environment_is_refused() -> None:
    with pytest.raises(ValueError, match="sets RANK but not WORLD_SIZE, LOCAL_RANK"):
        Ranks.from_environment({"RANK": "0"})


def test_several_ranks_need_a_pytorch_and_a_device_that_serve_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="device=mps cannot train with 2 ranks"):
        Ranks(0, 2, 0).connect(torch.device("mps"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this PyTorch cannot connect 2 ranks"):
        Ranks(0, 2, 0).connect(torch.device("cpu"))


def test_a_failing_rank_does_not_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("left"))
    with Ranks(0, 2, 0):
        pass
    with contextlib.suppress(OSError), Ranks(0, 2, 0):
        raise OSError
    assert calls == ["left"]


# --- Stopping -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_sets_the_flag_and_the_old_handler_comes_back(name: str) -> None:
    number = signal.Signals[name]
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert stop.agreed(Ranks()) is None
        os.kill(os.getpid(), number)
        assert stop.agreed(Ranks()) == name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_interrupts() -> None:
    with StopFlag():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_outside_the_main_thread_the_flag_is_never_set() -> None:
    seen: list[str | None] = []

    def work() -> None:
        with StopFlag() as stop:
            seen.append(stop.agreed(Ranks()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [None]


# --- Two ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Run two_ranks.py under torchrun once; return what each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, str(Path(__file__).parent / "two_ranks.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text("utf-8")) for rank in (0, 1)]


def test_ranks_exchange_values(results: list[dict[str, Any]]) -> None:
    assert [r["who"] for r in results] == [[0, 2, True], [1, 2, False]]
    for result in results:
        assert result["run_folder"] == "chosen by rank 0"
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert result["sums"] == [2.0**25 + 1, 1.0]  # more digits than float32 has


def test_nothing_is_left_of_the_group(results: list[dict[str, Any]]) -> None:
    # A thread that outlives the interpreter aborts the process after a run that went well.
    assert [r["left_over"] for r in results] == [[False, []], [False, []]]


def test_gradients_do_not_depend_on_how_sequences_are_shared_out(
    results: list[dict[str, Any]],
) -> None:
    # 1 rank x 8 sequences against 2 ranks x 2 micro-steps x 2 sequences, counted tokens unequal.
    alone = results[0]["gradients"]["alone"]
    for result in results:
        assert result["gradients"]["alone"] == alone  # rank 0's weights reached both
        for one, other in zip(result["gradients"]["shared"], alone, strict=True):
            assert one == pytest.approx(other, rel=1e-5, abs=1e-7)
    assert results[0]["gradients"]["shared"] == results[1]["gradients"]["shared"]


def test_gradients_travel_once_per_step(results: list[dict[str, Any]]) -> None:
    assert [r["gradients"]["exchanges"] for r in results] == [1, 1]


def test_a_step_without_counted_tokens_has_no_gradient(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert not any(any(values) for values in result["gradients"]["nothing_counted"])


def test_rank_0_prepares_first_and_nobody_waits_for_its_failure(
    results: list[dict[str, Any]],
) -> None:
    assert [r["prepared"] for r in results] == ["by rank 0", "by rank 0"]
    assert [r["failed"] for r in results] == [
        "OSError: bad data",
        "RankFailedError: rank 1 stops because rank 0 failed",
    ]


def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    results: list[dict[str, Any]],
) -> None:
    assert [r["stop"] for r in results] == [[2, "SIGUSR1"], [2, "SIGUSR1"]]
