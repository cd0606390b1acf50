"""Train a model: the story of a run, told once from top to bottom.

    python train.py               the default run, minutes on a CPU
    python train.py --help        every group and setting
    torchrun --nproc-per-node 4 train.py model=base

What each part does is written in training/; this file is the order in which things happen.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import hydra
import torch
from hydra.conf import HydraConf
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from data.prepare import Prepared, prepare
from data.windows import WindowOrder, Windows
from kernels.attention import pick_backend
from model.decoder import Decoder
from model.size import training_flops_per_token
from training.config import (
    Config,
    UserError,
    check_command_line,
    check_config,
    explain,
    keep_hydra_working,
    setting_up,
    to_config,
)
from training.devices import (
    autocast,
    device_name,
    grad_scaler,
    maybe_compile,
    resolve_device,
    resolve_dtype,
    seed_everything,
)
from training.distributed import RankFailedError, Ranks, StopFlag
from training.evaluate import Evaluation, evaluate
from training.optim import Optimizers, build_optimizers
from training.plan import describe_plan, describe_start
from training.progress import Progress, RunLog
from training.records import Records
from training.report import describe_end, draw_pictures, sample_texts
from training.run_folder import (
    create_run_folder,
    find_initial_weights,
    find_resumed_run,
    leave_later_checkpoints,
    open_resumed_run,
    resumed_config,
    text_hashes,
)
from training.schedule import lr_multiplier
from training.state import Counters, initial_weights, restore_state, save_state
from training.step import NonFiniteError, StepGuard, take_step
from training.telemetry import Telemetry, make_probe
from training.throughput import Meter, mfu, peak_flops

ConfigStore.instance().store(name="schema", node=Config)


@dataclass(frozen=True, kw_only=True)
class Session:
    """Everything a run trains with, built once by `set_up`."""

    config: Config
    device: torch.device
    dtype: torch.dtype
    text: Prepared
    train_windows: Windows
    val_windows: Windows
    order: WindowOrder
    model: Decoder
    optimizers: Optimizers
    scaler: torch.amp.GradScaler
    counters: Counters
    run: Path
    records: Records
    telemetry: Telemetry
    meter: Meter
    log: RunLog


def train(config: Config, overrides: list[str]) -> float:
    """Train as `config` says and return the best validation loss (NaN after a dry run).

    Args:
        config: the checked configuration of a new run, or one that says which run to resume.
        overrides: the command line's ``key=value`` items, which a resumed run puts on top of the
            configuration it was started with.

    Raises:
        UserError: for anything a user can set wrong, before a step is taken.
        NonFiniteError: when the loss or its gradient stops being a number.
    """
    with setting_up(Ranks.from_environment)() as ranks, StopFlag() as stop:
        session = set_up(config, overrides, ranks)
        if session is None:
            return math.nan
        with session.records:
            last, stop_signal = run_loop(session, ranks, stop)
        if stop_signal is not None:
            sys.exit(128 + signal.Signals[stop_signal])
        if ranks.is_main:
            report(session, last)
        best = session.counters.best_loss
        return math.nan if best is None else best


@setting_up
def set_up(config: Config, overrides: list[str], ranks: Ranks) -> Session | None:
    """Build everything in the order in which mistakes can show; None after a dry run."""
    # Which run is this, and where does it compute?
    log = RunLog(stream=None if ranks.is_main else open(os.devnull, "w"))  # noqa: SIM115
    resume, dry_run = config.resume, config.dry_run
    folder, start_note = find_resumed_run(config)
    if folder is not None:
        config, changed = resumed_config(folder, config, overrides)
        start_note += f" with {', '.join(changed)}" if changed else ""
    check_config(config, ranks.world)
    device = resolve_device(config.device, ranks)
    pick_backend(device, config.attention.backend)  # refuses one that cannot run here
    dtype = resolve_dtype(config.dtype, device)
    if config.init_from is not None and folder is None:
        config.init_from = str(find_initial_weights(config))
    ranks.connect(device)
    if resume is not None:
        log.note(start_note)

    # The text: prepared once, then cut into windows that are visited in an order of their own.
    with ranks.main_first():
        text = prepare(
            config.data,
            config.tokenizer,
            context_length=config.model.context_length,
            vocab_size=config.model.vocab_size,
            log=log.note,
        )
    config.model.vocab_size = config.model.vocab_size or text.tokenizer.vocab_size
    train_windows = Windows(text.train, config.model.context_length, config.data.mode)
    val_windows = Windows(text.val, config.model.context_length, config.data.mode)
    order = WindowOrder(len(train_windows), config.seed)
    log.note(describe_start(config, device=device, dtype=dtype, world=ranks.world))
    if dry_run:
        log.note(describe_plan(config, dtype=dtype, world=ranks.world))
        return None

    # The model and what updates it, fresh or as a checkpoint left them.
    seed_everything(config.seed, deterministic=config.deterministic)
    model = Decoder(
        config.model, backend=config.attention.backend, precision=config.attention.precision
    )
    checkpoint = None
    if folder is not None and resume is not None:
        checkpoint = open_resumed_run(resume, folder, text, log.note)
        model.load_state_dict(checkpoint.tensors["model"])
    elif config.init_from is not None:
        model.load_state_dict(
            initial_weights(config.init_from, model, text.tokenizer.sha256, log.note)
        )
    model.to(device)
    maybe_compile(model, config.compile, device, log.note)
    optimizers = build_optimizers(model, config.optim)
    scaler = grad_scaler(device, dtype)
    seed_everything(config.seed, deterministic=config.deterministic, rank=ranks.rank)
    counters, tracker_id = Counters(), None
    if checkpoint is not None:
        counters, tracker_id, notice = restore_state(
            checkpoint, optimizers=optimizers, scaler=scaler, order=order, ranks=ranks
        )
        if counters.step > config.train.max_steps:
            raise UserError(
                f"train.max_steps={config.train.max_steps} is below step {counters.step}, where "
                f"{folder} stands: raise it, or resume an older checkpoint"
            )
        log.note(f"resumed at step {counters.step}" + (f"; {notice}" if notice else ""))
        if counters.step == config.train.max_steps:
            log.note("nothing is left to train: raise train.max_steps to go on")
    probe = make_probe(config.telemetry, config.model, val_windows, text.tokenizer, ranks)

    # The run's folder. Nothing above has written into it, so a mistake leaves no trace.
    if ranks.is_main and folder is None:
        folder = create_run_folder(config.runs_dir, config.name)
    run = ranks.broadcast_object(folder)
    assert run is not None
    if ranks.is_main:
        text.tokenizer.save(run / "tokenizer.json")
        leave_later_checkpoints(run, counters.step, log.note)
    records = Records(run, config, counters.step, tracker_id, is_main=ranks.is_main, log=log)
    return Session(
        config=config,
        device=device,
        dtype=dtype,
        text=text,
        train_windows=train_windows,
        val_windows=val_windows,
        order=order,
        model=model,
        optimizers=optimizers,
        scaler=scaler,
        counters=counters,
        run=run,
        records=records,
        telemetry=Telemetry(
            config.telemetry,
            model,
            probe,
            run=run,
            step=counters.step,
            ranks=ranks,
            records=records,
            log=log.note,
        ),
        meter=Meter(),
        log=log,
    )


def run_loop(
    session: Session, ranks: Ranks, stop: StopFlag
) -> tuple[Evaluation | None, str | None]:
    """Train: learning rate, micro-steps, clip, step, look at the heads, log, evaluate, save.

    Returns the last evaluation, and the name of the signal that ended the loop early, if one did.
    """
    s, settings, counters, meter = session, session.config.train, session.counters, session.meter
    context = s.config.model.context_length
    precision = partial(autocast, s.device, s.dtype)
    per_rank = settings.batch_size // ranks.world
    micro = settings.micro_batch_size or per_rank
    flops = training_flops_per_token(s.config.model)
    peak = peak_flops(device_name(s.device), s.dtype, settings.peak_tflops)
    wrapped = ranks.wrap(s.model, s.device)
    guard = StepGuard(settings.max_skipped_steps)
    bar = Progress(settings.max_steps, counters.step, every=10 * settings.log_every, log=s.log)

    def evaluate_now() -> Evaluation:
        with meter.paused():
            found = evaluate(
                s.model,
                s.val_windows,
                s.text.tokenizer,
                batch_size=settings.eval_batch_size or micro,
                limit=settings.eval_windows,
                device=s.device,
                autocast=precision,
                ranks=ranks,
            )
            is_best = counters.count_evaluation(found.loss)
            s.records.add(counters.step, found.metrics())
            bar.note(f"step {counters.step}: {found}" + (" (best so far)" if is_best else ""))
            s.telemetry.probe(counters.step, s.device, precision)
        return found

    def save_now() -> None:
        with meter.paused():
            save_state(
                s.run,
                model=s.model,
                optimizers=s.optimizers,
                scaler=s.scaler,
                order=s.order,
                counters=counters,
                tokenizer_sha256=s.text.tokenizer.sha256,
                text=text_hashes(s.text),
                tracker_id=s.records.tracker.id,
                keep_last_n=settings.keep_last_n,
                ranks=ranks,
                log=bar.note,
            )

    meter.start()
    last = None
    if counters.step == 0:
        last = evaluate_now()
        save_now()  # so that the best checkpoint exists from the start, and a full disk shows now
    stop_signal, ended_early = None, False
    while counters.step < settings.max_steps and stop_signal is None and not ended_early:
        statistics = s.telemetry.begin_step(counters.step + 1)
        lr = s.optimizers.set_lr(lr_multiplier(counters.step, s.config.optim, settings.max_steps))
        indices = s.order.next_indices(settings.batch_size)
        mine = indices[ranks.rank * per_rank : (ranks.rank + 1) * per_rank]
        batches = [
            s.train_windows.batch(mine[first : first + micro])
            for first in range(0, per_rank, micro)
        ]
        result = take_step(
            wrapped,
            s.optimizers,
            s.scaler,
            batches,
            config=s.config.model,
            device=s.device,
            autocast=precision,
            ranks=ranks,
            statistics=statistics,
        )
        guard.check(
            result, step=counters.step, lr=lr, windows=indices, scaler=s.scaler, log=bar.note
        )
        counters.count_step(result.tokens)
        s.telemetry.end_step(statistics)
        meter.add(settings.batch_size * context)

        step, speed = counters.step, meter.tokens_per_s()
        bar.update(step, result.loss, lr, speed)
        is_last = step == settings.max_steps
        if is_last or step % settings.log_every == 0:
            values = {
                "train/loss": result.loss,
                "train/lr": lr,
                "train/grad_norm": result.grad_norm,
                "train/tokens_per_s": speed,
                "train/tokens": counters.tokens,
                "train/epoch": s.order.epoch,
            }
            utilisation = mfu(speed, flops, peak, ranks.world)
            if utilisation is not None:
                values["train/mfu"] = utilisation
            s.records.add(step, values)

        if is_last or step % settings.eval_every == 0:
            last = evaluate_now()
            ended_early = counters.out_of_patience(settings.patience)
        stop_signal = stop.agreed(ranks)
        is_due = step == counters.best_step or step % settings.checkpoint_every == 0
        if is_due or is_last or ended_early or stop_signal:
            save_now()
    if ended_early:
        bar.note(f"ended early: no new best in {settings.patience} evaluations")
    if last is None and stop_signal is None:
        last = evaluate_now()  # a resumed run that had nothing left to do
    bar.close()
    s.records.tracker.summary(
        {"best/val_loss": counters.best_loss, "best/step": counters.best_step}
    )
    if stop_signal:
        s.log.note(f"stopped by {stop_signal} after step {counters.step}; resume={s.run}")
    s.records.status = "preempted" if stop_signal else "done"
    return last, stop_signal


def report(session: Session, last: Evaluation | None) -> None:
    """Say what came of it: plots, samples, the numbers that matter."""
    s = session
    draw_pictures(s.run, s.log.note, with_heads=s.config.telemetry.report)
    samples = sample_texts(s.model, s.text, s.config.train, s.config.seed)
    looking = s.telemetry.describe(s.meter.step_seconds)
    s.log.note(describe_end(s.run, s.counters, last, samples, s.meter, looking))


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def _compose_and_train(composed: DictConfig) -> float:
    """Train one composed configuration; a sweep calls this once per job."""
    job = HydraConfig.get()
    try:
        return train(to_config(composed), list(job.overrides.task))
    except (UserError, NonFiniteError) as error:
        if job.mode == RunMode.MULTIRUN:
            raise  # Hydra runs the other jobs, then reports the first that failed
        fail(error)


def fail(error: Exception) -> NoReturn:
    """End with one line for the user and no traceback; what all ranks have to say, one says."""
    said_by_all = not torch.distributed.is_initialized()
    if isinstance(error.__cause__, RankFailedError) or (said_by_all and "RANK" in os.environ):
        said = os.environ.get("RANK") != "0"
    else:
        said = False
    if not said:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(2 if isinstance(error, UserError) else 1)


def main() -> None:
    """Read the command line and train; ``glassgpt-train`` starts here."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come back here and become one line
    keep_hydra_working()
    sweep = [flag for flag in sys.argv[1:] if flag in ("-m", "--multirun")]
    # argparse wants the flag before the settings; people write it anywhere.
    sys.argv[1:] = sweep + [item for item in sys.argv[1:] if item not in sweep]
    try:
        check_command_line(sys.argv[1:], HydraConf.__dataclass_fields__)
        _compose_and_train()
    except (UserError, NonFiniteError) as error:
        fail(error)
    except (HydraException, OmegaConfBaseException) as error:
        fail(UserError(explain(error)))
    except KeyboardInterrupt:
        print("interrupted before the step could end; resume=latest goes on", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
