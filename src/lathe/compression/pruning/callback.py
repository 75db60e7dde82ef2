"""Callbacks that prune during training: sparsity follows a schedule, then the net recovers with fixed masks."""

from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lathe.compression.callback import an_input
from lathe.compression.modes import copy_input, evaluated, uncompiled
from lathe.compression.pruning import criteria
from lathe.compression.pruning.masking import Masking
from lathe.compression.pruning.masks import Block, Granularity, Pattern, SparsitySchedule
from lathe.config.types import (
    Count,
    Criterion,
    LayerTypes,
    MaskScope,
    Name,
    OpenShare,
    Positive,
    Seed,
    Share,
    ShareBelowOne,
    SomeNames,
    SparsityCurve,
)
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.flops import net_input
from lathe.measure.shards import joined, local, part_of, whole

GRADIENT_CRITERIA = ("taylor", "movement")


class Prune(Masking):
    """Mask the weights of the lowest scores until `sparsity` of the maskable weights is zero.

    Sparsity is absolute at each optimizer step (`SparsitySchedule`), from `start` to `end`, shares of the window; the
    rest of the window is for recovery. Masked weights stay masked. Shapes do not change: zeros reduce the size only of
    a compressed file, and the time only with a sparse kernel.

    `lathe.compression.pruning.Pattern` describes `granularity`, `scope`, `norm`, `n`, `m` and `block`,
    `lathe.compression.pruning.criteria` the criteria, `Masking` the choice of layers. taylor adds up gradients between
    two updates, movement from the start; wanda measures, in eval mode, the last `batches` training batches before each
    update (the last micro-batch of each step). Layers that do not divide into groups or blocks stay dense, with a
    warning above a tenth of the weights; naming them in `layers` is an error.
    """

    name = "prune"

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.8,
        granularity: Granularity = "unstructured",
        scope: MaskScope = "global",
        criterion: Criterion = "magnitude",
        norm: Positive = 1.0,
        schedule: SparsityCurve = "cubic",
        initial_sparsity: ShareBelowOne = 0.0,
        start: Share = 0.1,
        end: Share = 0.6,
        every_n_steps: Count | None = None,
        jumps: Count = 4,
        n: Count = 2,
        m: Count = 4,
        block: Block = (4, 1),
        batches: Count = 4,
        seed: Seed = 0,
        layers: SomeNames | None = None,
        exclude: list[Name] | None = None,
        types: LayerTypes | None = None,
        head: bool = False,
    ) -> None:
        super().__init__(layers, exclude, types, head)
        self.pattern = Pattern(granularity, scope, norm if criterion == "magnitude" else None, n, m, tuple(block))
        if granularity == "n_m" and sparsity > 1 - n / m + 1e-9:
            raise ArgumentError(f"sparsity={sparsity} is more than {n} of {m} leaves: at most {1 - n / m:g}.")
        if criterion == "batchnorm" and granularity != "structured":
            raise ArgumentError("criterion=batchnorm scores whole channels: set granularity=structured.")
        if start > end:
            raise ArgumentError(f"start={start} is after end={end}. Use 0.1 and 0.6.")
        self.curve = SparsitySchedule(sparsity, schedule, initial_sparsity, jumps=jumps)  # its steps are set later
        self.schedule: SparsitySchedule | None = None
        self.sparsity, self.criterion, self.seed = sparsity, criterion, seed
        self.start, self.end, self.every_n_steps, self.batches = start, end, every_n_steps, batches
        self.beside_removal = granularity in ("unstructured", "structured")  # removal would split groups and blocks
        self._sums: dict[str, Tensor] = {}  # taylor and movement: this rank's part; wanda: squares of inputs
        self._restored: dict[str, Tensor] = {}
        self._batch: Any = None
        self._warned = self._begun = False

    def choose(self, net: nn.Module) -> dict[str, nn.Parameter]:
        found = super().choose(net)
        fit = {name: p for name, p in found.items() if self.pattern.divides(p.shape)}
        left = {name: p.numel() for name, p in found.items() if name not in fit}
        if left and self.layers is not None:
            raise UserError(
                f"{self.key}.layers: {next(iter(left))} does not divide into {self.pattern.pieces}: name it in exclude."
            )
        if fit and not self._warned and sum(left.values()) > 0.1 * sum(p.numel() for p in found.values()):
            self._warned = True
            rank_zero_warn(
                f"{self.key} leaves {', '.join(left)} dense, which do not divide into {self.pattern.pieces}: name them "
                "in exclude."
            )
        if self.criterion == "batchnorm" and fit:
            criteria.batchnorms(net, fit)
        return fit

    def scores(self, net: nn.Module, step: int) -> dict[str, Tensor]:
        """Return the score of each weight after optimizer step `step`, by name, as full tensors."""
        weights = {name: whole(parameter) for name, parameter in self.parameters.items()}
        if self.criterion == "random":
            return criteria.random(weights, self.seed, step)
        if self.criterion == "batchnorm":
            gammas = {name: whole(net.get_parameter(name)) for name in set(criteria.batchnorms(net, weights).values())}
            return criteria.batchnorm_scale(net, weights, gammas)
        if self.criterion == "wanda":
            return criteria.wanda(weights, self._sums)
        if self.criterion in GRADIENT_CRITERIA:
            return self._gathered()
        return criteria.magnitude(weights)

    def update(self, net: nn.Module, step: int) -> None:
        """Set masks of the schedule's sparsity at optimizer step `step`."""
        assert self.schedule is not None
        target = self.schedule.at(step)
        if target > 0:
            self.set_masks(self.make(self.scores(net, step), target, **vars(self.pattern)))
        if self.criterion == "wanda":
            self._sums = {}
        elif self.criterion == "taylor":
            torch._foreach_zero_(list(self._sums.values()))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":
            # only if needed: each hook costs a call per step
            self._begun = False
            if self.criterion == "wanda":
                self._check_wanda(trainer, pl_module)
            if self.criterion in GRADIENT_CRITERIA:
                self.on_before_optimizer_step = self._add_gradients  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = int(self.criterion in (*GRADIENT_CRITERIA, "wanda"))  # these have no scores before the first step
        start = max(self.step_at(trainer, self.start), first)
        end = max(self.step_at(trainer, self.end), start)
        every = self.every_n_steps or max(1, (end - start) // 100)
        self.schedule = replace(self.curve, start=start, end=end, every_n_steps=every)
        last = self.schedule.last
        require(last <= self.total_steps(trainer), f"{self.key} would end at step {last}, after the run. Train longer.")
        for other in self._removing:
            choice = other.step_at(trainer, other.start)
            require(
                choice <= last,
                f"{self.key} ends at step {last}, before channels are chosen at step {choice}. Raise {self.key}.end, "
                "or lower compression.prune_channels.start.",
            )
        super().on_train_start(trainer, pl_module)
        self._take_over()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._batch = None

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        assert self.schedule is not None
        self._take_over()
        net = pl_module.get_submodule("net")
        if self.criterion == "wanda" and self._batch is not None and self._wanted(step):
            self._measure(net, trainer)
        # a run that resumes from a checkpoint without masks may be past its start
        late = not self._begun and self.updates == 0 and step > self.schedule.start
        self._begun = True
        if self.schedule.due(step) or (late and self.criterion not in (*GRADIENT_CRITERIA, "wanda")):
            self.update(net, step)

    def ready(self, trainer: Trainer) -> bool:
        return self.schedule is not None and self._step >= self.schedule.last

    def _check_wanda(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the net's input, measured after the step; raise UserError if a layer is not called."""
        net = pl_module.get_submodule("net")
        self._handles.append(net.register_forward_pre_hook(copy_input))
        try:
            x = an_input(trainer, pl_module, 2).to(next(net.parameters()).device)
        except MisconfigurationException:  # no validation data
            return
        chosen = self.choose(net)
        with criteria.input_squares(net, chosen) as seen, evaluated(net), torch.no_grad(), uncompiled(net):
            net(x)
        unseen = [name for name in chosen if name not in seen]
        if unseen:
            raise UserError(
                f"{self.key}.criterion=wanda: the net uses {unseen[0]} without calling its layer. Name it in exclude."
            )

    def _add_gradients(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert self.schedule is not None
        if trainer.global_step >= self.schedule.last:
            return
        if not self._sums:
            self._sums = {name: torch.zeros_like(local(p), dtype=torch.float32) for name, p in self.parameters.items()}
        weights = {name: local(parameter) for name, parameter in self.parameters.items()}
        gradients = {name: None if p.grad is None else local(p.grad) for name, p in self.parameters.items()}
        criteria.add_gradients(self._sums, weights, gradients, self.criterion)  # type: ignore[arg-type]

    def _wanted(self, step: int) -> bool:
        """Return whether an update is due within `batches` steps from `step` on."""
        assert self.schedule is not None
        return any(self.schedule.due(later) for later in range(step, step + self.batches))

    def _measure(self, net: nn.Module, trainer: Trainer) -> None:
        with (
            evaluated(net),
            torch.no_grad(),
            trainer.precision_plugin.forward_context(),
            torch.compiler.set_stance("force_eager"),
            criteria.input_squares(net, self.parameters) as squares,
        ):
            net(net_input(self._batch))
        for module in net.modules():
            reshard: Any = getattr(module, "reshard", None)
            if reshard is not None:  # fsdp: a root that stays gathered would not get new masks
                reshard()
        for name, total in squares.items():
            square = whole(total)  # under tensor parallelism each rank has a part of the features
            if trainer.world_size > 1:
                torch.distributed.all_reduce(square)
            self._sums[name] = self._sums[name] + square if name in self._sums else square

    def _gathered(self) -> dict[str, Tensor]:
        return {name: whole(joined(part, self.parameters[name])) for name, part in self._sums.items()}

    def _take_over(self) -> None:
        """Install restored sums, once the net is sharded and on its device."""
        for name, value in self._restored.items():
            owner = self.parameters[name]
            value = value.to(owner.device)
            self._sums[name] = value if self.criterion == "wanda" else part_of(value, owner).clone()
        self._restored = {}

    def state_dict(self) -> dict[str, Any]:
        sums = self._sums if self.criterion == "wanda" else self._gathered()
        return super().state_dict() | {"sums": {name: value.cpu() for name, value in sums.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._begun = True
        self._restored = dict(state_dict["sums"])


class PruneStructured(Prune):
    """Prune rows: output channels of convolutions, output features of linear layers."""

    name = "prune_structured"
    fixed_parameters = ("granularity", "n", "m", "block")

    @validated
    def __init__(
        self,
        sparsity: OpenShare = 0.5,
        scope: MaskScope = "layer",
        criterion: Criterion = "magnitude",
        norm: Positive = 2.0,
        schedule: SparsityCurve = "cubic",
        initial_sparsity: ShareBelowOne = 0.0,
        start: Share = 0.1,
        end: Share = 0.6,
        every_n_steps: Count | None = None,
        **options: Any,
    ) -> None:
        shared: dict[str, Any] = {
            "schedule": schedule,
            "initial_sparsity": initial_sparsity,
            "start": start,
            "end": end,
        }
        super().__init__(
            sparsity, "structured", scope, criterion, norm, every_n_steps=every_n_steps, **shared, **options
        )


class PruneNM(Prune):
    """Prune to N:M sparsity: at most `n` of `m` consecutive inputs are kept; sparsity is 1 - n / m."""

    name = "prune_nm"
    fixed_parameters = ("sparsity", "granularity", "norm", "block")

    @validated
    def __init__(
        self,
        n: Count = 2,
        m: Count = 4,
        criterion: Criterion = "magnitude",
        **options: Any,
    ) -> None:
        Pattern(n=n, m=m)  # validates them
        super().__init__(1 - n / m, "n_m", criterion=criterion, n=n, m=m, **options)
