"""What Lightning puts back from a checkpoint, held against what the run has.

Lightning 2.6 passes over a part that is not there, takes numbers as they come, and fails with a traceback where one has
another form.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import OutOfMemoryError, Tensor

from lathe.errors import UserError
from lathe.runs.restored import other_seed, other_sizes
from lathe.tasks.base import Task
from lathe.tasks.plain import check_checkpoint
from lathe.trainer.schedule_resume import replan

COUNTS = ("ready", "started", "processed", "completed")
# of a group of parameters, in every version of torch
NUMBERS = ("params", "lr", "weight_decay", "momentum", "dampening", "nesterov", "betas", "eps")

# what is no option, or decides how a step is computed and not which
UNTOLD = ("params", "name", "fused", "foreach", "capturable", "differentiable")


class Restoring(_CheckpointConnector):
    """Puts back a checkpoint part by part.

    Raises:
        UserError: a part is not there, or is not what this run has in its place; the sentence names file and part. Or
            one that is to be written holds what could not be read again.
    """

    def dump_checkpoint(self, weights_only: bool | None = None) -> dict[str, Any]:
        # every rank comes by here with the whole of it, whoever writes and however: all refuse, and none waits
        checkpoint: dict[str, Any] = super().dump_checkpoint(weights_only)
        check_checkpoint(checkpoint, mappings=isinstance(self.trainer.strategy, ModelParallelStrategy))
        return checkpoint

    def resume_start(self, *args: Any, **kwargs: Any) -> None:
        # what Lightning makes of a checkpoint of its earlier versions
        with self._told("pytorch-lightning_version"):
            super().resume_start(*args, **kwargs)

    def restore_datamodule(self) -> None:
        datamodule = self.trainer.datamodule  # type: ignore[attr-defined]  # a connector sets it
        changed = other_sizes(datamodule, self._loaded_checkpoint)
        if changed is not None and self._fits() and self._own():
            raise UserError(
                f"checkpoint={self._ckpt_path}: the data have changed since the run began, samples of {changed}: put "
                "them back as they were, or start a new run from its weights with ckpt_path."
            )
        seed = other_seed(datamodule, self._loaded_checkpoint)
        if seed is not None and self._fits() and self._own():
            raise UserError(
                f"checkpoint={self._ckpt_path} is another run's: it was written with data.seed={seed}, this run has "
                f"{datamodule.seed}: put its own back, or start a new run from its weights with ckpt_path."
            )
        with self._told("state of the data"):
            super().restore_datamodule()

    def restore_model(self) -> None:
        if self._fits():
            task = self._part("task", dict) if self._own() else self._loaded_checkpoint.get("task", {})
            self._compare("task", {"sums": {}, "log": [], "logged_step": 0}, task)
            if task and isinstance(self.trainer.lightning_module, Task):
                self._compare("task", {"sums": {}, "logged_step": 0}, task, whole=True)
            for name, rows in task.get("sums", {}).items():
                self._compare(f"task.sums.{name}", [], rows)
            held = task.get("held", [])  # which earlier versions do not write
            self._compare("task.held", [], held)
            lost = next((name for name in held if name not in task["sums"]), None)
            if lost is not None:
                raise self._refusal(f"task.sums.{lost}", "it is not there")
            for number, log in enumerate(task.get("log", [])):
                self._compare(f"task.log.{number}", {"entries": {}, "metrics": {}}, log, whole=True)
                written = log.get("written", [-1, {}])  # which earlier versions do not write
                self._compare(f"task.log.{number}.written", [], written)
                self._compare(f"task.log.{number}.written", {0: -1, 1: {}}, dict(enumerate(written)), whole=True)
        try:
            with self._told("state_dict"):
                super().restore_model()
        except UserError as error:  # torch lists all that differ
            first = self._other_shape() if isinstance(error.__cause__, RuntimeError) else None
            if first is None:
                raise
            raise self._refusal("state_dict", first) from error.__cause__

    def _other_shape(self) -> str | None:
        """The first weight whose shape in the file is another than in the net."""
        own = self.trainer.lightning_module.state_dict()
        for name, value in self._loaded_checkpoint.get("state_dict", {}).items():
            if isinstance(value, Tensor) and name in own and value.shape != own[name].shape:
                return f"{name} is {list(value.shape)} there and {list(own[name].shape)} here"
        return None

    def restore_callbacks(self) -> None:
        if self._fits():
            saved = self._part("callbacks", dict)
            if self._own() and not self._part("random_state", list):
                raise self._refusal("random_state", "it is empty")
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                # others may not know what their state is like before they are set up
                fresh = callback.state_dict() if isinstance(callback, (Checkpoint, EarlyStopping)) else {}
                self._compare(f"callbacks.{callback.state_key}", fresh, saved.get(callback.state_key, fresh))
        with self._told("callbacks"):
            super().restore_callbacks()

    def restore_loops(self) -> None:
        if not self._fits():
            super().restore_loops()
            return
        loops, loop = self._part("loops", dict), self.trainer.fit_loop
        self._compare("loops", {"fit_loop": {}}, loops, whole=True)
        saved = loops["fit_loop"]
        fresh = {name: {} if name.endswith("state_dict") else value for name, value in loop.state_dict().items()}
        self._compare("loops.fit_loop", fresh, saved, whole=True)
        loaders = saved["state_dict"].get("combined_loader", [])
        self._compare("loops.fit_loop.state_dict.combined_loader", [], loaders)
        for number, position in enumerate(loaders):
            self._compare(f"loops.fit_loop.state_dict.combined_loader.{number}", {}, position)
        with self._told("loops"):
            super().restore_loops()
        found = {"global_step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
        for name, value in found.items():
            if self._loaded_checkpoint.get(name) != value:
                raise self._refusal(name, f"it is {self._loaded_checkpoint.get(name)!a}, and `loops` say {value}")

    def restore_optimizers(self) -> None:
        if self._loaded_checkpoint:
            states = self._part("optimizer_states", list)
            fresh = self.trainer.optimizers
            self._count("optimizer_states", len(states), len(fresh))
            for number, (optimizer, state) in enumerate(zip(fresh, states, strict=True)):
                self._compare_optimizer(f"optimizer_states.{number}", optimizer.state_dict(), state)
                self._tell_others(optimizer.state_dict(), state)
        with self._told("optimizer_states"):
            super().restore_optimizers()

    def restore_optimizers_and_schedulers(self) -> None:
        if self._loaded_checkpoint:
            if self.trainer.strategy.lightning_restore_optimizer:
                self._part("optimizer_states", list)
            self._part("lr_schedulers", list)
        super().restore_optimizers_and_schedulers()

    def restore_lr_schedulers(self) -> None:
        configs = self.trainer.lr_scheduler_configs
        made = [config.scheduler.state_dict() for config in configs]
        if self._loaded_checkpoint:
            states = self._part("lr_schedulers", list)
            self._count("lr_schedulers", len(states), len(configs))
            for number, (fresh, state) in enumerate(zip(made, states, strict=True)):
                self._compare(f"lr_schedulers.{number}", fresh, state)
                # other versions of torch keep other things besides
                counts = {name: fresh[name] for name in ("last_epoch",) if name in fresh}
                self._compare(f"lr_schedulers.{number}", counts, state, whole=True)
        with self._told("lr_schedulers"):
            super().restore_lr_schedulers()
            changed = [replan(config.scheduler, fresh) for config, fresh in zip(configs, made, strict=True)]
        for config, lengths in zip(configs, changed, strict=True):
            if lengths and self.trainer.is_global_zero:
                name = type(config.scheduler).__name__
                print(f"{name} is planned anew for this run's length: {', '.join(lengths)}.", flush=True)

    def restore_precision_plugin_state(self) -> None:
        with self._told("state of the number format"):
            super().restore_precision_plugin_state()

    def _fits(self) -> bool:
        return bool(self._loaded_checkpoint) and self.trainer.state.fn == TrainerFn.FITTING

    def _own(self) -> bool:
        """Whether it lies in the run's folder, and so is no file of plain Lightning's."""
        return Path(str(self._ckpt_path)).is_relative_to(self.trainer.default_root_dir)

    def _part(self, name: str, kind: type) -> Any:
        if name not in self._loaded_checkpoint:
            raise self._refusal(name, "it is not there")
        found = self._loaded_checkpoint[name]
        if not isinstance(found, kind):
            raise self._refusal(name, f"it is of type {type(found).__name__}")
        return found

    def _count(self, part: str, found: int, expected: int) -> None:
        if found != expected:
            raise self._refusal(part, f"there are {found} of them, and this run has {expected}")

    def _compare(self, part: str, fresh: Any, saved: Any, whole: bool = False) -> None:
        found = misfit(fresh, saved, whole)
        if found is not None:
            raise self._refusal(part, found)

    def _compare_optimizer(self, part: str, fresh: dict[str, Any], saved: Any) -> None:
        self._compare(part, {"state": {}, "param_groups": []}, saved, whole=True)
        groups = saved["param_groups"]
        owns = fresh.get("param_groups", groups)  # DeepSpeed's optimizers keep theirs inside
        self._count(f"{part}.param_groups", len(groups), len(owns))
        for number, (group, own) in enumerate(zip(groups, owns, strict=True)):
            self._compare(f"{part}.param_groups.{number}", own, group)
            if "name" in own and group.setdefault("name", own["name"]) != own["name"]:  # optimizers may go by it
                names = f"it is {group['name']!a}, and this run has {own['name']!a} there"
                raise self._refusal(f"{part}.param_groups.{number}.name", names)
            known = {name: own[name] for name in NUMBERS if name in own}
            self._compare(f"{part}.param_groups.{number}", known, group, whole=True)
        # a fresh optimizer has no state yet: what goes by one name is of one kind
        first: dict[str, Any] = {}
        for key, values in saved["state"].items():
            self._compare(f"{part}.state.{key}", first, values)
            first = {name: value for name, value in values.items() if value is not None} | first

    def _tell_others(self, fresh: dict[str, Any], saved: dict[str, Any]) -> None:
        """Says which of this run's own options of an optimizer a checkpoint of another run takes the place of: its
        configuration says them all the same.
        """
        if self._own():
            return
        pairs = zip(fresh.get("param_groups", ()), saved["param_groups"], strict=False)
        changed: dict[str, str] = {}
        for mine, theirs in pairs:
            for name, value in mine.items():
                start = f"initial_{name}" if f"initial_{name}" in mine and f"initial_{name}" in theirs else name
                told = name not in UNTOLD and not name.startswith("initial_") and name in theirs
                if told and not isinstance(value, Tensor) and _plain(mine[start]) != _plain(theirs[start]):
                    changed.setdefault(name, f"{name}={theirs[start]} (here {mine[start]})")
        if changed:
            rank_zero_warn(
                f"ckpt_mode=trainer takes the optimizer as {self._ckpt_path} has it, and not as config.yaml says: "
                f"{', '.join(changed.values())}. For this run's own options start from its weights, ckpt_mode=weights."
            )

    def _refusal(self, part: str, reason: str) -> UserError:
        return UserError(
            f"checkpoint={self._ckpt_path} does not fit this run in `{part}`: {reason}; go on from another checkpoint, "
            "or start a new run from its weights with ckpt_path."
        )

    @contextmanager
    def _told(self, part: str) -> Iterator[None]:
        try:
            yield
        except (UserError, MisconfigurationException, SIGTERMException, OutOfMemoryError, OSError):
            raise
        except Exception as error:
            said = " ".join(str(error).split()) or "nothing more is known"
            raise self._refusal(part, f"{type(error).__name__}, {said}") from error


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def misfit(fresh: Any, saved: Any, whole: bool = False, at: str = "") -> str | None:
    """In which way `saved` can't take the place of `fresh`: another kind of value, a count of events that is below zero
    or above those that came before it, or, with `whole`, a name that is not there. None if it can.
    """
    if fresh is None or saved is None:
        return None
    where = f"`{at}`" if at else "it"
    kinds = ((int, float), (str,), (Mapping,), (list, tuple), (Tensor,))
    if isinstance(fresh, bool):
        fits = isinstance(saved, bool)
    else:
        fits = any(isinstance(fresh, kind) and isinstance(saved, kind) for kind in kinds)
        fits = fits or (
            isinstance(fresh, float) and isinstance(saved, Tensor)
        )  # what a metric or a schedule made of it
        fits = fits or not isinstance(fresh, (int, float, str, Mapping, list, tuple, Tensor))
    if not fits:
        return f"{where} is of type {type(saved).__name__}, expected {type(fresh).__name__}"
    if not isinstance(fresh, Mapping):
        return None
    for name in fresh:
        below = f"{at}.{name}" if at else str(name)
        if name not in saved:
            if whole:
                return f"`{below}` is not there"
            continue
        found = misfit(fresh[name], saved[name], whole, below)
        if found is not None:
            return found
    counts = [saved[name] for name in COUNTS if name in fresh and name in saved]
    if "ready" in fresh and "completed" in fresh and any(a < b for a, b in zip(counts, [*counts[1:], 0], strict=True)):
        return f"{where} has counts that can't be, {counts}"
    return None
