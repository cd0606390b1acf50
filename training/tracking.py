"""Showing a run in Weights & Biases, without ever depending on it.

The history of a run is ``metrics.jsonl`` in its folder; wandb is one view of it, and this is the
only file that knows wandb. It is built so that a tracker can only add: nothing ever asks for
input, no login means an offline recording in the run's folder, and any failure costs the view and
never the training. What wandb missed is sent later, from the truth:

    python -m training.tracking replay runs/latest

A resumed run goes on under the same id, which ``wandb.json`` in the run's folder holds together
with the settings the run began with.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from analysis.event_files import read_events
from analysis.head_files import HeadRecord, read_records
from analysis.head_table import Cell, HeadTable, head_table
from analysis.metrics_file import FILE_NAME, read_rows
from training.choices import check_choice, check_range
from training.logins import key_from_netrc

KINDS = ("wandb", "none")
MODES = ("auto", "online", "offline", "disabled")

DEFAULT_PROJECT = "glassgpt"
RECORD_NAME = "wandb.json"
MAX_FAILURES = 5  # in a row, before a tracker is switched off
FINISH_TIMEOUT = 60.0  # seconds a finished run may wait for the rest of its upload
ALERT_WAIT = 0.001  # seconds between alerts of one title; wandb's minute would drop most heads'
HISTOGRAMS = ("entropy_norm", "alpha_0", "max_logit", "induction")  # over heads

Log = Callable[[str], None]


@dataclass(kw_only=True, slots=True)
class TrackerConfig:
    """Where a run is shown, and under which labels.

    Raises ValueError, one line naming the setting, for a value wandb would refuse.
    """

    kind: str = "wandb"  # wandb | none
    mode: str = "auto"  # auto: what WANDB_MODE says, else online with a login, offline without
    project: str | None = None  # None: WANDB_PROJECT, else "glassgpt"
    entity: str | None = None  # user or team; None: WANDB_ENTITY, else the login's own
    group: str | None = None  # runs that belong together, such as one experiment's seeds
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    init_timeout: float = 20.0  # seconds to reach the service before recording offline

    def __post_init__(self) -> None:
        check_choice("tracker.kind", self.kind, KINDS)
        check_choice("tracker.mode", self.mode, MODES)
        check_range("tracker.init_timeout", self.init_timeout, 0, open_low=True)
        forbidden = set(self.project or "") & set("/\\#?%:")
        if forbidden:
            raise ValueError(f"tracker.project={self.project} must not contain {min(forbidden)}")
        for tag in self.tags:
            if not 1 <= len(tag) <= 64:
                raise ValueError(f"tracker.tags: '{tag}' must have 1 to 64 characters")


class Tracker:
    """A view of one run. This one shows nothing: tracking is off, or it is not the main rank."""

    id: str | None = None  # under which a resumed run goes on; None when nothing tracks it

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show what was measured at `step`."""

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set final values of the run, such as its best loss."""

    def alert(self, title: str, text: str) -> None:
        """Tell people that something happened."""

    def log_heads(self, step: int, record: HeadRecord) -> None:
        """Show what every head did at `step`."""

    def finish(self, exit_code: int = 0) -> None:
        """Close the view as finished (0) or failed (anything else); later calls do nothing."""


class WandbTracker(Tracker):
    """A wandb run, switched off with one note after `MAX_FAILURES` failures in a row."""

    def __init__(self, run: Any, mode: str, log: Log) -> None:
        self.id = run.id
        self.mode = mode  # online | offline, as it turned out
        self.missed = 0  # updates that never arrived
        self._run = run
        self._say = log
        self._failures_in_a_row = 0
        self._finished = False
        # wandb's own counter drops rows when it would go backwards, as after a resume from an
        # older checkpoint. So it is never used: our step is a value, declared to be the axis.
        self._attempt(lambda: run.define_metric("step", hidden=True))
        self._attempt(lambda: run.define_metric("*", step_metric="step"))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Show what was measured at `step`."""
        self._attempt(lambda: self._run.log({"step": step, **values}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set final values of the run, such as its best loss."""
        self._attempt(lambda: self._run.summary.update(dict(values)))

    def alert(self, title: str, text: str) -> None:
        """Tell people that something happened; every alert arrives, also of equal titles."""
        self._attempt(lambda: self._run.alert(title=title, text=text, wait_duration=ALERT_WAIT))

    def log_heads(self, step: int, record: HeadRecord) -> None:
        """Show a table of every measure of every head, and histograms of a few over heads."""
        self._attempt(lambda: self._run.log({"step": step, **_head_media(record)}))

    def add_settings(self, values: Mapping[str, Any]) -> None:
        """Add entries beside the settings the run began with."""
        self._attempt(lambda: self._run.config.update(dict(values), allow_val_change=True))

    def finish(self, exit_code: int = 0) -> None:
        """Close the run as finished (0) or failed (anything else); later calls do nothing."""
        if self._finished:
            return
        self._finished = True
        try:
            self._run.finish(exit_code=exit_code)
        except Exception as error:
            self.missed += 1
            self._say(f"wandb: the run could not be closed ({_one_line(error)})")

    def _attempt(self, send: Callable[[], object]) -> None:
        if self._failures_in_a_row == MAX_FAILURES:
            self.missed += 1
            return
        try:
            send()
            self._failures_in_a_row = 0
        except Exception as error:
            self.missed += 1
            self._failures_in_a_row += 1
            if self._failures_in_a_row == MAX_FAILURES:
                self._say(
                    f"wandb: switched off after {MAX_FAILURES} failures in a row "
                    f"({_one_line(error)}); the run goes on"
                )


def start_tracker(
    settings: Mapping[str, Any],
    run: Path,
    *,
    run_id: str | None = None,
    step: int = 0,
    log: Log = print,
    enabled: bool = True,
) -> Tracker:
    """Begin to show a run, or go on showing a resumed one.

    Args:
        settings: the run's whole resolved configuration as plain dicts, lists and scalars.
        run: the run's folder, which receives wandb's files.
        run_id: the id kept in a checkpoint; the one in the run's folder wins.
        step: steps already taken, when the run is resumed.
        log: where the one line about what happened goes.
        enabled: False on every rank but the main one.
    """
    config = TrackerConfig(**settings["tracker"])
    if not enabled or config.kind == "none" or config.mode == "disabled":
        return Tracker()
    try:
        record = _read_record(run) or {"id": run_id, "settings": dict(settings)}
        tracker = _start_wandb(config, record["settings"], run, log, run_id=record["id"])
        if tracker is None:
            return Tracker()
        _write_record(run, tracker.id, record["settings"])
        changes = changed_settings(record["settings"], settings)
        if changes:
            tracker.add_settings({f"changed_at_step_{step}": changes})
        return tracker
    except ImportError:
        log(f"wandb: not installed (pip install wandb), so this run is only in {FILE_NAME}")
    except Exception as error:
        log(f"wandb: switched off ({_one_line(error)}), so this run is only in {FILE_NAME}")
    return Tracker()


def replay(
    run: Path,
    *,
    mode: str = "auto",
    project: str | None = None,
    new_id: bool = False,
    log: Log = print,
) -> bool:
    """Show a finished local run in wandb, from its folder alone; return whether all arrived.

    The rows replace what wandb has under the run's id. `new_id` makes a second wandb run instead,
    which is needed after the first was deleted there: its id is spent.

    Raises:
        FileNotFoundError: when the folder lacks ``config.yaml`` or ``metrics.jsonl``.
    """
    from training.run_folder import read_config, read_status

    settings = read_config(run)
    rows = read_rows(run / FILE_NAME)
    config = TrackerConfig(**settings["tracker"])
    config.mode, config.project = mode, project or config.project
    record = _read_record(run) or {"id": None, "settings": settings}
    tracker = _start_wandb(
        config,
        record["settings"],
        run,
        log,
        run_id=None if new_id else record["id"],
        resume=False,
        finish_timeout=0,  # for as long as it takes
    )
    if tracker is None:
        log("wandb: disabled by WANDB_MODE, nothing was sent")
        return False
    _write_record(run, tracker.id, record["settings"])
    for row in rows:
        tracker.log(row.pop("step"), row)
    for heads in read_records(run, "probe"):
        tracker.log_heads(heads.step, heads)
    for event in read_events(run):
        tracker.alert(event.title, event.text)
    tracker.finish(exit_code=0 if read_status(run) == "done" else 1)
    log(
        f"wandb: replayed {len(rows)} rows {tracker.mode} under the id {tracker.id}"
        + (f", {tracker.missed} updates were lost" if tracker.missed else "")
    )
    return not tracker.missed and mode in ("auto", tracker.mode)


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return ``{"optim/lr": [old, new]}`` for every setting that differs.

    `resume` itself is left out: it differs in every resumed run.
    """
    old_flat, new_flat = _flatten(old), _flatten(new)
    return {
        key: [old_flat.get(key), new_flat.get(key)]
        for key in sorted((old_flat.keys() | new_flat.keys()) - {"resume"})
        if old_flat.get(key) != new_flat.get(key)
    }


def _head_media(record: HeadRecord) -> dict[str, Any]:
    """A table and histograms for wandb, which can draw only finite numbers."""
    import wandb

    columns, rows = head_table(record)
    drawn = HeadTable(columns, [[x if _is_finite(x) else None for x in row] for row in rows])
    key = f"{record.kind}/attn/heads"
    media: dict[str, Any] = {key: wandb.Table(columns=[*columns], data=drawn.rows)}
    for name in HISTOGRAMS:
        values = [x for x in drawn.column(name) if x is not None] if name in columns else []
        if values:
            media[f"{key}_{name}"] = wandb.Histogram(values)
    return media


def _is_finite(x: Cell) -> bool:
    return x is not None and math.isfinite(x)


# ---------------------------------------------------------------------------------------------
# Starting wandb
# ---------------------------------------------------------------------------------------------


def _start_wandb(
    config: TrackerConfig,
    settings: dict[str, Any],
    run: Path,
    log: Log,
    *,
    run_id: str | None,
    resume: bool = True,
    finish_timeout: float = FINISH_TIMEOUT,
) -> WandbTracker | None:
    """Start a wandb run online if that is wanted and possible, else offline; None if disabled."""
    import wandb

    quiet: dict[str, Any] = {"silent": True, "console": "off"}
    environment = wandb.setup(wandb.Settings(**quiet)).settings
    mode, key, reason = _choose_mode(config.mode, environment)
    if mode == "disabled":
        return None

    def start(mode: Any, key: str | None = None) -> WandbTracker:
        wandb_run = wandb.init(
            mode=mode,
            dir=run,
            id=run_id,
            resume="allow" if resume and run_id else None,
            reinit="create_new",  # a run that another job left open must not receive our rows
            name=settings["name"],
            config=settings,
            project=config.project or environment.project or DEFAULT_PROJECT,
            entity=config.entity,
            group=config.group,
            tags=config.tags or None,
            notes=config.notes,
            settings=wandb.Settings(
                **quiet,
                api_key=key,
                init_timeout=config.init_timeout,
                finish_timeout=finish_timeout,
            ),
        )
        if mode == "online":
            log(f"wandb: {wandb_run.url}")
        return WandbTracker(wandb_run, mode, log)

    if mode == "online":
        try:
            # Handing over the key that was found leaves wandb nothing to ask for.
            return start("online", key)
        except Exception as error:
            reason = _one_line(error)
    log(
        f"wandb: recording offline ({reason}); "
        f"to send it later: python -m training.tracking replay {run}"
    )
    return start("offline")


def _choose_mode(wanted: str, environment: Any) -> tuple[str, str | None, str]:
    """Return the mode to start in, the key to use, and why the mode is not online.

    Args:
        wanted: one of `MODES`.
        environment: wandb's settings as its variables and files have them.
    """
    if wanted == "auto":
        # wandb's own default is "online"; "run" and "dryrun" are its old names.
        wanted = {"run": "online", "dryrun": "offline"}.get(environment.mode, environment.mode)
    if wanted in ("disabled", "offline"):
        return wanted, None, "as asked"
    if environment.identity_token_file:
        return "online", None, ""
    key = environment.api_key or key_from_netrc(environment.base_url)
    return ("online", key, "") if key else ("offline", None, "no login found")


# ---------------------------------------------------------------------------------------------
# The run's own record of its id and first settings
# ---------------------------------------------------------------------------------------------


def _read_record(run: Path) -> dict[str, Any] | None:
    path = run / RECORD_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write_record(run: Path, run_id: str | None, settings: Mapping[str, Any]) -> None:
    temporary = run / f".{RECORD_NAME}.tmp"
    temporary.write_text(json.dumps({"id": run_id, "settings": settings}, indent=1), "utf-8")
    temporary.replace(run / RECORD_NAME)


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _one_line(error: Exception) -> str:
    return textwrap.shorten(str(error) or type(error).__name__, 160, placeholder=" ...")


def main() -> int:
    """Run ``python -m training.tracking replay RUN`` and return its exit status."""
    from model.checkpoint import resolve_run

    parser = argparse.ArgumentParser(prog="python -m training.tracking")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("replay", help="send a finished local run to wandb")
    command.add_argument("run", help="a run's folder, or runs/latest")
    command.add_argument("--mode", choices=("auto", "online", "offline"), default="auto")
    command.add_argument("--project", help="instead of the run's own")
    command.add_argument("--new-id", action="store_true", help="as a new wandb run")
    options = parser.parse_args()
    try:
        worked = replay(
            resolve_run(options.run),
            mode=options.mode,
            project=options.project,
            new_id=options.new_id,
        )
    except Exception as error:
        print(f"replay: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0 if worked else 1


if __name__ == "__main__":
    sys.exit(main())
