"""Training, from a resolved configuration to result.json. Every rank runs `train`.

Read `train` from top to bottom. Each function that it calls builds one thing from the configuration.
"""

from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lathe.callbacks import WallTime, skip_empty_hooks
from lathe.compression.structure import apply_structure
from lathe.config.resolve import flatten
from lathe.loggers import ended_on_error, run_log
from lathe.runs.build import make_data, make_task
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir
from lathe.tasks import Task
from lathe.training.final_evaluation import add_objective, end_reason, evaluate_best, report_result
from lathe.training.run_start import RunStart, check_components, explain_lightning_errors, interruptible
from lathe.training.trainer_setup import (
    configure_logging,
    make_callbacks,
    make_loggers,
    make_trainer,
    prepare_model,
    to_double,
    trial_report,
)


def train(cfg: dict[str, Any]) -> dict[str, Any]:
    """Train or resume the run in `paths.run_dir`, test its best checkpoint, and return the content of result.json.

    Raises:
        UserError: a component can't be built or used, or the data or the disk can't be.
        Stopped: a signal ended the run, which can be resumed.
    """
    configure_logging()
    run, sweep = RunDir(cfg["paths"]["run_dir"]), cfg.pop("sweep", None)
    with ended_on_error(run.path), run_log(run.path, flatten(cfg)):
        wall_time = WallTime()
        seed_everything(cfg["seed"], workers=True, verbose=False)
        data, task = make_data(cfg, train=True), make_task(cfg)
        state = load_last(run, task)  # None for a new run
        first_step = state["global_step"] if state else 0
        loggers = make_loggers(cfg, run.path, first_step)
        start = RunStart(run, cfg, first_step, task.monitor or cfg["callbacks"].get("checkpoint", {}).get("monitor"))
        # start is the last: training has begun when no other callback has raised
        callbacks = [*make_callbacks(cfg, task), *trial_report(cfg, task, sweep), wall_time, start]
        check_components(cfg, data, task, callbacks)
        skip_empty_hooks(callbacks)
        start.callbacks = callbacks
        trainer = make_trainer(cfg, run.path, callbacks, loggers)
        parameters = sum(p.numel() for p in task.net.parameters())  # before a strategy shards them
        to_double(task, cfg)
        ckpt_path = initialise(cfg, task) if state is None else run.last
        prepare_model(cfg, task, trainer)
        with interruptible(start):
            with explain_lightning_errors(trainer, lambda: start.begun):
                trainer.fit(task.driven, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
            start.on_train_start(trainer, task.driven)  # not called in a run of no steps
            ended = end_reason(cfg, trainer)  # before callbacks take the states of the best checkpoint
            result = {"parameters": parameters, **evaluate_best(cfg, run, trainer, task, data, callbacks)}
            result = add_objective(cfg, {**result, "seconds": wall_time.seconds})
            report_result(cfg, run, trainer, result, callbacks, loggers, ended)
            return result


def load_last(run: RunDir, task: Task) -> dict[str, Any] | None:
    """Return the checkpoint that an interrupted run continues from, and give the net its structure."""
    if not run.last.exists():
        return None
    state = read_checkpoint(run.last, "resume")
    apply_structure(task.core, state.get("structure", {}))
    rank_zero_only(print)(f"Continuing {run.path} after step {state['global_step']}", flush=True)
    return state


def initialise(cfg: dict[str, Any], task: Task) -> Path | None:
    """Load the weights that a new run begins with; return the checkpoint whose whole state ckpt_mode=trainer takes."""
    if cfg["ckpt_path"] is None and not cfg["model"].get("pretrained"):
        return None
    from lathe.training import weight_loading

    return weight_loading.initialise(cfg, task)
