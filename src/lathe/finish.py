"""The end of a run: its best checkpoint is tested once, and the final figures are gathered."""

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lathe import rundir, stacking
from lathe.build import make_task
from lathe.callbacks import Checkpoint, Compression, Progress, Throughput
from lathe.checkpoints import read_checkpoint, restore
from lathe.config import did_you_mean, require
from lathe.tasks import Task
from lathe.trainer import make_trainer


def finish(
    cfg: dict[str, Any], run: rundir.RunDir, trainer: Trainer, task: Task, datamodule: Any, callbacks: list[Callback]
) -> dict[str, Any]:
    """Tests the best checkpoint and gathers the final figures, keyed by `split/metric` or by their own names.

    A strategy that `reshapes` the net leaves nothing that takes plain weights, and compression may have changed the best ones after
    training: a new net is built then.
    """
    result: dict[str, Any] = {}
    made = [callback for callback in callbacks if isinstance(callback, Compression)]
    checkpoint = next((c for c in callbacks if isinstance(c, Checkpoint)), None)
    epochs, steps = trainer.current_epoch, trainer.global_step
    validation = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
    if checkpoint is not None and run.best.exists():
        validation |= checkpoint.best_metrics
        changed = False
        if made:
            if trainer.is_global_zero:
                stacking.finalise(cfg, run.best, made)
            trainer.strategy.barrier()
            changed = bool(read_checkpoint(run.best).get("finalised", False))
        if cfg["test"] or changed:
            if made or getattr(trainer.strategy, "reshapes", False):
                task = make_task(cfg, train=False)
                trainer = make_trainer(cfg, run.path, [c for c in callbacks if isinstance(c, Progress)])
            restore(task.net, read_checkpoint(run.best), str(run.best))
        if changed:
            trainer.validate(task, datamodule=datamodule, verbose=False)
            validation |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
        if made:
            result["parameters"] = sum(p.numel() for p in task.net.parameters())
        result |= {"best_step": checkpoint.best_step, "monitor": checkpoint.monitor}
    result |= validation
    if cfg["test"]:
        trainer.test(task, datamodule=datamodule, verbose=False)
        result |= {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("test/")}
    for callback in callbacks:
        if isinstance(callback, Throughput):
            result |= callback.summary()
    for method in made:
        result |= method.report()
    objective = cfg["objective"] or (checkpoint.monitor if checkpoint else None)
    require(objective is None or objective in result,
            f"objective={objective}: the run has no such figure; {did_you_mean(str(objective), result)}")  # fmt: skip
    return {
        **result,
        "objective": result.get(objective) if objective else None,
        "epochs": epochs,
        "steps": steps,
        "seed": cfg["seed"],
        "devices": trainer.world_size,
        "name": cfg["name"],
    }
