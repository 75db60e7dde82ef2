"""Lottery tickets within one run: train, prune, rewind, and train again."""

import copy
import itertools
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor

from lathe.callbacks.ema import EMA
from lathe.callbacks.methods.masking import Masking
from lathe.compression.masks.lottery import copy_state, rewind, round_sparsities
from lathe.compression.masks.masks import make_masks
from lathe.config.types import LayerTypes, Name, OpenShare, SomeNames, StepOrShare
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.measure.processes import processes
from lathe.measure.shards import is_sharded, local, part_of, whole


class Lottery(Masking):
    """Iterative magnitude pruning with rewinding.

    Frankle and Carbin 2019, arXiv:1803.03635; Frankle et al. 2020, arXiv:1912.05671. The window consists of `rounds`
    trainings of equal length. The first is dense; before each other one the smallest remaining weights are masked, and
    weights and BatchNorm statistics are reset to those `rewind` steps into the first round. Optimizer state and EMA are
    reset, and the learning-rate schedule, made for the length of a round, restarts, outside the window
    (`compression.stages`) too.

    Args:
        sparsity: share of zeros among the maskable weights in the last round; earlier rounds approach it geometrically.
        rounds: trainings, including the dense one: the run should be that many times as long as a plain one.
        rewind: a share of the first round below 1, or optimizer steps from 1 on; 0 is the initial net.
        scope: "global" compares all layers' weights, "layer" those of each.
    """

    name = "lottery"

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.8,
        rounds: Annotated[int, Field(ge=2)] = 4,
        rewind: StepOrShare = 0.05,
        scope: Literal["global", "layer"] = "global",
        layers: SomeNames | None = None,
        exclude: list[Name] | None = None,
        types: LayerTypes | None = None,
        head: bool = False,
    ) -> None:
        super().__init__(layers, exclude, types, head)
        self.sparsities = round_sparsities(sparsity, rounds)
        self.rounds, self.rewind, self.scope = rounds, rewind, scope
        self.round = 0  # the current round
        self.saved: dict[
            str, Tensor
        ] = {}  # the state to rewind to, on the CPU; empty if not reached or no longer needed
        self._schedules: list[tuple[Any, dict[str, Any], list[float]]] = []

    def begins(self, trainer: Trainer, number: int) -> int:
        """Return the optimizer step after which round `number` begins, also outside the window."""
        return self.step_at(trainer, number / self.rounds)

    def rewind_step(self, trainer: Trainer) -> int:
        """Return the optimizer step whose weights are saved."""
        length = self.begins(trainer, 1) - self.begins(trainer, 0)
        return self.begins(trainer, 0) + (round(self.rewind * length) if self.rewind < 1 else int(self.rewind))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            start, end = self.window
            pl_module.schedule_repeats = round(self.rounds / (end - start))  # type: ignore[assignment]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # initial states: those of a checkpoint are restored later
        self._schedules = [
            (
                scheduler,
                copy.deepcopy(scheduler.state_dict()),
                [group["lr"] for group in scheduler.optimizer.param_groups],
            )
            for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs)
        ]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            self._check_steps(trainer)
        super().on_train_start(trainer, pl_module)

    def _check_steps(self, trainer: Trainer) -> None:
        steps = [self.begins(trainer, number) for number in range(self.rounds + 1)]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise UserError(
                f"compression.lottery.rounds={self.rounds} do not fit into {steps[-1] - steps[0]} optimizer steps: "
                "train longer."
            )
        if self.rewind_step(trainer) >= steps[1]:
            raise UserError(
                f"compression.lottery.rewind={self.rewind} is not below a round's {steps[1] - steps[0]} optimizer "
                "steps: lower it."
            )

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        net = pl_module.get_submodule("net")
        if self.round == 0 and not self.saved and step >= self.rewind_step(trainer):
            self.saved = copy_state(net, _whole)
        due = [number for number in range(1, self.rounds) if step >= self.begins(trainer, number)]
        if due and due[-1] > self.round:
            self._begin(trainer, pl_module, due[-1])
        elif 0 < step < self.total_steps(trainer) and self._starts_outside(trainer, step):
            self._restart_schedules()

    def ready(self, trainer: Trainer) -> bool:
        last = self.rounds - 1
        return self.round == last and trainer.global_step > self.begins(trainer, last)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.round < self.rounds - 1:
            rank_zero_warn(
                f"compression.lottery: training ended in round {self.round + 1} of {self.rounds}, at sparsity "
                f"{self.sparsities[self.round]:.3f} instead of {self.sparsities[-1]:.3f}: let it run to its end."
            )

    def _begin(self, trainer: Trainer, pl_module: LightningModule, number: int) -> None:
        """Prune the trained weights, and start round `number` from the saved ones."""
        scores = {name: _whole(parameter).abs() for name, parameter in self.parameters.items()}
        masks = make_masks(scores, self.sparsities[number], scope=self.scope, previous=self.masks)
        self.round = number
        rewind(pl_module.get_submodule("net"), self.saved, put=_put)
        self.set_masks(masks)
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for average in (callback for callback in trainer.callbacks if isinstance(callback, EMA)):  # type: ignore[attr-defined]
            average.restart()
        self._restart_schedules()
        if number == self.rounds - 1:
            self.saved = {}

    def _starts_outside(self, trainer: Trainer, step: int) -> bool:
        (start, end), total = self.window, self.total_steps(trainer)
        number = round((step / total - start) / (end - start) * self.rounds)
        return not 0 < number < self.rounds and step == self.begins(trainer, number)

    def _restart_schedules(self) -> None:
        for scheduler, state, rates in self._schedules:
            scheduler.load_state_dict(copy.deepcopy(state))
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "round": self.round, "saved": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.round = state_dict["round"]
        self.saved = {name: tensor.clone() for name, tensor in state_dict["saved"].items()}


def _whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, the same on every rank: rank 0's BatchNorm statistics count."""
    value = whole(tensor)
    if not is_sharded(tensor) and processes() > 1:
        value = value.clone()
        torch.distributed.broadcast(value, src=0)
    return value


def _put(tensor: Tensor, value: Tensor) -> None:
    local(tensor).copy_(part_of(value.to(tensor.device), tensor))
