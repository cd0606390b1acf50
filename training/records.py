"""What a run writes down while it goes: metrics, tracker, status. The folder stays truthful.

The run's folder is the record; the tracker is a view of it. However the loop ends, the status and
the tracker say how.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from training.config import Config, to_dict
from training.metrics_log import MetricsLog
from training.progress import RunLog
from training.run_folder import point_latest, write_config, write_status
from training.tracking import Tracker, start_tracker


class Records:
    """The open books of one run on its main rank; other ranks write nothing.

    Set `status` before leaving the ``with`` block; left as it is, the run counts as failed.

    Args:
        run: the run's folder.
        config: the resolved configuration.
        step: steps taken so far: metrics measured after it belong to another future.
        tracker_id: under which a resumed run is shown.
        is_main: whether this rank keeps the books.
        log: receives warnings, and from now on its lines are kept in the folder.
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        step: int,
        tracker_id: str | None,
        *,
        is_main: bool,
        log: RunLog,
    ) -> None:
        self.status = "failed"
        self.tracker = Tracker()
        self._run = run
        self._metrics: MetricsLog | None = None
        if not is_main:
            return
        log.write_to(run / "log.txt")
        log.note(f"run folder {run}")
        write_config(run, config)
        write_status(run, "running")
        point_latest(run)
        self._metrics = MetricsLog(run, log.note)
        self._metrics.truncate_after(step)
        self.tracker = start_tracker(
            to_dict(config), run, run_id=tracker_id, step=step, log=log.note
        )

    def add(self, step: int, values: dict[str, float]) -> None:
        """Record what was measured at `step`."""
        if self._metrics is not None:
            self._metrics.log(step, values)
            self.tracker.log(step, values)

    def __enter__(self) -> Records:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._metrics is None:
            return
        self._metrics.close()
        write_status(self._run, self.status)
        self.tracker.finish(0 if self.status == "done" else 1)
