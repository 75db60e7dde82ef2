"""Lightning's Trainer with loops of our own: several optimizer steps per call, exact logging and exact resume.

`EpochLoop.advance` decides who makes the next optimizer steps:

| code | steps |
|---|---|
| `MultiStep._run_group` | those that no hook needs, in a run with a plain step (`MultiStep.create`) |
| Lightning, through `Optimization.run` | all others, such as the last one before a validation |
| `strategies.WholeStep` | compile.scope=step: both call it for forward, backward, clipping and update |

The first two give equal weights, to the bit. A strategy or precision that changes the step (pipeline, DeepSpeed,
16-mixed) does so inside Lightning's.
"""

from math import inf
from typing import Any, Literal

import lightning.pytorch
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loops import _FitLoop, _Loop
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lathe.errors import UserError, require
from lathe.trainer.log_connector import LogConnector, LoggedResults
from lathe.trainer.multi_step import MultiStep, has_plain_step, ranks_agree_on_stops

# settings of the Trainer that a callback may change for the rest of the run
SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "limit_train_batches",
    "limit_val_batches",
    "log_every_n_steps",
)


class Trainer(lightning.pytorch.Trainer):
    """Lightning's Trainer with less overhead per step, `self.log` at optimizer steps, and exact resume of both.

    It takes any LightningModule and gives the weights of Lightning's own loop, bit for bit.

    Args:
        steps_per_call: batches between two returns to Lightning's loop; None returns when Lightning has something to
            do, such as a validation; 1 leaves every step to Lightning.
        prefetch_to_device: make the next batch while a step computes (`lathe.data.transfer`).
        args, kwargs: as Lightning's Trainer takes them.
    """

    def __init__(
        self,
        *args: Any,
        steps_per_call: int | None = None,
        prefetch_to_device: bool | Literal["auto"] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.prefetch_to_device = prefetch_to_device
        self._logger_connector = LogConnector(self)
        fit, test = self.fit_loop, self.test_loop  # as Lightning has made them of the arguments
        self.fit_loop = FitLoop(self, min_epochs=fit.min_epochs, max_epochs=fit.max_epochs)
        self.fit_loop.epoch_loop = EpochLoop(self, fit.min_steps, fit.max_steps, steps_per_call)
        self.validate_loop = EvaluationLoop(
            self, TrainerFn.VALIDATING, RunningStage.VALIDATING, inference_mode=test.inference_mode
        )
        self.test_loop = EvaluationLoop(
            self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=test.inference_mode
        )


class FitLoop(_FitLoop):
    """Lightning's loop over epochs, with two corrections for exact resume.

    - With `trainer.max_steps`, Lightning 2.6 takes a checkpoint of an epoch's end for one inside the epoch, trains on a
      batch of the next epoch and counts the epoch twice.
    - Checkpoints also hold what callbacks changed since the start: settings of the Trainer, `requires_grad` of
      parameters and the mode of modules.
    """

    epoch_loop: "EpochLoop"
    _at_start: dict[str, dict[str, Any]] | None = None
    _changes: dict[str, dict[str, Any]] | None = None

    @property
    def restarting(self) -> bool:
        """Return whether the run resumes inside an epoch."""
        return self._restarting

    @restarting.setter
    def restarting(self, restarting: bool) -> None:
        current: Any = self.epoch_progress.current
        parents: Any = _Loop.restarting
        parents.fset(self, restarting and not current.ready == current.started == current.processed)

    def on_run_start(self) -> None:
        super().on_run_start()
        module, loop = self.trainer.lightning_module, self.epoch_loop
        call_train_overrides(module)
        loop.plateaus = None
        self._at_start = self._state()
        changes, self._changes = self._changes or {}, None
        for name, value in changes.get("trainer", {}).items():
            setattr(self.trainer, name, value)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(changes.get("requires_grad", {}).get(name, parameter.requires_grad))
        for name, part in module.named_modules():
            part.training = changes.get("training", {}).get(name, part.training)
        if module.automatic_optimization and any(
            config.reduce_on_plateau for config in self.trainer.lr_scheduler_configs
        ):
            from lathe.trainer.schedule_resume import PlateauResume  # for a user's LightningModule

            loop.plateaus = PlateauResume(loop, loop.plateau_state)
        loop.plateau_state = None

    def advance(self) -> None:
        """Train on an epoch; ask a loader without a batch again, as some reset only when read beyond their end."""
        super().advance()
        seen = self.epoch_loop.batch_progress.current
        if seen.ready == 0:
            super().advance()
        if seen.ready == 0:
            fix = "Return an object that starts again at each iter()." if self.trainer.current_epoch else "Is it empty?"
            raise UserError(f"data: train_dataloader has no batch in epoch {self.trainer.current_epoch + 1}. {fix}")

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.forget_early_stop()

    def forget_early_stop(self) -> None:
        """Let EarlyStopping decide again where `min_epochs` or `min_steps` did not allow it to stop the run."""
        trainer = self.trainer
        if trainer.should_stop and not self._can_stop_early and trainer.early_stopping_callbacks:
            rank_zero_info("Training continues until trainer.min_epochs and trainer.min_steps.")
            trainer.should_stop = False

    def on_save_checkpoint(self) -> dict[str, Any]:
        state = super().on_save_checkpoint()
        if self._at_start is not None:
            now = self._state()
            changes = {
                kind: {name: value for name, value in now[kind].items() if before.get(name, value) != value}
                for kind, before in self._at_start.items()
            }
            if any(changes.values()):
                state["changes"] = changes
        return state

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self._changes = state_dict.get("changes")

    def _state(self) -> dict[str, dict[str, Any]]:
        trainer, module = self.trainer, self.trainer.lightning_module
        training = {name: part.training for name, part in module.named_modules()}
        if trainer.validating:  # Lightning restores these modes afterwards
            training.update(self.epoch_loop.val_loop._module_mode.mode)
        return {
            "trainer": {
                **{name: getattr(trainer, name) for name in SETTINGS},
                "should_stop": bool(trainer.should_stop and not self._can_stop_early),  # else the run is at its end
            },
            "requires_grad": {name: parameter.requires_grad for name, parameter in module.named_parameters()},
            "training": training,
        }


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over batches, which may make groups of steps (`MultiStep`) before each step of its own."""

    def __init__(
        self, trainer: Any, min_steps: int | None = None, max_steps: int = -1, steps_per_call: int | None = None
    ) -> None:
        super().__init__(trainer, min_steps, max_steps)
        self.steps_per_call = steps_per_call
        self.window: Any = None  # an `AccumulationWindow`
        self.plateaus: Any = None  # a `PlateauResume`
        self.plateau_state: dict[str, Any] | None = None  # of a checkpoint
        self.automatic_optimization = Optimization(trainer)
        self.val_loop = EvaluationLoop(
            trainer, TrainerFn.FITTING, RunningStage.VALIDATING, verbose=False, inference_mode=False
        )
        self._results = LoggedResults(training=True)
        self._steps: MultiStep | None = None
        self._warned = False

    @property
    def in_batch(self) -> bool:
        """Return whether a batch has begun whose step is not done."""
        batches: Any = self.batch_progress.current
        return bool(batches.ready > batches.processed)

    @property
    def _batches_that_stepped(self) -> int:
        """Return the step for loggers: the optimizer's, of the batch under way or else the last one."""
        return self.global_step + int(self.in_batch)

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        """Ignore Lightning's own count."""

    @property
    def _is_training_done(self) -> bool:
        """Also True at a stop: after a signal in the same step, Lightning would leave before the epoch is ended, and a
        resumed run would not know of the stop.
        """
        trainer = self.trainer
        return super()._is_training_done or bool(trainer.should_stop and trainer.fit_loop._can_stop_early)

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        trainer: Any = self.trainer
        accumulate, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if not self._warned and accumulate > batches > 0 and trainer.lightning_module.automatic_optimization:
            rank_zero_warn(
                f"trainer.accumulate_grad_batches={accumulate}: an epoch has {batches} batches, and its last one makes "
                f"a step, so steps have at most {batches}."
            )
        self._warned = True
        module = trainer.lightning_module
        compiled = vars(module).get("whole_step")
        if compiled is not None:
            require(
                has_plain_step(trainer) and accumulate == 1,
                "compile.scope=step: the strategy, precision or task has its own step, which a compiled step does not "
                "call. Use compile.scope=net.",
            )
            compiled.bind(trainer)
        self.window = None
        if hasattr(module, "step_counts"):
            module.step_counts = None
        if module.automatic_optimization and (accumulate > 1 or trainer.world_size > 1):
            from lathe.trainer.accumulation import AccumulationWindow

            self.window = AccumulationWindow.create(self)
        self._steps = MultiStep.create(self, data_fetcher)

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Make groups of steps where no hook needs them, then the step after which Lightning has something to do."""
        resumed = self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint
        repeats = self.val_loop.restarted_mid_evaluation or self.restarted_on_last  # only ends the last batch again
        if self.plateaus is not None and not (self._restarting and repeats and self._should_check_val_fx(data_fetcher)):
            self.plateaus.step_owed()
        if self._steps is not None and not resumed:
            self._steps.run_groups(self._batches_left() - 1)
            if self._steps.stopped:
                return
        super().advance(data_fetcher)

    def _broadcast_sigterm_tensor(self) -> None:
        if not ranks_agree_on_stops(self.trainer):
            super()._broadcast_sigterm_tensor()

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        fit_loop: Any = self.trainer.fit_loop
        fit_loop.forget_early_stop()
        if fit_loop._restarting and self.plateaus is not None and self.plateaus.can_step_at_epoch_end():
            fit_loop._restarting = False  # while it is True, Lightning steps no plateau at the epoch's end

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        super()._update_learning_rates(interval, update_plateau_schedulers)
        if update_plateau_schedulers and self.plateaus is not None:
            self.plateaus.note_stepped(interval)

    def _get_monitor_value(self, key: str) -> Any:
        return super()._get_monitor_value(key) if self.plateaus is None else self.plateaus.value(key)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        return state if self.plateaus is None else {**state, "plateaus": self.plateaus.state()}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.plateau_state = state_dict.get("plateaus")

    def _batches_left(self) -> float:
        """Count the batches to the next validation inside the epoch, or to the next return to Lightning."""
        trainer: Any = self.trainer
        most = self.steps_per_call or inf
        if not self._should_check_val_epoch():
            return most
        interval = trainer.val_check_batch
        if interval == inf:
            interval = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else inf
        if trainer._val_check_time_interval is not None:
            return 1
        if interval in (None, inf):
            return most
        done = self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
        return min(most, interval - (done + 1) % interval)


class Optimization(_AutomaticOptimization):
    """Lightning's optimization, with the loss weighted by `AccumulationWindow` and the compiled step of a task."""

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        module, step = self.trainer.lightning_module, self.optim_progress.optimizer.step
        compiled = vars(module).get("whole_step")
        if compiled is None:
            return super().run(optimizer, batch_idx, kwargs)
        if not self.trainer.global_step:  # the optimizer makes its state in an eager step
            with torch.compiler.set_stance("force_eager"):
                return super().run(optimizer, batch_idx, kwargs)
        step.increment_ready()
        outputs = {"loss": compiled(kwargs["batch"])}
        self.optim_progress.optimizer.zero_grad.increment_by(1)
        step.increment_completed()
        return outputs

    def _training_step(self, kwargs: Any) -> ClosureResult:
        result: ClosureResult = super()._training_step(kwargs)
        window = self.trainer.fit_loop.epoch_loop.window  # type: ignore[attr-defined]
        if window is not None:
            result.closure_loss = window.weigh(result.closure_loss, kwargs["batch"])
        return result


class EvaluationLoop(_EvaluationLoop):
    """Lightning's loop over validation and test batches, with our table of logged values."""

    def __init__(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(trainer, *args, **kwargs)
        self._results = LoggedResults(training=False)

    def _on_evaluation_model_train(self) -> None:
        super()._on_evaluation_model_train()
        call_train_overrides(self.trainer.lightning_module)


def call_train_overrides(module: LightningModule) -> None:
    """Call `train()` of modules that override it, as a loop in plain torch does; Lightning only sets `training`.

    A module in evaluation mode stays in it.
    """
    parts = list(module.modules())
    evaluating = [part for part in parts if not part.training]
    for part in parts:
        if part.training and type(part).train is not nn.Module.train:
            part.train()
    for part in evaluating:
        part.training = False
