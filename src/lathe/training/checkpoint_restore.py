"""Restores checkpoints into a Trainer, with an error for a part that does not fit.

A checkpoint of the run itself has digests (`callbacks.checkpoint_digest`), which are compared when the file is read.
One of another run, or of plain Lightning, may have other data, optimizers or schedulers, and Lightning 2.6
skips some of these silently.

Who restores what on `resume=` (for a new run that begins from a checkpoint, `training/weight_loading.py` comes first):

- which run, and its configuration: `launch/resume.py`, before torch is imported
- the structure of the net (channels, quantizers, masks' shapes): `train.load_last`, before the Trainer
- weights, optimizers, schedulers, loops, data module: `CheckpointRestore`, in `trainer.fit`
- states of callbacks, such as masks and averages: their `load_state_dict`
- random generators: `callbacks.ExactResume`; sums of metrics since the last report: `Task.on_train_start`
- a limit or length that was changed since: `trainer/schedule_resume.py` and `FitLoop`
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import OutOfMemoryError, Tensor

from lathe.callbacks.module_access import is_users
from lathe.data.base import ExactDataModule
from lathe.errors import UserError, require
from lathe.tasks.checkpoint_types import check_checkpoint, readable_hyper_parameters, without_numpy

# no options, or options that don't change the result of a step
SAME_STEP = ("params", "name", "fused", "foreach", "capturable", "differentiable")


class CheckpointRestore(_CheckpointConnector):
    """Lightning's connector, which restores a checkpoint part by part."""

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        # every rank has the whole of it here, so all raise and none waits for another
        checkpoint: dict[str, Any] = without_numpy(super().dump_checkpoint(weights_only))
        for part in (self.trainer.lightning_module, self.trainer.datamodule):  # type: ignore[attr-defined]
            if part is not None and part.CHECKPOINT_HYPER_PARAMS_KEY in checkpoint:
                checkpoint[part.CHECKPOINT_HYPER_PARAMS_KEY] = readable_hyper_parameters(part)[0]
                checkpoint.pop(part.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # a class
        check_checkpoint(checkpoint, mappings=isinstance(self.trainer.strategy, ModelParallelStrategy))
        return checkpoint

    def _restore_modules_and_callbacks(self, *args: Any, **kwargs: Any) -> None:
        with self._misfits():
            super()._restore_modules_and_callbacks(*args, **kwargs)

    def restore_training_state(self) -> None:
        with self._misfits():
            super().restore_training_state()

    def restore_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        if self._loaded_checkpoint and self.trainer.state.fn == TrainerFn.FITTING and self._is_own():
            changed = data_changes(datamodule, self._loaded_checkpoint)
            require(
                changed is None,
                f"{self._key}={self._ckpt_path}: the data are not those that it was written with, {changed}: put them "
                "back as they were, or start a new run from its weights with ckpt_path.",
            )
        super().restore_datamodule()

    def restore_optimizers(self) -> None:
        if not self._loaded_checkpoint:
            return
        states, own = self._loaded_checkpoint["optimizer_states"], self.trainer.optimizers
        self._check_count("optimizer_states", len(states), len(own))
        for optimizer, state in zip(own, states, strict=True):
            fresh = optimizer.state_dict()
            for group, saved in zip(fresh.get("param_groups", ()), state["param_groups"], strict=False):
                if "name" in group:  # plain Lightning has none, and optimizers may use it
                    saved.setdefault("name", group["name"])
            if not self._is_own():
                self._warn_other_options(fresh, state)
        super().restore_optimizers()

    def restore_lr_schedulers(self) -> None:
        if not self._loaded_checkpoint:
            return
        from lathe.trainer.schedule_resume import replan

        configs = self.trainer.lr_scheduler_configs
        fresh = [config.scheduler.state_dict() for config in configs]
        self._check_count("lr_schedulers", len(self._loaded_checkpoint["lr_schedulers"]), len(configs))
        super().restore_lr_schedulers()
        for config, state in zip(configs, fresh, strict=True):
            lengths = replan(config.scheduler, state)
            if lengths and self.trainer.is_global_zero:
                name = type(config.scheduler).__name__
                print(f"{name} is adjusted to this run's length: {', '.join(lengths)}.", flush=True)

    def _is_own(self) -> bool:
        """Return whether the checkpoint is in the run's directory, and so was not written by plain Lightning."""
        return Path(str(self._ckpt_path)).is_relative_to(self.trainer.default_root_dir)

    @property
    def _key(self) -> str:
        return "resume" if self._is_own() else "ckpt_path"

    def _check_count(self, part: str, saved: int, expected: int) -> None:
        if saved != expected:
            raise self._misfit(f"{part}: there are {saved} of them, and this run has {expected}")

    def _warn_other_options(self, own: dict[str, Any], saved: dict[str, Any]) -> None:
        """Warn about options of the optimizer in which another run's checkpoint replaces those of config.yaml."""
        changed: dict[str, str] = {}
        for mine, theirs in zip(own.get("param_groups", ()), saved["param_groups"], strict=False):
            for name, value in mine.items():
                initial = f"initial_{name}" if f"initial_{name}" in mine and f"initial_{name}" in theirs else name
                if name in SAME_STEP or name.startswith("initial_") or name not in theirs or isinstance(value, Tensor):
                    continue
                if _as_list(mine[initial]) != _as_list(theirs[initial]):
                    changed.setdefault(name, f"{name}={theirs[initial]} (here {mine[initial]})")
        if changed:
            rank_zero_warn(
                f"ckpt_mode=trainer takes the optimizer as {self._ckpt_path} has it, and not as config.yaml says: "
                f"{', '.join(changed.values())}. For this run's own options start from its weights, ckpt_mode=weights."
            )

    def _misfit(self, reason: str) -> UserError:
        return UserError(
            f"{self._key}={self._ckpt_path} does not fit this run: {reason}; use another, or start a new run from its "
            "weights with ckpt_path."
        )

    @contextmanager
    def _misfits(self) -> Iterator[None]:
        try:
            yield
        except (UserError, MisconfigurationException, SIGTERMException, OutOfMemoryError, OSError):
            raise
        except Exception as error:
            lines = str(error).split("\n\t")  # torch lists each weight that differs
            text = " ".join((lines[1] if len(lines) > 1 else lines[0]).split()) or "no message"
            raise self._misfit(f"{type(error).__name__}, {text}") from error


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def data_changes(datamodule: Any, checkpoint: dict[str, Any]) -> str | None:
    """Return what differs from the data of the checkpoint: numbers of samples and the seed, "train 900 -> 901"."""
    saved = checkpoint.get(type(datamodule).__qualname__)
    if not isinstance(saved, dict) or not isinstance(datamodule, ExactDataModule):
        return None  # another class may save something else under that name
    before, now = saved.get("sizes") or {}, getattr(datamodule, "sizes", None) or {}
    changes = [f"{name} {before[name]} -> {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    if saved.get("seed", datamodule.seed) != datamodule.seed:
        changes.append(f"data.seed {saved['seed']} -> {datamodule.seed}")
    return ", ".join(changes) or None


class RestoreOwnState(Callback):
    """Restore the states of the data module and of the user's callbacks for an evaluation of `checkpoint`.

    As `Trainer.test(ckpt_path=...)` does, after they are set up, so it must be the last callback. Those of Lathe and
    Lightning act in training only, and keep the states that they have.
    """

    def __init__(self, checkpoint: dict[str, Any]) -> None:
        self._checkpoint = checkpoint

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        saved, datamodule = self._checkpoint, trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        changed = data_changes(datamodule, saved)
        if changed is not None and stage != "fit":
            rank_zero_warn(
                f"The data are not those that this checkpoint was trained with: {changed}. Where splits are cut out of "
                "one set, samples that were trained on may be in another split now."
            )
        if datamodule is not None and type(datamodule).__qualname__ in saved:
            datamodule.load_state_dict(saved[type(datamodule).__qualname__])
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # a connector sets it
        own = [callback for callback in callbacks if is_users(callback)]
        for callback in own:
            callback.on_load_checkpoint(trainer, pl_module, saved)
        for callback in own:
            state = saved.get("callbacks", {}).get(callback.state_key)
            if state:
                callback.load_state_dict(deepcopy(state))
