"""Callbacks that mask weights: pruning along a schedule, RigL and SET, and lottery tickets within one run."""

import copy
import math
import zlib
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.callbacks.ema import EMA
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.compression.callback import Compression, compressions, steps_of
from lathe.compression.channels.removal import staying
from lathe.compression.modes import copy_input, evaluated
from lathe.compression.pruning.masks import (
    HEAD_RULE,
    Block,
    Granularity,
    Masks,
    Pattern,
    SparsitySchedule,
    add_gradients,
    batchnorm_weights,
    copy_state,
    erdos_renyi_kernel,
    exchange,
    input_squares,
    largest_masks,
    make_masks,
    maskable,
    random_masks,
    random_scores,
    rewind,
    round_sparsities,
    wanda,
    weights_of,
)
from lathe.config.types import (
    Count,
    Criterion,
    LayerTypes,
    MaskScope,
    Name,
    OpenShare,
    Positive,
    PositiveShare,
    Seed,
    Share,
    ShareBelowOne,
    SomeNames,
    SparsityCurve,
    StepOrShare,
)
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.measure.calls import run
from lathe.measure.processes import processes
from lathe.measure.shards import joined, local, parameters_of, part_of, whole
from lathe.tasks.core import core_name, core_of, record_calls

GRADIENT_CRITERIA = ("taylor", "movement")


class Masking(SkippableHooks, Compression):
    """Keep masked weights exactly zero: in the net, in checkpoints and in EMA's average.

    A subclass overrides `on_step`, reads `parameters` (of the net, by name; they may be DTensors) and calls
    `set_masks`. Masks are not part of the modules: parameters keep their names, and an optimizer step changes masked
    weights before they are zeroed again, so that their gradients and momentum exist for regrowth. If channels are
    removed after training (`prune_channels` with mode=gradual), sparsity is that of the remaining weights; a method
    supports that if `beside_removal` is True.

    Args:
        layers, exclude: shell patterns of module names, such as `blocks.*.conv1`; None takes every layer of `types`.
        types: linear, conv, embedding, norm, bias.
        head: mask the layer that makes the logits too.
    """

    name = "masking"
    beside_removal = False

    @validated
    def __init__(
        self,
        layers: SomeNames | None = None,
        exclude: list[Name] | None = None,
        types: LayerTypes | None = None,
        head: bool = False,
    ) -> None:
        self.layers, self.exclude, self.head = layers, exclude or [], head
        self.types: LayerTypes = types or ("linear", "conv")
        self.key = f"compression.{self.name}"  # in messages
        self.masks: Masks = {}
        self.parameters: dict[str, Tensor] = {}
        self.updates = 0
        self._step = -1  # the last optimizer step that was processed; -1 before training
        self._live: list[Tensor] = []  # this rank's part of the masked parameters, and of their masks as numbers
        self._factors: list[Tensor] = []
        self._optimizers: list[Optimizer] = []
        self._averages: list[EMA] = []
        self._handles: list[Any] = []
        self._prefix = ""  # of the core's parameters in the module whose average EMA keeps
        self._removing: list[Any] = []  # methods that remove parts of parameters after training
        self._shapes: dict[str, tuple[int, ...]] = {}  # of all parameters, before sharding
        self._chosen: list[str] = []  # maskable parameters

    def choose(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """Return the maskable parameters, by name."""
        return maskable(net, self.layers, self.exclude, self.types, self.head, prefix=self.key)

    def check(self, net: nn.Module) -> None:
        self.choose(net)

    def chosen_or_raise(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """Return `choose(net)`; raise UserError if it is empty, warn if it is less than half of the weights."""
        chosen = self.choose(net)
        require(bool(chosen), f"{self.key} finds nothing to mask: {HEAD_RULE}")
        weights = {name: p.numel() for name, p in weights_of(net, self.layers, self.exclude).items()}
        dense = weights.keys() - chosen.keys()
        share = 1 - sum(weights[name] for name in dense) / max(sum(weights.values()), 1)
        if share < 0.5 and {"linear", "conv"} & set(self.types):
            largest = min(dense, key=lambda name: (-weights[name], name))
            rank_zero_warn(
                f"{self.key} masks only {share:.1%} of the weights: {largest} stays dense. See {self.key}.layers."
            )
        return chosen

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        """Act before the first optimizer step (0) and after each (from 1), once masks are applied."""

    def make(self, scores: dict[str, Tensor], sparsity: float, **pattern: Any) -> Masks:
        """Return `make_masks` of the weights that remain after training; the others keep their masks."""
        leaving = self._leaving()
        if not leaving:
            return make_masks(scores, sparsity, previous=self.masks, **pattern)
        left = {name: staying(score.shape, leaving.get(name, {})) for name, score in scores.items()}
        previous = {name: mask[left[name]] for name, mask in self.masks.items()}
        remaining = {name: score[left[name]] for name, score in scores.items()}
        masks = {name: torch.ones_like(score, dtype=torch.bool) for name, score in scores.items()}
        masks |= {name: mask.clone() for name, mask in self.masks.items()}
        for name, mask in make_masks(remaining, sparsity, previous=previous, **pattern).items():
            masks[name][left[name]] = mask
        return masks

    def set_masks(self, masks: Masks) -> None:
        """Set masks (full shape, True: kept) and apply them; a collective that broadcasts rank 0's masks."""
        self.masks = {name: mask.bool().to(self.parameters[name].device) for name, mask in masks.items()}
        if processes() > 1:
            for mask in self.masks.values():
                torch.distributed.broadcast(mask.view(torch.uint8), src=0)
        self.updates += 1
        self._bind_masks()
        for average in self._averages:
            average.mask({f"{self._prefix}{name}": mask for name, mask in self.masks.items()})

    @torch.no_grad()
    def clear_state(self, places: Masks, keep: tuple[str, ...] = ()) -> None:
        """Zero the optimizers' state of weights where `places` are True, but for the entries named in `keep`."""
        for name, mask in places.items():
            owner = self.parameters[name]
            for optimizer in self._optimizers:
                state: dict[str, Any] = optimizer.state.get(owner, {})
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == owner.shape and key not in keep:
                        local(value).masked_fill_(part_of(mask, owner), 0.0)

    def apply(self) -> None:
        """Zero the masked weights in place."""
        if self._live:
            with torch.no_grad():
                torch._foreach_mul_(self._live, self._factors)
                # -0.0 becomes 0.0: random signs of zeros do not compress
                torch._foreach_add_(self._live, 0.0)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        net = core_of(pl_module)
        self._chosen = list(self.chosen_or_raise(net))
        # without LSQ's scales, which only a resumed run's net has already
        self._shapes = {name: tuple(p.shape) for name, p in net.named_parameters() if "_quantizer." not in name}
        self._removing = [method for method in compressions(trainer) if method.removes_late]
        require(
            self.beside_removal or not self._removing,
            f"{self.key} would mask channels that are removed after training. Use "
            "compression.prune_channels.mode=one_shot, or two runs.",
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = core_of(pl_module)
        self._prefix = f"{core_name(pl_module)}." if core_name(pl_module) else ""
        spread = parameters_of(net)
        self.parameters = {name: spread[name] for name in self.choose(net)}
        self._averages = [callback for callback in trainer.callbacks if isinstance(callback, EMA)]  # type: ignore[attr-defined]
        self._optimizers = list(trainer.optimizers)
        self._handles = [optimizer.register_step_post_hook(lambda *_: self.apply()) for optimizer in self._optimizers]
        self.restore()
        # the checkpoint may have been written between an optimizer step and its update
        if self._step < 0 or steps_of(trainer) > self._step:
            self._step = steps_of(trainer)
            self.on_step(trainer, pl_module, self._step)

    def restore(self) -> None:
        """Install the state of a checkpoint, once the net is sharded and on its device."""
        for name, mask in self.masks.items():
            require(
                name in self.parameters and mask.shape == self.parameters[name].shape,
                f"{self.key}: the checkpoint masks {name} in another shape or not at all. Keep the layers of its run.",
            )
            self.masks[name] = mask.to(self.parameters[name].device)
        self._bind_masks()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = steps_of(trainer)
        if step > self._step:  # not while gradients accumulate
            self._step = step
            self.on_step(trainer, pl_module, step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.ready(trainer) and not trainer.fast_dev_run:  # type: ignore[attr-defined]  # a connector sets it
            rank_zero_warn(
                f"{self.key}: training ended at step {steps_of(trainer)}, before {self.key}.end, at sparsity "
                f"{self.report()[f'{self.name}/sparsity']:.3f}: let it run to its end."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._optimizers, self._averages = [], [], []
        self.parameters, self._live, self._factors = {}, [], []

    def report(self) -> dict[str, float]:
        leaving = self._leaving()
        counts = {
            name: math.prod(size - len(leaving.get(name, {}).get(dim, ())) for dim, size in enumerate(shape))
            for name, shape in self._shapes.items()
        }
        zeros = 0
        for name, mask in self.masks.items():
            zeros += int((~(mask[staying(mask.shape, leaving[name])] if name in leaving else mask)).sum())
        return {
            f"{self.name}/sparsity": zeros / max(sum(counts[name] for name in self._chosen), 1),
            f"{self.name}/sparsity_net": zeros / max(sum(counts.values()), 1),
        }

    def state_dict(self) -> dict[str, Any]:
        masks = {name: mask.cpu() for name, mask in self.masks.items()}
        return {"masks": masks, "updates": self.updates, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.masks = {name: mask.bool() for name, mask in state_dict["masks"].items()}
        self.updates, self._step = state_dict["updates"], state_dict["step"]

    def _leaving(self) -> dict[str, dict[int, set[int]]]:
        return {name: places for method in self._removing for name, places in method.leaving().items()}

    def _bind_masks(self) -> None:
        owners = [self.parameters[name] for name in self.masks]
        self._live = [local(owner) for owner in owners]
        self._factors = [
            part_of(mask.to(owner.dtype), owner) for mask, owner in zip(self.masks.values(), owners, strict=True)
        ]
        self.apply()


class Prune(Masking):
    """Mask the weights of the lowest scores until `sparsity` of the maskable weights is zero.

    Sparsity is absolute at each optimizer step (`SparsitySchedule`), from `start` to `end`, shares of the window; the
    rest of the window is for recovery. Masked weights stay masked. Shapes do not change: zeros reduce the size only of
    a compressed file, and the time only with a sparse kernel.

    `lathe.compression.pruning.Pattern` describes `granularity`, `scope`, `norm`, `n`, `m` and `block`,
    `lathe.compression.pruning.masks` the criteria, `Masking` the choice of layers. taylor adds up gradients between
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
        **options: Any,
    ) -> None:
        super().__init__(**options)
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

    def choose(self, net: nn.Module) -> dict[str, nn.Parameter]:
        candidates = super().choose(net)
        fit = {name: p for name, p in candidates.items() if self.pattern.divides(p.shape)}
        if self.layers is not None and len(fit) < len(candidates):
            odd = next(name for name in candidates if name not in fit)
            raise UserError(f"{self.key}.layers: {odd} does not divide into {self.pattern.pieces}: name it in exclude.")
        if self.criterion == "batchnorm" and fit:
            batchnorm_weights(net, fit)
        return fit

    def chosen_or_raise(self, net: nn.Module) -> dict[str, nn.Parameter]:
        chosen, candidates = super().chosen_or_raise(net), super().choose(net)
        odd = [name for name in candidates if name not in chosen]
        if sum(candidates[name].numel() for name in odd) > 0.1 * sum(
            parameter.numel() for parameter in candidates.values()
        ):
            rank_zero_warn(
                f"{self.key} leaves {', '.join(odd)} dense, which do not divide into {self.pattern.pieces}: name them "
                "in exclude."
            )
        return chosen

    def scores(self, net: nn.Module, step: int) -> dict[str, Tensor]:
        """Return the score of each weight after optimizer step `step`, by name, as full tensors."""
        if self.criterion in GRADIENT_CRITERIA:
            return self._gathered()
        weights = {name: whole(parameter) for name, parameter in self.parameters.items()}
        if self.criterion == "wanda":
            return wanda(weights, self._sums)
        if self.criterion == "random":
            return {
                name: random_scores(weight.shape, self.seed, step, zlib.crc32(name.encode())).to(weight.device)
                for name, weight in weights.items()
            }
        if self.criterion == "batchnorm":
            gammas = {name: whole(gamma).abs() for name, gamma in batchnorm_weights(net, weights).items()}
            return {
                name: gammas[name].reshape(-1, *[1] * (weight.dim() - 1)).expand(weight.shape)
                for name, weight in weights.items()
            }
        return {name: weight.abs() for name, weight in weights.items()}  # Han et al. 2015, arXiv:1506.02626

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
        if stage != "fit":
            return
        if self.criterion == "wanda":  # the inputs are measured after the step
            self._handles.append(core_of(pl_module).register_forward_pre_hook(copy_input))
        if self.criterion in GRADIENT_CRITERIA:  # each hook costs a call per step
            self.on_before_optimizer_step = self._add_gradients  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        first = int(self.criterion in (*GRADIENT_CRITERIA, "wanda"))  # these have no scores before the first step
        start = max(self.step_at(trainer, self.start), first)
        end = max(self.step_at(trainer, self.end), start)
        interval = self.every_n_steps or max(1, (end - start) // 100)
        self.schedule = replace(self.curve, start=start, end=end, every_n_steps=interval)
        for other in self._removing:
            choice = other.step_at(trainer, other.start)
            require(
                choice <= self.schedule.last,
                f"{self.key} ends at step {self.schedule.last}, before channels are chosen at step {choice}. Raise "
                f"{self.key}.end, or lower compression.prune_channels.start.",
            )
        begins = self._step < 0
        super().on_train_start(trainer, pl_module)
        if begins and not self.updates and self._step > start and not first:
            self.update(core_of(pl_module), self._step)  # the run continues a dense checkpoint from after the start

    def restore(self) -> None:
        super().restore()
        for name, value in self._restored.items():
            owner = self.parameters[name]
            value = value.to(owner.device)
            self._sums[name] = value if self.criterion == "wanda" else part_of(value, owner).clone()
        self._restored = {}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._batch = None

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        assert self.schedule is not None
        net = core_of(pl_module)
        soon = any(self.schedule.due(later) for later in range(step, step + self.batches))
        if self.criterion == "wanda" and self._batch is not None and soon:
            self._measure(net, trainer, pl_module)
        if self.schedule.due(step):
            self.update(net, step)

    def ready(self, trainer: Trainer) -> bool:
        return self.schedule is not None and self._step >= self.schedule.last

    def _add_gradients(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        assert self.schedule is not None
        if steps_of(trainer) >= self.schedule.last:
            return
        if not self._sums:
            self._sums = {name: torch.zeros_like(local(p), dtype=torch.float32) for name, p in self.parameters.items()}
        weights = {name: local(parameter) for name, parameter in self.parameters.items()}
        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        gradients = {
            name: None if p.grad is None or id(p) not in own else local(p.grad) for name, p in self.parameters.items()
        }
        add_gradients(self._sums, weights, gradients, self.criterion)  # type: ignore[arg-type]

    def _measure(self, net: nn.Module, trainer: Trainer, pl_module: LightningModule) -> None:
        example = record_calls(pl_module, [self._batch], split="train")[0].example
        with (
            evaluated(net),
            torch.no_grad(),
            trainer.precision_plugin.forward_context(),
            torch.compiler.set_stance("force_eager"),
            input_squares(net, self.parameters) as squares,
        ):
            run(net, example)
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

    def state_dict(self) -> dict[str, Any]:
        sums = self._sums if self.criterion == "wanda" else self._gathered()
        return super().state_dict() | {"sums": {name: value.cpu() for name, value in sums.items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
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
        **options: Any,
    ) -> None:
        super().__init__(sparsity, "structured", scope, criterion, norm, **options)


class PruneNM(Prune):
    """Prune to N:M sparsity: at most `n` of `m` consecutive inputs are kept; sparsity is 1 - n / m."""

    name = "prune_nm"
    fixed_parameters = ("sparsity", "granularity", "norm", "block")

    @validated
    def __init__(self, n: Count = 2, m: Count = 4, **options: Any) -> None:
        Pattern(n=n, m=m)  # validates them
        super().__init__(1 - n / m, "n_m", n=n, m=m, **options)


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
                gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
                self._gradients |= {name: gradient.clone() for name, gradient in gradients.items()}

        self._handles += [optimizer.register_step_post_hook(keep) for optimizer in self._optimizers]

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        start, end = self.step_at(trainer, 0.0), self.step_at(trainer, self.end)
        if not self.masks and step >= start:
            shapes = {name: tuple(parameter.shape) for name, parameter in self.parameters.items()}
            densities = dict.fromkeys(shapes, 1 - self.sparsity)
            if self.densities == "erk":
                densities = erdos_renyi_kernel(shapes, self.sparsity)
            if self.initial == "random":
                self.set_masks(random_masks(shapes, densities, self.seed))
            else:
                sizes = {name: whole(parameter).abs() for name, parameter in self.parameters.items()}
                self.set_masks(largest_masks(sizes, densities))
            self.clear_state({name: ~mask for name, mask in self.masks.items()})
        elif self.masks and self._due(trainer, step):
            self._exchange(step, self.fraction / 2 * (1 + math.cos(math.pi * (step - start) / (end - start))))
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

    def _exchange(self, step: int, fraction: float) -> None:
        growths: dict[str, Tensor] = {}
        for index, (name, parameter) in enumerate(self.parameters.items()):
            if self.growth == "random":
                growth = random_scores(parameter.shape, self.seed, step, index)
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
        self.set_masks(  # one gathered weight at a time
            {name: exchange(whole(self.parameters[name]), before[name], growths[name], fraction) for name in growths}
        )
        # grown weights start without momentum; second moments, of the dense gradient, are valid for masked ones too
        places = {name: self.masks[name] & ~before[name] for name in before}
        self.clear_state(places, keep=("exp_avg_sq", "max_exp_avg_sq"))


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
        self.sparsities = round_sparsities(sparsity, rounds)
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
            require(
                all(earlier < later for earlier, later in pairwise(steps)) and self.rewind_step(trainer) < steps[1],
                f"{self.key}.rounds={self.rounds} with rewind={self.rewind} do not fit into {steps[-1] - steps[0]} "
                "optimizer steps: train longer.",
            )
        super().on_train_start(trainer, pl_module)

    def on_step(self, trainer: Trainer, pl_module: LightningModule, step: int) -> None:
        if self.round == 0 and not self.saved and step >= self.rewind_step(trainer):
            self.saved = copy_state(core_of(pl_module))
        due = [number for number in range(1, self.rounds) if step >= self.begins(trainer, number)]
        if due and due[-1] > self.round:
            self._begin(trainer, pl_module, due[-1])
        elif 0 < step < self.total_steps(trainer):
            (start, end), total = self.window, self.total_steps(trainer)
            number = round((step / total - start) / (end - start) * self.rounds)
            if not 0 < number < self.rounds and step == self.begins(trainer, number):  # outside the window
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
        rewind(core_of(pl_module), self.saved)
        self.set_masks(masks)
        for optimizer in trainer.optimizers:
            optimizer.state.clear()
        for average in self._averages:
            average.restart()
        self._restart_schedules()
        if number == self.rounds - 1:
            self.saved = {}

    def _restart_schedules(self) -> None:
        for scheduler, state, rates in self._schedules:
            scheduler.load_state_dict(copy.deepcopy(state))
            for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"round": self.round, "saved": self.saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.round = state_dict["round"]
        self.saved = {name: tensor.clone() for name, tensor in state_dict["saved"].items()}
