"""Lightning's loop of validation and test, likewise."""

from typing import Any

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lathe.tasks.loops.batches import Batches
from lathe.tasks.loops.fit import call_train_overrides


class EvaluationLoop(_EvaluationLoop):
    """Lightning's loop of validation and test, likewise."""

    _batches: "Batches | None" = None

    def on_run_start(self) -> None:
        super().on_run_start()
        trainer: Any = self.trainer
        several = self._is_sequential and self.num_dataloaders > 1
        lean = type(self._data_fetcher) is _PrefetchDataFetcher and type(trainer.profiler) is PassThroughProfiler
        self._batches = None
        if lean and not several and trainer.fit_loop.epoch_loop.steps_per_call != 1:
            split = "test" if trainer.testing else "validation"
            names = (f"on_{split}_batch_start", f"on_{split}_batch_end")
            self._batches = Batches(trainer, self._results, names, f"{split}_step")

    def _on_evaluation_model_train(self) -> None:
        super()._on_evaluation_model_train()
        call_train_overrides(self.trainer.lightning_module)

    def _evaluation_step(self, batch: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: Any) -> None:
        batches = self._batches
        if batches is None or dataloader_idx:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        progress, (start, end) = self.batch_progress, batches.hooks
        batch = batches.moved(batch)
        progress.increment_ready()
        batches.begin(batch)
        batches.call(start, batch, batch_idx)
        progress.increment_started()
        module = batches.module
        module.__dict__["_current_fx_name"] = batches.step_name
        step = getattr(batches.strategy, batches.step_name)
        output = step(batch, batch_idx) if batches.takes_index else step(batch)
        module.__dict__["_current_fx_name"] = None
        progress.increment_processed()
        batches.call(end, output, batch, batch_idx)
        logged = batches.end()
        progress.increment_completed()
        if not self.trainer.sanity_checking:
            self._has_run = True
            if logged:
                batches.connector.update_eval_step_metrics(self._seen_batches_per_dataloader[dataloader_idx])
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        if not progress.is_last_batch and self.trainer.received_sigterm:
            raise SIGTERMException
