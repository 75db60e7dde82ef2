"""Lightning's Trainer with Lathe's loops."""

from typing import Any, Literal

import lightning.pytorch
from lightning.pytorch.trainer.states import RunningStage, TrainerFn

from lathe.trainer.log_connector import LogConnector
from lathe.trainer.loops import EpochLoop, EvaluationLoop, FitLoop


class Trainer(lightning.pytorch.Trainer):
    """Lightning's Trainer with less overhead per step, `self.log` at optimizer steps, and exact resume of both.

    It takes any LightningModule and gives the weights of Lightning's own loop, bit for bit.

    Args:
        steps_per_call: batches between two returns to Lightning's loop; None returns when Lightning has something to
            do, such as a validation; 1 leaves every step to Lightning.
        prefetch_to_device: make the next batch while a step computes (`lathe.data.prefetch`).
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
        self.fit_loop.epoch_loop = EpochLoop(
            self, min_steps=fit.min_steps, max_steps=fit.max_steps, steps_per_call=steps_per_call
        )
        self.validate_loop = EvaluationLoop(
            self, TrainerFn.VALIDATING, RunningStage.VALIDATING, inference_mode=test.inference_mode
        )
        self.test_loop = EvaluationLoop(
            self, TrainerFn.TESTING, RunningStage.TESTING, inference_mode=test.inference_mode
        )
