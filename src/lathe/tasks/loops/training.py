"""Lightning's epoch loop over steps of our own."""

from functools import cached_property
from typing import Any

from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.errors import require
from lathe.tasks.loops.fit import forget_early_stop
from lathe.tasks.loops.lengths import out_of_reach
from lathe.tasks.loops.plateau import Plateaus
from lathe.tasks.loops.quick import Steps
from lathe.tasks.loops.window import Window


class StepLoop(_TrainingEpochLoop):
    """Lightning's epoch loop, which returns to Lightning after `steps_per_call` batches at most: None is as many as
    there are until something is due, 1 takes all of Lightning's own steps.
    """

    steps_per_call: int | None = None
    _steps: "Steps | None" = None
    _told = False
    window: Window | None = None

    @cached_property
    def plateaus(self) -> Plateaus:
        """Steps of schedulers that wait for a metric."""
        return Plateaus(self)

    @property
    def _is_training_done(self) -> bool:
        """Also where a stop is due: with a signal in the same step, Lightning would leave before the epoch is ended,
        and a continued run would not know of the stop.
        """
        trainer = self.trainer
        return super()._is_training_done or bool(trainer.should_stop and trainer.fit_loop._can_stop_early)

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        if not self._told and self.trainer.lightning_module.automatic_optimization:
            for sentence in out_of_reach(self.trainer):
                rank_zero_warn(sentence)
        self._told = True
        self.window = Window.needed(self)
        self._steps = None if self.steps_per_call == 1 else Steps.found(self, data_fetcher)
        require(
            self._steps is not None or "whole_step" not in vars(self.trainer.lightning_module),
            "compile.scope=step: this run makes its steps in Lightning's way (trainer.steps_per_call=1, a profiler, "
            "several loaders at once, or a scheduler that waits at each step): leave that out, or use "
            "compile.scope=net.",
        )

    def advance(self, data_fetcher: _DataFetcher) -> None:
        """Trains on the batches up to the next place at which Lightning has something to do.

        Raises:
            StopIteration: there is none left, or the module skips the rest of the epoch.
        """
        steps = self._steps
        if not self._ends_again(data_fetcher):
            self.plateaus.settle()
        if steps is None:
            super().advance(data_fetcher)
            return
        resumed = self._restarting or self._loaded_from_state_dict or self._resuming_from_checkpoint
        if self._restarting and self._should_check_val_fx(data_fetcher):  # the checkpoint is one of a validation
            if self.val_loop.restarted_mid_evaluation:
                return
            if self.restarted_on_last:
                self._skip_next_val = True
                return
            self.val_loop.increment_progress_to_evaluation_end()
        self.val_loop.restarting = False
        left = 1 if resumed else self._batches_left()
        while True:
            left -= steps.quick(left - 1)
            if not steps.stopped:
                steps.step()
                left -= 1
            if left <= 0 or self._due(data_fetcher):
                return

    def _ends_again(self, data_fetcher: _DataFetcher) -> bool:
        """Whether the batch that a checkpoint was written behind is ended once more, and none is trained on."""
        again = self.val_loop.restarted_mid_evaluation or self.restarted_on_last
        return bool(self._restarting and again and self._should_check_val_fx(data_fetcher))

    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        super().on_advance_end(data_fetcher)
        forget_early_stop(self.trainer.fit_loop)
        if self.trainer.fit_loop._restarting and self.plateaus.known():
            self.trainer.fit_loop._restarting = False  # with which Lightning steps no plateau at the epoch's end

    def _update_learning_rates(self, interval: str, update_plateau_schedulers: bool) -> None:
        super()._update_learning_rates(interval, update_plateau_schedulers)
        if update_plateau_schedulers:
            self.plateaus.stepped(interval)

    def _get_monitor_value(self, key: str) -> Any:
        return self.plateaus.value(key)

    def on_save_checkpoint(self) -> dict[str, Any]:
        state: dict[str, Any] = super().on_save_checkpoint()
        waiting = self.plateaus.state()
        return state if waiting is None else {**state, "plateaus": waiting}

    def on_load_checkpoint(self, state_dict: dict[str, Any]) -> None:
        super().on_load_checkpoint(state_dict)
        self.plateaus.restore(state_dict.get("plateaus"))

    def _batches_left(self) -> float:
        """Until the next validation within the epoch, or return to Lightning."""
        trainer: Any = self.trainer
        most = self.steps_per_call or float("inf")
        if not self._should_check_val_epoch():
            return most
        every = trainer.val_check_batch
        if every == float("inf"):
            every = trainer.limit_train_batches if isinstance(trainer.limit_train_batches, int) else float("inf")
        if trainer._val_check_time_interval is not None:
            return 1
        if every in (None, float("inf")):
            return most
        done = self.total_batch_idx if trainer.check_val_every_n_epoch is None else self.batch_idx
        return min(most, every - (done + 1) % every)

    def _due(self, data_fetcher: _DataFetcher) -> bool:
        """Whether Lightning has to look at the batch that has just ended."""
        trainer = self.trainer
        return (
            data_fetcher.done
            or trainer.should_stop
            or trainer._signal_connector.received_sigterm
            or 0 <= self.max_steps <= self.global_step
        )
