"""Callbacks of sparse training: RigL and SET, and lottery tickets within one run."""

import copy
import itertools
import math
from typing import Annotated, Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor

from lathe.callbacks.ema import EMA
from lathe.compression.callback import steps_of
from lathe.compression.pruning import rewiring
from lathe.compression.pruning.callback import Masking
from lathe.compression.pruning.masks import Masks, make_masks
from lathe.config.types import Count, OpenShare, PositiveShare, Seed, StepOrShare
from lathe.config.validation import validated
from lathe.errors import UserError, require
from lathe.measure.shards import whole
from lathe.tasks.core import core_of

SECOND_MOMENTS = ("exp_avg_sq", "max_exp_avg_sq")  # of the dense gradient, and so valid while a weight is masked


class RigL(Masking):
    """RigL (Evci et al. 2020, arXiv:1911.11134), or SET with growth="random" (Mocanu et al. 2018).

    From the window's first step a share `sparsity` of the maskable weights is masked, spread over layers by
    `densities`. Every `every_n_steps` optimizer steps until `end`, a share of each layer's weights is dropped by
    magnitude and as many grow where the last step's dense gradient is largest. The share falls from `fraction` to 0
    along half a cosine. Grown weights start at zero, without momentum. A step whose gradient is not finite changes
    nothing.

    Args:
        densities: "erk" keeps small layers denser (Erdos-Renyi-Kernel), "uniform" gives each layer the same sparsity.
        growth: "gradient" (RigL) or "random" (SET), by (seed, step).
        end: share of the window after which the masks are fixed.
        initial: "random" masks, or by "magnitude" of trained weights (`ckpt_path`, a later stage).
    """

    name = "rigl"

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.8,
        densities: Literal["erk", "uniform"] = "erk",
        growth: Literal["gradient", "random"] = "gradient",
        fraction: OpenShare = 0.3,
        every_n_steps: Count = 100,
        end: PositiveShare = 0.75,
        initial: Literal["random", "magnitude"] = "random",
        seed: Seed = 0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sparsity, self.densities, self.growth, self.initial = sparsity, densities, growth, initial
        self.fraction, self.every_n_steps, self.end, self.seed = fraction, every_n_steps, end, seed
        self._gradients: dict[str, Tensor] = {}  # of the last step, with manual optimization

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if pl_module.automatic_optimization or self.growth == "random":
            return

        def keep(*_: Any) -> None:  # a step of the user's may be followed by zero_grad
            if self._due(trainer, steps_of(trainer) + 1):
                found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
                self._gradients |= {name: gradient.clone() for name, gradient in found.items()}

        self._handles += [optimizer.register_step_post_hook(keep) for optimizer in self._optimizers]

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        start, end = self.step_at(trainer, 0.0), self.step_at(trainer, self.end)
        if not self.masks:
            if step >= start:
                self.set_masks(self._first_masks())
                self.clear_state({name: ~mask for name, mask in self.masks.items()})
        elif self._due(trainer, step):
            self._exchange(step, rewiring.cosine_fraction(step - start, end - start, self.fraction))
            self._gradients = {}

    def _due(self, trainer: Trainer, step: int) -> bool:
        start, end = self.step_at(trainer, 0.0), self.step_at(trainer, self.end)
        return start < step < end and (step - start) % self.every_n_steps == 0

    def ready(self, trainer: Trainer) -> bool:
        return bool(self.masks)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.updates < 2:
            rank_zero_warn(
                f"{self.key}.every_n_steps={self.every_n_steps}: no weight was exchanged in {steps_of(trainer)} "
                "steps. Lower it."
            )

    def _first_masks(self) -> Masks:
        shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
        if self.densities == "erk":
            densities = rewiring.erdos_renyi_kernel(shapes, self.sparsity)
        else:
            densities = dict.fromkeys(shapes, 1 - self.sparsity)
        if self.initial == "random":
            return rewiring.random_masks(shapes, densities, self.seed)
        sizes = {name: whole(parameter).abs() for name, parameter in self.parameters.items()}
        return rewiring.largest_masks(sizes, densities)

    def _exchange(self, step: int, fraction: float) -> None:
        growths = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if self.growth == "random":
                growth = rewiring.random_scores(parameter.shape, self.seed, step, index)
            elif (gradient := self._gradients.get(name, parameter.grad)) is None:
                raise UserError(
                    f"{self.key}.growth=gradient: {name} has no gradient after a step: it is frozen, or the strategy "
                    "keeps none. Name it in exclude, or use growth=random."
                )
            else:
                growth = whole(gradient).abs().float()
            if not math.isfinite(growth.sum().item()):
                return
            growths[name] = growth.to(parameter.device)
        before = self.masks
        self.set_masks(
            {
                name: rewiring.exchange(whole(self.parameters[name]), before[name], growth, fraction)
                for name, growth in growths.items()
            }
        )
        # grown weights start without momentum
        self.clear_state({name: self.masks[name] & ~before[name] for name in before}, keep=SECOND_MOMENTS)


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
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.sparsities = rewiring.round_sparsities(sparsity, rounds)
        self.rounds, self.rewind, self.scope = rounds, rewind, scope
        self.round = 0  # the current round
        # the state to rewind to, on the CPU; empty if not reached or no longer needed
        self.saved: dict[str, Tensor] = {}
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
        self._schedules = []
        for scheduler in (config.scheduler for config in trainer.lr_scheduler_configs):
            rates = [group["lr"] for group in scheduler.optimizer.param_groups]
            self._schedules.append((scheduler, copy.deepcopy(scheduler.state_dict()), rates))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            steps = [self.begins(trainer, number) for number in range(self.rounds + 1)]
            fit = all(earlier < later for earlier, later in itertools.pairwise(steps))
            require(
                fit and self.rewind_step(trainer) < steps[1],
                f"{self.key}.rounds={self.rounds} with rewind={self.rewind} do not fit into {steps[-1] - steps[0]} "
                "optimizer steps: train longer.",
            )
        super().on_train_start(trainer, pl_module)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if self.round == 0 and not self.saved and step >= self.rewind_step(trainer):
            self.saved = rewiring.copy_state(core_of(pl_module))
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
                f"{self.key}: training ended in round {self.round + 1} of {self.rounds}, at sparsity "
                f"{self.sparsities[self.round]:.3f} instead of {self.sparsities[-1]:.3f}: let it run to its end."
            )

    def _begin(self, trainer: Trainer, pl_module: LightningModule, number: int) -> None:
        """Prune the trained weights, and start round `number` from the saved ones."""
        scores = {name: whole(parameter).abs() for name, parameter in self.parameters.items()}
        masks = make_masks(scores, self.sparsities[number], scope=self.scope, previous=self.masks)
        self.round = number
        rewiring.rewind(core_of(pl_module), self.saved)
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
