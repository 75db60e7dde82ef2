"""The callback that removes channels, attention heads and hidden units."""

import copy
from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.callbacks.ema import EMA
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.callback import Compression, an_input, first_batches, steps_of
from lathe.compression.channels.removal import (
    Group,
    Options,
    add_penalty,
    describe,
    fading,
    find_groups,
    loss_change,
    positions,
    remove,
    require_packages,
    shares,
    silence,
    sizes,
    skeleton,
)
from lathe.compression.modes import evaluated, reestimate_batchnorm
from lathe.config.types import ChannelBudget, ChannelImportance, Count, Name, OpenShare, Positive, Share
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require, under
from lathe.measure.flops import net_input
from lathe.measure.shards import local, parameters_of, part_of, whole
from lathe.tasks.core import core_name, core_of, is_foreign, record_calls

KEY = "compression.prune_channels"
BATCHES = 15  # for BatchNorm's statistics and for `taylor`


class PruneChannels(SkippableHooks, Compression):
    """Remove channels, attention heads and hidden units until the net meets a budget.

    `find_groups` finds the units and `choose` selects them. `one_shot` removes them before the first step, by the
    weights of `ckpt_path`, and re-estimates BatchNorm's statistics. `gradual` trains the dense net up to `start`,
    selects units, scales them down to 0 until `end`, and removes them after training, when their removal does not
    change the outputs.

    Args:
        budget, share, importance, scope, round_to, min_channels, exclude: see
            `lathe.compression.channels.removal.Options`.
        mode: `gradual` or `one_shot`.
        start, end: shares of the window at which fading begins and ends.
        regularise: `group_norm`, `group_lasso`, `bn_scale`, or null: penalty on weak units up to `start`.
        strength: of the penalty, added to gradients.
        latency_batch: samples in the batch that latency is measured with.
    """

    every_step = ("on_before_optimizer_step", "on_train_batch_end")

    @validated
    def __init__(
        self,
        budget: ChannelBudget = "macs",
        share: OpenShare = 0.5,
        mode: Literal["gradual", "one_shot"] = "gradual",
        importance: ChannelImportance = "group_norm",
        scope: Literal["global", "local"] = "global",
        round_to: Count | None = None,
        min_channels: Count = 4,
        start: Share = 0.3,
        end: Share = 0.6,
        regularise: Literal["group_norm", "group_lasso", "bn_scale"] | None = None,
        strength: Positive = 5e-4,
        exclude: Sequence[Name] = (),
        latency_batch: Count = 32,
    ) -> None:
        require_packages()  # raises before data are loaded
        gradual = mode == "gradual"
        if start > end:
            raise ArgumentError(f"start={start} lies behind end={end}: fade later.")
        if not gradual and regularise is not None:
            raise ArgumentError(f"regularise={regularise} acts before channels are chosen: use mode=gradual.")
        if gradual and importance == "taylor" and start == 0:
            raise ArgumentError("importance=taylor reads gradients before channels are chosen: set start above 0.")
        self.options = Options(budget, share, importance, scope, round_to, min_channels, tuple(exclude))
        self.mode, self.start, self.end, self.regularise, self.strength = mode, start, end, regularise, strength
        self.latency_batch, self.removes_late = latency_batch, gradual
        self._reset()

    def _reset(self) -> None:
        self.chosen: dict[str, list[int]] | None = None  # units to remove, by group
        self.factor = 1.0  # the factor that scales them
        self.shares: dict[str, float] = {}  # remaining shares of the dense net
        self._step = -1  # the last optimizer step that was processed; -1 before training
        self._sensitivity: dict[str, Tensor] = {}
        self._groups: list[Group] = []
        # the dense net, without values unless its time counts
        self._dense: tuple[nn.Module, Any] | None = None
        # by parameter name, True where weights do not fade; this rank's weights, and ones where they fade
        self._stays: dict[str, Tensor] = {}
        self._fading: tuple[list[Tensor], list[Tensor]] = ([], [])

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        net = core_of(pl_module)
        strategy: Any = trainer.strategy
        task: Any = pl_module
        # Lightning's own strategies have no `reshapes`
        reshapes = getattr(strategy, "reshapes", hasattr(strategy, "deepspeed_engine"))
        require(
            not reshapes or getattr(strategy, "keeps_parameters", False),
            f"{KEY} can't reach the weights under strategy {type(strategy).__name__}: use strategy=ddp, fsdp or auto.",
        )
        require(
            not reshapes or self.regularise is None,
            f"{KEY}.regularise={self.regularise} needs whole weights in each process: use strategy=ddp, or null.",
        )
        require(
            self.mode == "gradual" or self.window[0] == 0,
            f"{KEY}.mode=one_shot acts before the first step: list it first in compression.stages, or use gradual.",
        )
        if self.mode == "one_shot" and describe(net):  # a resumed run: the net already has its structure
            return
        example = an_input(trainer, pl_module, self.latency_batch)
        with under(KEY):
            self._groups = find_groups(net, example, self.options.exclude)
        if self.mode == "gradual":
            latency = self.options.budget == "latency"
            self._dense = (copy.deepcopy(net), example) if latency else skeleton(net, example)
            return
        home, device = next(net.parameters()).device, trainer.strategy.root_device
        net.to(device)
        if self.options.importance == "taylor":
            require(not is_foreign(pl_module), f"{KEY}.importance=taylor needs mode=gradual with a LightningModule.")
            with evaluated(net):
                for batch in first_batches(trainer, pl_module, BATCHES):
                    loss = torch.stack(list(task.losses(net(net_input(batch)), batch).values())).sum()
                    loss.backward()
                    self._add_sensitivity(net)
                    net.zero_grad(set_to_none=True)
        self._dense = net, example
        self._choose(trainer, net)
        remove(net, self._groups, self.chosen or {})
        calls = record_calls(pl_module, first_batches(trainer, pl_module, BATCHES), BATCHES, split="train")
        reestimate_batchnorm(net, [call.example for call in calls], BATCHES)
        if trainer.world_size > 1:
            for buffer in net.buffers():
                torch.distributed.broadcast(buffer, src=0)
        net.to(home)

    def _choose(self, trainer: Trainer, net: nn.Module) -> None:
        """Choose the units on rank 0 and broadcast them."""
        assert self._dense is not None
        (dense, example), message = self._dense, None
        tensors = {name: whole(parameter) for name, parameter in parameters_of(net).items()}
        if trainer.is_global_zero:
            try:
                with under(KEY):
                    self.chosen = self.options.pick(
                        dense, self._groups, example, tensors, self._sensitivity, torch.initial_seed()
                    )
                small = copy.deepcopy(dense)
                remove(small, self._groups, self.chosen)
                self.shares = shares(sizes(dense, example), sizes(small, example))
            except UserError as error:
                message = str(error)
        self.chosen, self.shares, message = trainer.strategy.broadcast((self.chosen, self.shares, message))
        if message is not None:
            raise UserError(message)
        self._dense, self._sensitivity = None, {}

    def _add_sensitivity(self, net: nn.Module) -> None:
        named = parameters_of(net)
        tensors = {name: whole(parameter) for name, parameter in named.items()}
        gradients = {name: whole(parameter.grad) for name, parameter in named.items() if parameter.grad is not None}
        for name, change in loss_change(self._groups, tensors, gradients).items():
            finite = change.cpu().nan_to_num(0.0, 0.0, 0.0)  # float16 overflow does not count
            self._sensitivity[name] = self._sensitivity.get(name, 0) + finite

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # under fsdp a checkpoint is restored after on_fit_start
        require(
            self.mode == "gradual" or self.chosen is not None,
            f"{KEY}.mode=one_shot finds a net that has lost channels before: use mode=gradual to remove more.",
        )
        if self.mode == "gradual" and self.chosen is not None:  # resumed
            self._bind(core_of(pl_module))
        self._begin, self._end = self.step_at(trainer, self.start), self.step_at(trainer, self.end)
        self._first = self.step_at(trainer, 0.0)
        # a resumed run's checkpoint may have been written between an optimizer step and this callback
        self._act(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self.mode == "one_shot" or self.chosen is not None:
            return
        net, step = core_of(pl_module), steps_of(trainer)
        if self.options.importance == "taylor" and self._begin - BATCHES <= step:
            self._add_sensitivity(net)
        if self.regularise is not None and step >= self._first:
            add_penalty(net, self._groups, self.regularise, self.strength)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._act(trainer, pl_module)

    def _act(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act after an optimizer step, counted from 1, or before the first one (0)."""
        step = steps_of(trainer)
        if self.mode == "one_shot" or step <= self._step:  # gradients accumulate
            return
        self._step = step
        if step < self._begin:
            return
        net = core_of(pl_module)
        if self.chosen is None:
            self._choose(trainer, net)
            self._bind(net)
        before = self.factor
        self.factor = max(self._end - step, 0) / max(self._end - self._begin, 1)
        weights, fading = self._fading
        if weights:
            with torch.no_grad():
                factors = torch._foreach_mul(fading, (self.factor / before if before else 0.0) - 1.0)
                torch._foreach_mul_(weights, torch._foreach_add(factors, 1.0))
        if before > self.factor == 0.0:
            for callback in trainer.callbacks:  # type: ignore[attr-defined]
                if isinstance(callback, EMA):  # faded units are zero in the average too
                    prefix = f"{core_name(pl_module)}." if core_name(pl_module) else ""
                    callback.mask({f"{prefix}{name}": mask for name, mask in self._stays.items()})

    def _bind(self, net: nn.Module) -> None:
        """Find the weights that fade."""
        named = parameters_of(net)
        masks = fading(self._groups, self.chosen or {}, net)
        masks = {name: mask.to(named[name].device) for name, mask in masks.items()}
        self._stays = {name: ~mask for name, mask in masks.items()}
        weights = [local(named[name]) for name in masks]
        parts = [part_of(mask, named[name]) for name, mask in masks.items()]
        self._fading = weights, [part.to(weight.dtype) for part, weight in zip(parts, weights, strict=True)]

    def ready(self, trainer: Trainer) -> bool:
        return self.mode == "one_shot" or (self.chosen is not None and self.factor == 0.0)

    def finalise(self, net: nn.Module, datamodule: Any) -> bool:
        if self.mode == "one_shot":
            return False
        if self.chosen is None or self.factor > 0:
            rank_zero_warn(f"{KEY}: training ended before {KEY}.end={self.end}, so no channel was removed.")
            self.chosen = None
            return False
        silence(net, self._groups, self.chosen)  # an average of weights is not exactly zero there
        remove(net, self._groups, self.chosen)
        return True

    def leaving(self) -> dict[str, dict[int, set[int]]]:
        return positions(self._groups, self.chosen or {}) if self.removes_late else {}

    def report(self) -> dict[str, float]:
        removed = self.mode == "one_shot" or self.factor == 0.0
        return {f"prune_channels/{name}_share": share for name, share in self.shares.items() if removed}

    def state_dict(self) -> dict[str, Any]:
        chosen = {"chosen": self.chosen, "factor": self.factor, "shares": self.shares}
        return {**chosen, "step": self._step, "sensitivity": self._sensitivity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.chosen, self.factor, self.shares = state["chosen"], state["factor"], state["shares"]
        self._step, self._sensitivity = state["step"], state["sensitivity"]
