"""Exponential moving average of the weights, evaluated and exported while the raw weights train."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lathe.callbacks.module_access import net_of
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.config.types import Count, NonNegativeInt, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import UserError, require
from lathe.measure.processes import everyones, processes
from lathe.measure.shards import is_sharded, joined, local, part_of, whole


class MovingAverage:
    """`average = decay * average + (1 - decay) * weights` (Polyak and Juditsky, 1992), in place.

    With `warmup`, update t uses min(decay, (1 + t) / (10 + t)), as in TensorFlow and timm. The average starts from
    `tensors`, or if empty from the first weights, in at least float32: in low precision small steps vanish.
    """

    def __init__(self, decay: float, warmup: bool = True) -> None:
        self.decay, self.warmup = decay, warmup
        self.updates = 0
        self.tensors: list[Tensor] = []

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor]) -> None:
        """Add weights to the average, in its precision; any precision if `tensors` is empty."""
        if self.tensors:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
            get_ema_multi_avg_fn(decay)(self.tensors, weights, self.updates)
        else:
            self.tensors = [tensor.detach().to(wide(tensor), copy=True) for tensor in weights]
        self.updates += 1


def wide(tensor: Tensor) -> torch.dtype:
    """Return the precision of a tensor's average."""
    return torch.promote_types(tensor.dtype, torch.float32)


class EMA(SkippableHooks, Callback):
    """Keep `average = decay * average + (1 - decay) * weights` of the net (Polyak and Juditsky, 1992).

    The first update copies the weights. Validation inside fit runs on the average, and after fit the net holds it. In a
    checkpoint, `state_dict` is the average under the usual names; `checkpoint["ema"]` has the raw weights and the
    number of updates, from which a run resumes bit for bit. Every rank averages what it holds: the whole net, or its
    shards under fsdp and tensor. Averaged buffers that differ between ranks, such as BatchNorm's, are rank 0's in
    evaluation.

    Lightning's `WeightAveraging` loses the raw weights when a run ends or dies inside validation, copies the whole
    LightningModule, and averages low-precision weights in low precision, where small steps vanish; here the average is
    at least float32.

    Args:
        decay: weight of the past per update, in [0, 1).
        every_n_steps: optimizer steps per update; the average then forgets `every_n_steps` times more slowly.
        start_step: optimizer steps before averaging begins; the net's tensors must not change shape afterwards.
        warmup: begin with a short memory: update t uses min(decay, (1 + t) / (10 + t)), as in TensorFlow and timm.
        buffers: "average" includes floating-point buffers (BatchNorm's running statistics); "copy" keeps the raw ones.
    """

    @validated
    def __init__(
        self,
        decay: ShareBelowOne = 0.999,
        every_n_steps: Count = 1,
        start_step: NonNegativeInt = 0,
        warmup: bool = True,
        buffers: Literal["average", "copy"] = "average",
    ) -> None:
        self.decay, self.every_n_steps, self.start_step = decay, every_n_steps, start_step
        self.warmup, self.buffers = warmup, buffers
        self._reset()

    def _reset(self) -> None:
        self._average = MovingAverage(self.decay, self.warmup)  # of this rank's tensors, from the first update on
        self._step = -1  # the last optimizer step that was counted; -1 before training
        self._index: dict[str, int] = {}  # name in the net's state_dict -> position below; tied weights share one
        self._owners: list[Tensor] = []  # the net's own tensors, which may be DTensors
        self._live: list[Tensor] = []  # this rank's local tensor of each, in the same memory
        self._raw: list[Tensor] = []  # the training weights while the net shows the average
        self._restored: dict[str, Tensor] = {}

    @property
    def updates(self) -> int:
        return self._average.updates

    def update(self, step: int) -> None:
        """Update the average after optimizer step `step`, counted from 1."""
        before, self._step = max(self._step, self.start_step), step
        if (step - self.start_step) // self.every_n_steps <= (before - self.start_step) // self.every_n_steps:
            return
        self._average.update(self._live if not self._narrow else [tensor.to(wide(tensor)) for tensor in self._live])

    def restart(self) -> None:
        """Discard the average; the next update copies the weights."""
        self._average = MovingAverage(self.decay, self.warmup)

    def mask(self, masks: dict[str, Tensor]) -> None:
        """Zero the average at weights that masks (full shape by parameter name, True: kept) have just removed."""
        if not self._average.tensors:
            return
        with torch.no_grad():
            for name, mask in masks.items():
                i = self._index[name]
                self._average.tensors[i].masked_fill_(~part_of(mask, self._owners[i]), 0.0)

    def _bind(self, net: nn.Module) -> None:
        """Find the tensors to average, in each epoch: another callback may have replaced some."""
        shapes = [t.shape for t in self._live]
        index: dict[str, int] = {}
        owners: list[Tensor] = []
        seen: dict[int, int] = {}
        for name, tensor in net.state_dict(keep_vars=True).items():
            averaged = isinstance(tensor, nn.Parameter) or self.buffers == "average"
            if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or not averaged:
                continue
            if id(tensor) not in seen:
                seen[id(tensor)] = len(owners)
                owners.append(tensor)
            index[name] = seen[id(tensor)]
        live = [local(tensor) for tensor in owners]
        if self._average.tensors and (index != self._index or shapes != [t.shape for t in live]):
            raise UserError(
                f"callbacks.ema.start_step={self.start_step} lies before a change of the net's tensors: set it past "
                "that change."
            )
        self._index, self._owners, self._live = index, owners, live
        self._narrow = any(t.dtype != wide(t) for t in live)

    def _show_average(self) -> None:
        if not self._average.tensors or self._raw:
            return
        with torch.no_grad():
            if processes() > 1:
                for tensor, average in zip(self._owners, self._average.tensors, strict=True):
                    if not isinstance(tensor, nn.Parameter) and not is_sharded(tensor):
                        torch.distributed.broadcast(average, src=0)
            self._raw = [t.detach().clone() for t in self._live]
            torch._foreach_copy_(self._live, self._average.tensors)

    def _show_raw(self) -> None:
        if self._raw:
            with torch.no_grad():
                torch._foreach_copy_(self._live, self._raw)
            self._raw = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._reset()
        if any(getattr(callback, "save_weights_only", False) for callback in trainer.checkpoint_callbacks):
            raise UserError(
                "callbacks.checkpoint.save_weights_only=true would save the raw weights instead of the average: set "
                "it to false."
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        net = net_of(pl_module)
        require(
            not any(hasattr(parameter, "ds_id") for parameter in net.parameters()),
            "callbacks.ema cannot average weights that DeepSpeed keeps in parts (stage 3): drop ema from callbacks, or "
            "use strategy=fsdp, deepspeed_2 or ddp.",
        )
        names, *others = everyones(list(net.state_dict()))
        require(
            all(other == names for other in others),
            "callbacks.ema cannot average a net that is cut between processes: drop ema from callbacks, or use "
            "strategy=fsdp or ddp.",
        )
        self._bind(net)
        self._install()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Not sooner: it creates the loader, which then misses its restored position.
        steps = trainer.estimated_stepping_batches
        require(
            not 0 < steps < self.start_step + self.every_n_steps or trainer.fast_dev_run,  # type: ignore[attr-defined]  # a connector sets it
            f"callbacks.ema.start_step={self.start_step} is above the run's {steps:g} optimizer steps less "
            f"every_n_steps={self.every_n_steps}, nothing would be averaged: lower it or train longer.",
        )
        if self._step < 0:
            self._step = trainer.global_step
        elif trainer.global_step > self._step:
            # the checkpoint was written between an optimizer step and its update
            self.update(trainer.global_step)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._bind(net_of(pl_module))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._step:  # not while gradients accumulate
            self.update(step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_average()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._show_raw()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._show_raw()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self._average.tensors:
            self._show_average()
            self._owners, self._live, self._average.tensors, self._raw = [], [], [], []

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        ema: dict[str, Any] = {"updates": self.updates, "step": self._step}
        checkpoint["ema"] = ema
        if not self._average.tensors:
            return
        # A strategy returns its state in full, perhaps only on rank 0, or sharded as the net; the average follows it.
        state = dict(checkpoint["state_dict"])
        spread = any(is_sharded(tensor) for tensor in state.values())
        averages = [self._full(i, part, spread, bool(state)) for i, part in enumerate(self._average.tensors)]
        raws = [self._full(i, part, spread, bool(state)) for i, part in enumerate(self._raw)]
        if not state:
            return
        # the task strips "net." from the names in its own hook, which may have run already
        prefix = "net." if all(f"net.{name}" in state for name in self._index) else ""
        # inside validation the net holds the average, and `_raw` the raw weights
        raw = {name: raws[i] if raws else state[prefix + name].detach() for name, i in self._index.items()}
        for name, i in self._index.items():
            state[prefix + name] = averages[i].to(self._live[i].dtype)
        checkpoint["state_dict"] = state
        ema["raw"] = raw
        if self._narrow:
            ema["average"] = {name: averages[i] for name, i in self._index.items()}

    def _full(self, i: int, part: Tensor, spread: bool, used: bool) -> Tensor:
        """Return tensor `i` from this rank's `part`: still sharded, or gathered, on the CPU if it is `used`."""
        tensor = joined(part, self._owners[i])
        if spread or not is_sharded(tensor):
            return tensor
        full = whole(tensor)
        return full.cpu() if used else full.new_empty(0)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if "ema" not in checkpoint:
            rank_zero_warn("The checkpoint holds no moving average: averaging starts from its weights.")
            return
        ema = checkpoint["ema"]
        self._average.updates, self._step = ema["updates"], ema["step"]
        if "raw" not in ema:
            return
        # Lightning has just loaded `state_dict`, the average, into the net
        net = net_of(pl_module)
        loaded = net.state_dict()
        if not ema["raw"].keys() <= loaded.keys():
            raise UserError(
                "The checkpoint's moving average has names that the net lacks: start from its weights with ckpt_path."
            )
        average = ema.get("average")
        self._restored = {
            name: part_of(average[name], loaded[name]) if average else local(loaded[name]).clone()
            for name in ema["raw"]
        }
        with torch.no_grad():
            for name, raw in ema["raw"].items():
                local(loaded[name]).copy_(part_of(raw, loaded[name]))
        if self._live:
            self._install()

    def _install(self) -> None:
        """Install a restored average, once the net is on its device."""
        if not self._restored:
            return
        if self._restored.keys() != self._index.keys():
            raise UserError(
                f"callbacks.ema.buffers={self.buffers} differs from the run that wrote the checkpoint: use its value."
            )
        by_position = {i: self._restored[name] for name, i in self._index.items()}
        self._average.tensors = [by_position[i].to(t.device, wide(t), copy=True) for i, t in enumerate(self._live)]
        self._restored = {}
