"""wandb as a view of a run: never a prompt, never the end of training, always the same id."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from training.metrics_log import MetricsLog
from training.tracking import (
    MAX_FAILURES,
    Tracker,
    TrackerConfig,
    WandbTracker,
    changed_settings,
    main,
    replay,
    start_tracker,
)

ROOT = Path(__file__).parents[2]
KEY = "k" * 40


class FakeRun:
    """What `wandb.init` returns. `log` takes no step on purpose: passing one is an error."""

    def __init__(self, run_id: str) -> None:
        self.id, self.url = run_id, f"https://wandb.test/{run_id}"
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[tuple[str, dict[str, Any]]] = []
        self.summary: dict[str, Any] = {}
        self.added: dict[str, Any] = {}
        self.config = SimpleNamespace(update=self._update)
        self.exit_codes: list[int] = []
        self.failing: BaseException | None = None
        self.calls = 0

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, row: dict[str, Any]) -> None:
        self.calls += 1
        if self.failing:
            raise self.failing
        self.rows.append(row)

    def finish(self, *, exit_code: int) -> None:
        self.exit_codes.append(exit_code)
        if self.failing:
            raise self.failing

    def _update(self, values: dict[str, Any], *, allow_val_change: bool) -> None:
        assert allow_val_change
        self.added |= values


class FakeWandb(ModuleType):
    """The few names of wandb that we use; every `init` is remembered."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.environment = SimpleNamespace(
            mode="online",
            project=None,
            api_key=None,
            identity_token_file=None,
            base_url="https://api.wandb.ai",
        )
        self.inits: list[dict[str, Any]] = []
        self.runs: list[FakeRun] = []
        self.errors: dict[str, Exception] = {}  # by mode

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def setup(self, settings: dict[str, Any]) -> SimpleNamespace:
        assert settings == {"silent": True, "console": "off"}
        return SimpleNamespace(settings=self.environment)

    def init(self, **options: Any) -> FakeRun:
        self.inits.append(options)
        if options["mode"] in self.errors:
            raise self.errors[options["mode"]]
        self.runs.append(FakeRun(options["id"] or f"id{len(self.runs)}"))
        return self.runs[-1]


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeWandb:
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NETRC", raising=False)
    return module


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


class Say(list[str]):
    """Collects the lines a person would see."""

    __call__ = list.append


def settings(lr: float = 0.001, **tracker: Any) -> dict[str, Any]:
    return {"name": "mine", "resume": None, "optim": {"lr": lr}, "tracker": tracker}


# --- Configuration -------------------------------------------------------------------------------


def test_the_config_survives_omegaconf() -> None:
    merged = OmegaConf.merge(
        OmegaConf.structured(TrackerConfig), {"project": "p", "tags": ["a", "b"], "mode": "offline"}
    )
    config = OmegaConf.to_object(merged)
    assert isinstance(config, TrackerConfig)
    assert (config.project, config.tags, config.mode) == ("p", ["a", "b"], "offline")


@pytest.mark.parametrize("name", ["wandb", "none"])
def test_the_shipped_choices_fit_the_config(name: str) -> None:
    values = yaml.safe_load((ROOT / f"configs/tracker/{name}.yaml").read_text(encoding="utf-8"))
    assert TrackerConfig(**values).kind == name
    defaults = TrackerConfig(kind=name)
    assert all(getattr(defaults, key) == value for key, value in values.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "wandbb"}, "tracker.kind=wandbb .*did you mean 'wandb'"),
        ({"mode": "ofline"}, "tracker.mode=ofline .*did you mean 'offline'"),
        ({"project": "a/b"}, "tracker.project=a/b must not contain /"),
        ({"tags": [""]}, "tracker.tags: '' must have 1 to 64 characters"),
        ({"tags": ["x" * 65]}, "must have 1 to 64 characters"),
        ({"init_timeout": 0}, "tracker.init_timeout=0 must be above 0"),
    ],
)
def test_a_bad_setting_is_one_line_naming_it(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        TrackerConfig(**values)
    assert "\n" not in str(caught.value)


def test_the_sweep_example_calls_our_program_with_our_settings() -> None:
    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text(encoding="utf-8"))
    assert sweep["program"] == "train.py"
    assert sweep["command"][-1] == "${args_no_hyphens}"  # Hydra takes key=value, not --key=value
    assert sweep["metric"]["name"] == "val/loss"
    assert all("." in name for name in sweep["parameters"])


# --- Where a run is shown ------------------------------------------------------------------------


@pytest.mark.parametrize("tracker", [{"kind": "none"}, {"mode": "disabled"}])
def test_without_a_tracker_wandb_is_not_even_imported(
    monkeypatch: pytest.MonkeyPatch, run: Path, tracker: dict[str, Any]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it raises ImportError
    say = Say()
    assert type(start_tracker(settings(**tracker), run, log=say)) is Tracker
    assert say == []


def test_only_the_main_rank_is_shown(wandb: FakeWandb, run: Path) -> None:
    tracker = start_tracker(settings(), run, enabled=False)
    tracker.log(1, {"train/loss": 1.0})
    tracker.finish(1)
    assert tracker.id is None
    assert wandb.inits == []


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_a_missing_wandb_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, run: Path, mode: str
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    say = Say()
    assert type(start_tracker(settings(mode=mode), run, log=say)) is Tracker
    assert len(say) == 1
    assert "not installed" in say[0]


@pytest.mark.parametrize(
    ("mode", "environment", "started"),
    [
        ("auto", {}, "offline"),
        ("auto", {"api_key": KEY}, "online"),
        ("auto", {"identity_token_file": "token"}, "online"),
        ("auto", {"api_key": KEY, "mode": "offline"}, "offline"),
        ("auto", {"api_key": KEY, "mode": "dryrun"}, "offline"),
        ("auto", {"api_key": KEY, "mode": "run"}, "online"),
        ("auto", {"api_key": KEY, "mode": "disabled"}, None),
        ("online", {}, "offline"),
        ("online", {"api_key": KEY, "mode": "offline"}, "online"),
        ("offline", {"api_key": KEY}, "offline"),
    ],
)
def test_online_needs_a_login_and_auto_obeys_the_environment(
    wandb: FakeWandb, run: Path, mode: str, environment: dict[str, Any], started: str | None
) -> None:
    vars(wandb.environment).update(environment)
    say = Say()
    tracker = start_tracker(settings(mode=mode), run, log=say)
    assert [options["mode"] for options in wandb.inits] == ([started] if started else [])
    assert (tracker.id is None) == (started is None)
    assert len(say) == (started is not None)


@pytest.mark.parametrize(
    ("base_url", "machine", "found"),
    [
        ("https://api.wandb.ai", "api.wandb.ai", True),
        ("https://api.forge.coreweave.com", "api.wandb.ai", True),
        ("https://wandb.example.org:8080/", "wandb.example.org:8080", True),
        ("https://wandb.example.org", "api.wandb.ai", False),  # a key is for its own host only
        ("https://api.wandb.ai", "github.com", False),
    ],
)
@pytest.mark.parametrize("variable", [True, False])
def test_a_stored_login_is_found_for_its_host_and_handed_over(
    wandb: FakeWandb,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    base_url: str,
    machine: str,
    found: bool,
    variable: bool,
) -> None:
    home = Path(os.environ["HOME"])
    home.mkdir()
    path = home / ("elsewhere" if variable else ".netrc")
    path.write_text(f"machine {machine}\n  login user\n  password {KEY}\n", encoding="utf-8")
    path.chmod(0o600)
    if variable:
        monkeypatch.setenv("NETRC", str(path))
    wandb.environment.base_url = base_url
    start_tracker(settings(), run, log=Say())
    assert wandb.inits[0]["mode"] == ("online" if found else "offline")
    assert wandb.inits[0]["settings"]["api_key"] == (KEY if found else None)


def test_a_broken_login_file_is_no_login(wandb: FakeWandb, run: Path) -> None:
    home = Path(os.environ["HOME"])
    home.mkdir()
    (home / ".netrc").write_text("nonsense\n", encoding="utf-8")
    start_tracker(settings(), run, log=Say())
    assert wandb.inits[0]["mode"] == "offline"


def test_a_service_that_does_not_answer_costs_one_line_and_the_run_is_recorded(
    wandb: FakeWandb, run: Path
) -> None:
    wandb.environment.api_key = KEY
    wandb.errors["online"] = RuntimeError("timed out\nafter a while")
    say = Say()
    tracker = start_tracker(settings(mode="online", init_timeout=7), run, log=say)
    assert [options["mode"] for options in wandb.inits] == ["online", "offline"]
    assert wandb.inits[0]["settings"]["init_timeout"] == 7
    assert tracker.id is not None
    assert len(say) == 1
    assert "\n" not in say[0]
    assert "timed out after a while" in say[0]
    assert f"training.tracking replay {run}" in say[0]


def test_a_wandb_that_cannot_start_at_all_costs_one_more_line(wandb: FakeWandb, run: Path) -> None:
    wandb.errors["offline"] = OSError("no space left")
    say = Say()
    assert type(start_tracker(settings(), run, log=say)) is Tracker
    assert "switched off (no space left)" in say[-1]


def test_what_wandb_is_told(wandb: FakeWandb, run: Path) -> None:
    wandb.environment.project = "from-variable"
    labels = {"entity": "team", "group": "g", "tags": ["t"], "notes": "n"}
    start_tracker(settings(**labels), run, log=Say())
    options = wandb.inits[0]
    assert labels.items() <= options.items()
    assert options["project"] == "from-variable"
    assert options["name"] == "mine"
    assert options["dir"] == run  # its files stay with the run
    assert type(options["config"]) is dict
    assert options["config"] == settings(**labels)
    assert options["reinit"] == "create_new"
    assert {"silent": True, "console": "off"}.items() <= options["settings"].items()
    wandb.environment.project = None
    start_tracker(settings(), run, log=Say())
    start_tracker(settings(project="mine"), run, log=Say())
    assert [options["project"] for options in wandb.inits[1:]] == ["glassgpt", "mine"]


# --- What is sent --------------------------------------------------------------------------------


def start_fake(wandb: FakeWandb, run: Path, say: Say | None = None) -> tuple[Tracker, FakeRun]:
    tracker = start_tracker(settings(), run, log=say if say is not None else Say())
    return tracker, wandb.runs[-1]


def test_the_step_is_a_value_and_the_axis_of_every_curve(wandb: FakeWandb, run: Path) -> None:
    tracker, fake = start_fake(wandb, run)
    tracker.log(20, {"train/loss": 1.0})
    tracker.log(10, {"train/loss": 2.0})  # as after a resume from an older checkpoint
    assert fake.rows == [{"step": 20, "train/loss": 1.0}, {"step": 10, "train/loss": 2.0}]
    assert fake.metrics == [("step", {"hidden": True}), ("*", {"step_metric": "step"})]


def test_final_values_go_into_the_summary(wandb: FakeWandb, run: Path) -> None:
    tracker, fake = start_fake(wandb, run)
    tracker.summary({"best/val_loss": 1.5})
    assert fake.summary == {"best/val_loss": 1.5}


def test_a_failing_tracker_is_switched_off_with_one_line(wandb: FakeWandb, run: Path) -> None:
    say = Say()
    tracker, fake = start_fake(wandb, run, say)
    say.clear()
    fake.failing = ConnectionError("service gone")
    for step in range(MAX_FAILURES + 20):
        tracker.log(step, {"train/loss": 1.0})
    assert fake.calls == MAX_FAILURES
    assert len(say) == 1
    assert "switched off" in say[0]
    assert "service gone" in say[0]


def test_failures_that_pass_do_not_switch_it_off(wandb: FakeWandb, run: Path) -> None:
    tracker, fake = start_fake(wandb, run)
    for _ in range(3):
        fake.failing = ConnectionError()
        for step in range(MAX_FAILURES - 1):
            tracker.log(step, {})
        fake.failing = None
        tracker.log(99, {})
    assert len(fake.rows) == 3
    assert isinstance(tracker, WandbTracker)
    assert tracker.missed == 3 * (MAX_FAILURES - 1)


def test_a_keyboard_interrupt_is_not_a_tracker_failure(wandb: FakeWandb, run: Path) -> None:
    tracker, fake = start_fake(wandb, run)
    fake.failing = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tracker.log(1, {})


@pytest.mark.parametrize("exit_code", [0, 1])
def test_the_run_is_closed_once_with_its_status(
    wandb: FakeWandb, run: Path, exit_code: int
) -> None:
    tracker, fake = start_fake(wandb, run)
    tracker.finish(exit_code)
    tracker.finish(0)
    assert fake.exit_codes == [exit_code]


def test_a_run_that_cannot_be_closed_costs_one_line(wandb: FakeWandb, run: Path) -> None:
    say = Say()
    tracker, fake = start_fake(wandb, run, say)
    fake.failing = TimeoutError()
    tracker.finish(0)
    assert "could not be closed (TimeoutError)" in say[-1]


def test_two_jobs_in_one_process_are_two_runs(wandb: FakeWandb, tmp_path: Path) -> None:
    ids = []
    for number in range(2):
        folder = tmp_path / f"job{number}"
        folder.mkdir()
        tracker = start_tracker(settings(), folder, log=Say())
        tracker.finish(number)
        ids.append(tracker.id)
    assert ids[0] != ids[1]
    assert [fake.exit_codes for fake in wandb.runs] == [[0], [1]]


# --- Resume --------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_id_and_settings_and_lists_changes_apart(
    wandb: FakeWandb, run: Path
) -> None:
    first = start_tracker(settings(lr=0.001), run, log=Say())
    assert wandb.inits[0]["resume"] is None
    again = start_tracker(settings(lr=0.002) | {"resume": "latest"}, run, step=120, log=Say())
    assert again.id == first.id
    assert (wandb.inits[1]["id"], wandb.inits[1]["resume"]) == (first.id, "allow")
    assert wandb.inits[1]["config"] == settings(lr=0.001)
    assert wandb.runs[1].added == {"changed_at_step_120": {"optim/lr": [0.001, 0.002]}}


def test_a_resume_without_changes_adds_nothing(wandb: FakeWandb, run: Path) -> None:
    for resume in (None, "latest"):
        start_tracker(settings() | {"resume": resume}, run, log=Say())
    assert wandb.runs[1].added == {}


def test_the_id_of_a_checkpoint_serves_when_the_folder_has_none(
    wandb: FakeWandb, run: Path
) -> None:
    assert start_tracker(settings(), run, run_id="saved", log=Say()).id == "saved"
    assert start_tracker(settings(), run, run_id="other", log=Say()).id == "saved"


def test_changes_name_what_was_added_and_removed() -> None:
    assert changed_settings({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "d": 3}}) == {
        "a/c": [2, None],
        "a/d": [None, 3],
    }


# --- Replay --------------------------------------------------------------------------------------


def local_run(run: Path, status: str = "done", **tracker: Any) -> None:
    """Fill a folder with what a finished run leaves behind."""
    from training.config import Config, to_dict

    plain = to_dict(Config(name="mine", tracker=TrackerConfig(**tracker)))
    (run / "config.yaml").write_text(yaml.safe_dump(plain), encoding="utf-8")
    (run / "status").write_text(status + "\n", encoding="utf-8")
    log = MetricsLog(run)
    for step in range(3):
        log.log(step, {"train/loss": 3.0 - step})
    log.close()


def test_a_replay_sends_the_whole_history_under_the_same_id(wandb: FakeWandb, run: Path) -> None:
    local_run(run, project="p")
    first = start_tracker(settings(), run, log=Say())
    wandb.environment.api_key = KEY
    assert replay(run, log=Say())
    options = wandb.inits[-1]
    assert (options["mode"], options["id"], options["project"]) == ("online", first.id, "p")
    assert options["resume"] is None  # replaces what is there instead of adding to it
    assert options["settings"]["finish_timeout"] == 0
    assert wandb.runs[-1].rows == [{"step": s, "train/loss": 3.0 - s} for s in range(3)]
    assert wandb.runs[-1].exit_codes == [0]


def test_a_run_without_a_tracker_can_be_replayed_and_keeps_its_id(
    wandb: FakeWandb, run: Path
) -> None:
    local_run(run, kind="none")
    assert replay(run, log=Say(), mode="offline", project="other")
    assert wandb.inits[0]["project"] == "other"
    assert wandb.inits[0]["config"]["name"] == "mine"
    assert replay(run, log=Say(), mode="offline")
    assert wandb.inits[1]["id"] == wandb.runs[0].id
    assert replay(run, log=Say(), mode="offline", new_id=True)
    assert wandb.inits[2]["id"] is None


@pytest.mark.parametrize(
    ("status", "code"), [("done", 0), ("preempted", 1), ("failed", 1), ("running", 1)]
)
def test_a_replay_closes_with_the_status_of_the_run(
    wandb: FakeWandb, run: Path, status: str, code: int
) -> None:
    local_run(run, status)
    replay(run, log=Say())
    assert wandb.runs[0].exit_codes == [code]


def test_a_replay_that_did_not_arrive_says_so(
    wandb: FakeWandb, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_run(run)
    assert not replay(run, mode="online", log=Say())  # no login: recorded offline instead
    wandb.environment.mode = "disabled"
    assert not replay(run, log=Say())
    wandb.environment.mode = "offline"
    monkeypatch.setattr(FakeRun, "log", lambda self, row: 1 / 0)
    say = Say()
    assert not replay(run, log=say)
    assert "3 updates were lost" in say[-1]


def test_a_folder_without_a_history_is_refused_before_anything_is_sent(
    wandb: FakeWandb, run: Path
) -> None:
    local_run(run)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match=r"metrics.jsonl does not exist"):
        replay(run, log=Say())
    assert wandb.inits == []


# --- The real library ----------------------------------------------------------------------------

OFFLINE_RUN = """
import sys
from pathlib import Path
from training.tracking import start_tracker
assert "wandb" not in sys.modules
settings = {"name": "mine", "optim": {"lr": 0.001}, "tracker": {"mode": sys.argv[2], "tags": ["t"]}}
tracker = start_tracker(settings, Path(sys.argv[1]))
tracker.log(20, {"train/loss": 2.0})
tracker.log(10, {"train/loss": float("nan")})
tracker.summary({"best/val_loss": 1.5})
tracker.finish(3)
"""


def hermetic(home: Path) -> dict[str, str]:
    """Return an environment without login, variables or caches of the person running the tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT), "NETRC": str(home / "none")}


def inspect(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", *options, "--json", str(folder)]
    environment = hermetic(folder.parent)
    return subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout


def recorded(run: Path) -> Path:
    folders = list((run / "wandb").glob("offline-run-*"))
    assert len(folders) == 1
    return folders[0]


def test_without_a_login_a_run_on_a_terminal_is_recorded_offline_without_a_question(
    run: Path, tmp_path: Path
) -> None:
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", OFFLINE_RUN, str(run), "online"],
        env=hermetic(tmp_path),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=tmp_path,
    )
    os.close(theirs)
    assert process.wait(timeout=60) == 0  # a question would wait for an answer until then
    content = b""
    with contextlib.suppress(OSError):  # how Linux says that a terminal has nothing more
        while part := os.read(terminal, 4096):
            content += part
    os.close(terminal)
    shown = content.decode().splitlines()
    assert len(shown) == 1
    assert shown[0].startswith("wandb: recording offline (no login found)")
    assert not (tmp_path / "wandb").exists()

    summary = json.loads(inspect(recorded(run), "--summary"))
    assert (summary["exit_code"], summary["project"], summary["tags"]) == (3, "glassgpt", ["t"])
    assert summary["config"]["optim"]["lr"] == 0.001
    assert summary["summary"]["best/val_loss"] == 1.5
    assert summary["step"] == 1  # both rows arrived, though our step went back
    assert json.loads((run / "wandb.json").read_text())["id"] == summary["run_id"]


def test_the_replay_command_records_a_finished_run(run: Path, tmp_path: Path) -> None:
    local_run(run)
    command = [sys.executable, "-m", "training.tracking", "replay", str(run), "--mode", "offline"]
    environment = hermetic(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "replayed 3 rows offline" in done.stdout
    history = [
        json.loads(line)["history"]
        for line in inspect(recorded(run)).splitlines()
        if json.loads(line)["type"] == "history"
    ]
    assert len(history) == 3
    assert "train/loss" in json.dumps(history[0])


def test_the_replay_command_refuses_a_wrong_folder_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tracking", "replay", str(tmp_path / "no")])
    assert main() == 1
    message = capsys.readouterr().err
    assert message.startswith("replay: ")
    assert message.count("\n") == 1
