"""Combines data, tensor and pipeline parallelism."""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import nn
from torch.optim import Optimizer

from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.strategies.one_by_one import as_asked_for, step_one_by_one
from lathe.strategies.pipeline.strategy import Pipeline
from lathe.strategies.tensor_plan import check_limits, parallelize, plan_of


class ThreeD(Pipeline):
    """A pipeline of `stages` of `tensor` ranks (by the net's `tensor_plan`), with `data` replicas.

    Ranks count through tensor fastest, then stages, then data: the ranks that communicate most are neighbours
    (Narayanan et al. 2021, arXiv:2104.04473). With `sequence_parallel`, activations between the sharded layers are
    slices of dimension 1, and only a slice is sent from stage to stage.
    """

    name = "3d"
    precisions = ("64-true", "32-true", "bf16-mixed", "bf16-true")

    @validated
    def __init__(
        self,
        data: Count | None = None,
        tensor: Count | None = 1,
        stages: Count | None = 2,
        microbatches: Count | None = None,
        schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe",
        slices: Count = 2,
        sequence_parallel: bool = True,
    ) -> None:
        super().__init__(stages=stages, data=data, microbatches=microbatches, schedule=schedule, slices=slices)
        self._sizes = {"data": data, "tensor": tensor, "stages": stages}
        self._sequence_parallel = sequence_parallel
        self._one_by_one = False

    def check(self, net: nn.Module) -> None:
        super().check(net)
        if self.axes.tensor > 1:
            plan_of(net)
            check_limits(net, self.axes.tensor)

    def _spread(self, net: nn.Module) -> None:
        if self.axes.tensor > 1:
            parallelize(net, self._groups["mesh"]["tensor"], self._sequence_parallel)

    # -- optimizers

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        for optimizer in self.optimizers:
            self._one_by_one = step_one_by_one(optimizer, self.name)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return as_asked_for(state) if self._one_by_one else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            self._one_by_one = step_one_by_one(optimizer, self.name)
