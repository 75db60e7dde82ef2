"""Builds the parts from a resolved configuration and drives the Trainer. The only file that knows all the parts.

Every function takes the resolved configuration as plain data and runs in each rank.
"""

import re
import traceback
from pathlib import Path
from typing import Any

import lightning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, Timer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lathe.callbacks import Compression, Elapsed, skip_empty_hooks
from lathe.compression.structure import apply_structure
from lathe.config.compression_plan import methods
from lathe.config.resolve import flatten
from lathe.config.schema import with_keys
from lathe.errors import UserError, require
from lathe.loggers import CSVLogger, ended_on_error, log_facts, log_page, log_result, main_facts, run_facts, run_log
from lathe.runs import rundir, summary
from lathe.runs.attached import make_callbacks, make_loggers, trial_report
from lathe.runs.build import make_data, make_task
from lathe.runs.checkpoints import read_checkpoint, restore
from lathe.runs.fetched import checkpoint_path
from lathe.runs.foreign_weights import read_weights, renamed_weights, take_what_fits
from lathe.runs.nodes import target_of
from lathe.runs.pretrained import take_pretrained
from lathe.runs.reported import check_names, not_reported
from lathe.runs.trainer import OWN_CHECKPOINTS, found_device, make_trainer, prepare, quiet, widen
from lathe.runs.typed import run_command
from lathe.tasks import Task
from lathe.verbs.finalise import tell_what_goes, tell_what_is_not_measured, write_receipt
from lathe.verbs.finish import conclude, finish
from lathe.verbs.interrupts import interruptible


def train(cfg: dict[str, Any]) -> dict[str, Any]:
    """Trains, or continues, the run in `paths.run_dir`, tests its best checkpoint once, and returns what result.json
    holds.

    Raises:
        UserError: a part can't be built, or the data or the disk is not fit.
        Stopped: a signal ended the run, which can be resumed.
    """
    quiet()
    run, place = rundir.RunDir(cfg["paths"]["run_dir"]), cfg.pop("sweep", None)
    with ended_on_error(run.path), run_log(run.path, flatten(cfg)):
        return _train(cfg, run, place)


def _train(cfg: dict[str, Any], run: rundir.RunDir, place: dict[str, Any] | None) -> dict[str, Any]:
    elapsed = Elapsed()
    seed_everything(cfg["seed"], workers=True, verbose=False)
    datamodule = make_data(cfg, train=True)
    task = make_task(cfg)
    resume = run.last if run.last.exists() else None
    state = read_checkpoint(resume) if resume else None
    if state is not None:
        apply_structure(task.net, state.get("structure", {}))
    first_step = state["global_step"] if state else 0
    if state is not None:
        rank_zero_only(print)(f"Continuing {run.path} after step {first_step}", flush=True)
    loggers = make_loggers(cfg, run.path, first_step)
    start = Start(run, cfg, first_step, task.monitor or cfg["callbacks"].get("checkpoint", {}).get("monitor"))
    report = trial_report(cfg, task, place)
    # start is the last: every other part has had its chance to refuse
    callbacks = [*make_callbacks(cfg, task), *([report] if report else []), elapsed, start]
    start.given = callbacks
    task.check_run(cfg)
    check_loaders(cfg, datamodule)
    check_names(cfg, task, callbacks)
    task.check_facts(cfg["data"])
    widen(task, cfg)
    skip_empty_hooks(callbacks)
    trainer = make_trainer(cfg, run.path, callbacks, loggers)
    parameters = sum(p.numel() for p in task.net.parameters())  # before a strategy spreads them
    if state is None and cfg["ckpt_path"] is not None:
        resume = start_from(cfg, task)
    elif state is None and cfg["model"].get("pretrained"):
        for line in take_pretrained(task.net, cfg["model"]):
            rank_zero_only(print)(line)
    prepare(cfg, task, trainer)
    tell_what_is_not_measured(cfg.get("compression") or {})
    tell_no_checkpoints(cfg, trainer)
    with interruptible(start):
        try:
            trainer.fit(task.driven, datamodule=datamodule, ckpt_path=resume, weights_only=True)
        except RuntimeError as error:
            if str(error).startswith("Early stopping conditioned on metric"):
                raise not_reported(cfg, callbacks, str(error), trainer.callback_metrics) from error
            tell_lightnings(error, start.begun, trainer)
            raise
        except (TypeError, ValueError, AttributeError, MisconfigurationException) as error:
            tell_lightnings(error, start.begun, trainer)
            raise
        start.on_train_start(trainer, task.driven)  # a run of no steps
        if trainer.global_step == 0:
            tell_undone(callbacks, trainer)
        ended = why_ended(cfg, trainer)
        pruned = {} if report is None or report.pruned is None else {"pruned": report.pruned}
        if pruned:  # what is left out of the race is not looked at again
            cfg = {**cfg, "test": False}
        result = finish(cfg, run, trainer, task, datamodule, callbacks) | pruned
        result = conclude(cfg, {"parameters": parameters, **result, "seconds": elapsed.seconds})
        _tell_end(cfg, run, trainer, callbacks, loggers, result, ended)
    return result


def tell_no_checkpoints(cfg: dict[str, Any], trainer: Trainer) -> None:
    """Warn where a choice of callbacks has left the checkpoints out by leaving out `default`."""
    names, options = cfg["callbacks"], cfg["trainer"]
    asked = names and "checkpoint" not in names and options["enable_checkpointing"] and not options["fast_dev_run"]
    if asked and not trainer.checkpoint_callbacks:
        rank_zero_warn(
            "No checkpoint callback: this run can't be resumed or evaluated. "
            f"callbacks=[default,{','.join(names)}] keeps one."
        )


def tell_undone(callbacks: list[Callback], trainer: Trainer) -> None:
    """Says which methods of compression a run without a step had no occasion for."""
    names = [type(one).__name__ for one in callbacks if isinstance(one, Compression) and not one.ready(trainer)]
    if names:
        rank_zero_warn(f"compression: no optimizer step was made, so {' and '.join(names)} had nothing to do.")


def why_ended(cfg: dict[str, Any], trainer: Trainer) -> str:
    """Return why training ended before its last epoch, such as `stopped by early_stopping at epoch 3 of 8`; empty
    where it did not."""
    options, step = cfg["trainer"], trainer.global_step
    done: int = trainer.fit_loop.epoch_progress.current.processed  # type: ignore[attr-defined]
    last = trainer.max_epochs
    if step == 0 or done == last:
        return ""
    at = f"at epoch {done}" + (f" of {last}" if last not in (None, -1) else "")
    if step == trainer.max_steps:
        return f"trainer.max_steps={step} reached {at}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # a connector sets it
        early = isinstance(callback, EarlyStopping) and callback.stopping_reason_message is not None
        if early and callback.stopped_epoch == done - 1:
            names = [name for name, node in cfg["callbacks"].items() if target_of(node) is type(callback)]
            return f"stopped by {names[0] if names else type(callback).__name__} {at}"
        left = callback.time_remaining() if isinstance(callback, Timer) else None
        if left is not None and left <= 0:
            return f"trainer.max_time={options['max_time']} reached {at}"
    return f"stopped {at}"


def _tell_end(
    cfg: dict[str, Any],
    run: rundir.RunDir,
    trainer: Trainer,
    callbacks: list[Callback],
    loggers: list[Logger],  # the run's own: those of a Trainer that makes a trial alone write nothing
    result: dict[str, Any],
    ended: str,
) -> None:
    """To the loggers, to the disk and to the user, in this order."""
    pages = [page for callback in callbacks if (page := getattr(callback, "page", None)) is not None]
    for logger in loggers:
        for page in pages:
            log_page(logger, page)
        log_result(logger, result, run.best)
    if trainer.is_global_zero:
        run.finish(result)
        summary.show(result, run, ended=ended)
        small = any(isinstance(callback, Compression) for callback in callbacks)
        if small and "pruned" not in result and cfg["compression"]["receipt"] != "none":
            write_receipt(run, cfg)
        summary.show_next(run, summary.proposals(run, cfg))


def check_loaders(cfg: dict[str, Any], datamodule: LightningDataModule) -> None:
    """Raises UserError where a data module of the user's own lacks a loader that the run ends with: Lightning says so
    when it asks for it.
    """
    name = f"data: {type(datamodule).__name__} has no"
    require(is_overridden("train_dataloader", datamodule), f"{name} train_dataloader: write one.")
    require(
        not cfg["test"] or is_overridden("test_dataloader", datamodule),
        f"{name} test_dataloader: write one, or add test=false.",
    )


class Start(Callback):
    """Marks on disk that data and devices are ready and training begins: from here on, what the run leaves is kept.
    Loggers are told what the run is."""

    def __init__(self, run: rundir.RunDir, cfg: dict[str, Any], first_step: int, monitor: str | None) -> None:
        self.run, self.cfg, self.first_step, self.monitor = run, cfg, first_step, monitor
        self.begun = self.interrupted = False
        self.given: list[Callback] = []  # with which the Trainer was made
        self.command = run_command("train.py", "resume", run.path, cfg)  # that goes on with it

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Gives a ModelCheckpoint of the user's own, which would write beside the first logger's lines, a folder."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(self.run.path / OWN_CHECKPOINTS)
        for given in self.given:
            if stage == "fit" and given not in trainer.callbacks:  # type: ignore[attr-defined]
                kind, module = type(given).__name__, type(pl_module).__name__
                rank_zero_warn(f"callbacks: a {kind} of {module}.configure_callbacks takes the place of the run's own.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.begun:
            return
        self.begun = True
        facts, tags = run_facts(flatten(self.cfg)), self.cfg.get("tags") or []
        stages = ",".join(methods(self.cfg.get("compression") or {}))  # a list's choices are not in Hydra's record
        choices = {"compression": stages or None} | self.run.environment.get("choices", {})
        main = main_facts(facts, choices, self.run.overrides)
        for logger in trainer.loggers:
            if isinstance(logger, CSVLogger):
                logger.begin()
            log_facts(logger, facts, main, tags, self.first_step, self.monitor)
        if trainer.is_global_zero:
            self.keep_names(getattr(trainer.datamodule, "class_names", None))  # type: ignore[attr-defined]
            log_dir = Path(self.cfg["paths"]["log_dir"])
            keeps = trainer.checkpoint_callbacks and not trainer.fast_dev_run  # type: ignore[attr-defined]
            if keeps and log_dir.resolve() == self.run.path.resolve().parent.parent:  # not where a run was copied to
                rundir.point_latest(log_dir, self.run.path)
            if self.cfg["trainer"].get("accelerator") == "auto":
                print(found_device(trainer), flush=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Before Lightning takes a run down."""
        self.interrupted = isinstance(exception, KeyboardInterrupt)

    def keep_names(self, found: list[str] | None) -> None:
        """Writes names of classes that came with the data into config.yaml, where whoever answers by name looks."""
        data = self.cfg["data"]
        if found and "class_names" in data and data["class_names"] is None:
            self.run.save_config({**self.cfg, "data": {**data, "class_names": list(found)}})


def tell_lightnings(error: Exception, begun: bool, trainer: Trainer) -> None:
    """Raises UserError where Lightning's own code has refused the run, before training has `begun`; or later, where it
    has looked at a user's part.
    """
    looked = traceback.extract_tb(error.__traceback__)[-1].name.startswith("_verify_")
    if (looked or not begun) and from_lightning(error):
        said = with_keys(str(error))
        if getattr(trainer, "overfit_batches", 0):  # Lightning has put it into the limits and speaks of those
            said = re.sub(r"trainer\.limit_(?:train|val)_batches", "trainer.overfit_batches", said)
        raise UserError(f"Lightning refuses this run: {said}") from error


def from_lightning(error: BaseException) -> bool:
    """Whether Lightning's own code raised this, and not a part that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    if frames and frames[-1].name == "__getattr__":  # a module's: who has asked for what is not there?
        frames.pop()
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(lightning.__file__).parent)


def start_from(cfg: dict[str, Any], task: Task) -> Path | None:
    """Takes what `ckpt_mode` says from `ckpt_path`: the net's weights at once, or the path for the Trainer to restore
    everything from.
    """
    path = checkpoint_path(cfg)
    if path.is_dir() and not (path / "meta.pt").is_file():
        path = rundir.open_run(path, "ckpt_path").checkpoint("best" if cfg["ckpt_mode"] == "weights" else "last")
    weights = cfg["ckpt_mode"] == "weights"
    state = read_weights(path, "ckpt_path") if weights else read_checkpoint(path, "ckpt_path")
    if not weights:
        require("optimizer_states" in state, f"ckpt_path={path} holds weights alone: use ckpt_mode=weights.")
        averaged = "ema" in state and "ema" not in cfg["callbacks"]
        require(
            not averaged,
            f"ckpt_path={path} holds averaged weights, ckpt_mode=trainer goes on from raw ones: add "
            "callbacks=[default,ema].",
        )
        nodes = methods(cfg.get("compression") or {})
        early = [
            name for name, node in nodes.items() if node["kind"] == "quantization" or node.get("mode") == "one_shot"
        ]
        require(
            not early or "structure" in state,
            f"ckpt_mode=trainer takes over the optimizer of another net than the one that "
            f"compression={','.join(early)} makes: use ckpt_mode=weights.",
        )
        apply_structure(task.net, state.get("structure", {}))
        return path
    if cfg.get("ckpt_map"):
        state["state_dict"] = renamed_weights(state["state_dict"], cfg["ckpt_map"], "ckpt_map")
    if cfg.get("ckpt_strict", True):
        restore(task.net, state, f"ckpt_path={path}")
    else:
        apply_structure(task.net, state.get("structure", {}))
        for line in take_what_fits(task.net, state["state_dict"], f"ckpt_path={path}"):
            rank_zero_only(print)(line)
    if "global_step" in state:
        _tell_what_is_taken(path, int(state["global_step"]))
    tell_what_goes(cfg, task.net, f"ckpt_path={path}")
    return None


@rank_zero_only
def _tell_what_is_taken(path: Path, step: int) -> None:
    home = path.resolve().parent.parent
    resume = (
        f"resume={home} goes on with that run"
        if (home / "config.yaml").is_file()
        else "resume=<run directory> goes on with a run"
    )
    print(
        f"ckpt_path={path}: a new run from these weights alone (of step {step}); optimizer, schedule and data start "
        f"anew. {resume}, ckpt_mode=trainer takes over all of its state.",
        flush=True,
    )
