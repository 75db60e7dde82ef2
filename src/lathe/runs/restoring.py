"""Restoring a checkpoint into a run that it fits, or a sentence with the part that does not fit.

A checkpoint of the run's own has an outline (`callbacks.outline`), which is compared when the file is read. One of
another run, or of plain Lightning, may have other data, optimizers or schedulers, which Lightning 2.6 partly skips.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import OutOfMemoryError, Tensor

from lathe.errors import UserError
from lathe.runs.restored import other_seed, other_sizes
from lathe.tasks.checkpoint_types import check_checkpoint
from lathe.trainer.schedule_resume import replan

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
        with self._told("callbacks"):
            super().restore_callbacks()

    def restore_loops(self) -> None:
        with self._told("loops"):
            super().restore_loops()

    def restore_optimizers(self) -> None:
        if self._loaded_checkpoint:
            states = self._part("optimizer_states")
            fresh = self.trainer.optimizers
            self._count("optimizer_states", len(states), len(fresh))
            with self._told("optimizer_states"):
                for number, (optimizer, state) in enumerate(zip(fresh, states, strict=True)):
                    self._compare_optimizer(f"optimizer_states.{number}", optimizer.state_dict(), state)
                    self._tell_others(optimizer.state_dict(), state)
        with self._told("optimizer_states"):
            super().restore_optimizers()

    def restore_optimizers_and_schedulers(self) -> None:
        if self._loaded_checkpoint:
            if self.trainer.strategy.lightning_restore_optimizer:
                self._part("optimizer_states")
            self._part("lr_schedulers")
        super().restore_optimizers_and_schedulers()

    def restore_lr_schedulers(self) -> None:
        configs = self.trainer.lr_scheduler_configs
        made = [config.scheduler.state_dict() for config in configs]
        if self._loaded_checkpoint:
            states = self._part("lr_schedulers")
            self._count("lr_schedulers", len(states), len(configs))
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

    def _part(self, name: str) -> Any:
        if name not in self._loaded_checkpoint:
            raise self._refusal(name, "it is not there")
        return self._loaded_checkpoint[name]

    def _count(self, part: str, found: int, expected: int) -> None:
        if found != expected:
            raise self._refusal(part, f"there are {found} of them, and this run has {expected}")

    def _compare_optimizer(self, part: str, fresh: dict[str, Any], saved: dict[str, Any]) -> None:
        groups = saved["param_groups"]
        owns = fresh.get("param_groups", groups)  # DeepSpeed's optimizers keep theirs inside
        self._count(f"{part}.param_groups", len(groups), len(owns))
        for number, (group, own) in enumerate(zip(groups, owns, strict=True)):
            here = f"{part}.param_groups.{number}"
            lost = next((name for name in NUMBERS if name in own and name not in group), None)
            if lost is not None:
                raise self._refusal(here, f"`{lost}` is not there")
            if "name" in own and group.setdefault("name", own["name"]) != own["name"]:  # optimizers may go by it
                raise self._refusal(f"{here}.name", f"it is {group['name']!a}, and this run has {own['name']!a} there")

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
