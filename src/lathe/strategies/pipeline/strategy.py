"""Pipeline parallelism: each rank holds a stage of the net, and micro-batches pass through the stages."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lathe.config.parallel_dims import Axes, axes
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, require
from lathe.strategies.pipeline.cut import Cut, enough_blocks
from lathe.strategies.pipeline.flow import Flow, count_microbatches
from lathe.strategies.pipeline.gradients import (
    clip_by_norm,
    clip_by_value,
    reduce_together,
    settle,
    share_overflow,
)
from lathe.strategies.pipeline.groups import agree, make_groups
from lathe.strategies.pipeline.state import gather, local_optimizer_state, localise

PRECISIONS = ("64-true", "32-true", "16-mixed", "bf16-mixed", "bf16-true")


class Pipeline(DDPStrategy):
    """Cuts a net's blocks into `stages` consecutive parts, one per rank, with `data` replicas.

    torch.distributed.pipelining sends micro-batches through the stages: GPipe (Huang et al. 2019, arXiv:1811.06965; all
    forward passes, then all backward passes), 1F1B (Narayanan et al. 2019, PipeDream; stores fewer activations) or
    interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473; `slices` parts per rank, less idle time). Optimization
    stays automatic: the schedule has run the backward passes when `training_step` returns, and `backward` adds its
    gradients.

    Clipping, accumulation, optimizer and callbacks work on local tensors. Checkpoints equal those of a single process.

    Raises:
        UserError: a setting is impossible, the net can't be cut so, or the precision is not in PRECISIONS.
    """

    reshapes = True
    name = "pipeline"
    precisions: tuple[str, ...] = PRECISIONS

    @validated
    def __init__(
        self,
        stages: Count | None = None,
        data: Count | None = 1,
        microbatches: Count | None = None,
        schedule: Literal["gpipe", "1f1b", "interleaved"] = "gpipe",
        slices: Count = 2,
    ) -> None:
        super().__init__()
        if schedule == "interleaved" and slices < 2:
            raise ArgumentError(f"slices={slices}: schedule=interleaved needs at least 2; or use 1f1b.")
        self._sizes: dict[str, int | None] = {"data": data, "stages": stages}
        self._schedule = schedule
        self._slices = slices if schedule == "interleaved" else 1
        self._microbatches = microbatches
        self._count = 1
        self._cut: Cut | None = None
        self._flow: Flow | None = None
        self._new: dict[nn.Parameter, Tensor | None] = {}
        self._groups: dict[str, Any] = {}

    # -- the mesh

    @property
    def axes(self) -> Axes:
        """Return the sizes of the mesh."""
        return axes(self._sizes, self.world_size)

    @property
    def place(self) -> tuple[int, int, int]:
        """Return this rank's data replica, stage and tensor rank."""
        rest, tensor = divmod(self.global_rank, self.axes.tensor)
        return *divmod(rest, self.axes.stages), tensor

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.axes.data, "rank": self.place[0]}

    def setup_environment(self) -> None:
        stages, world = self._sizes["stages"], self.world_size
        enough = self.axes.stages >= 2
        require(
            enough,
            f"strategy.stages={stages} on {world} processes leaves nothing to cut: give at least 2 stages, or use "
            "strategy=ddp.",
        )
        precision = str(self.precision_plugin.precision)
        require(
            precision in self.precisions,
            f"precision={precision}: strategy={self.name} takes {', '.join(self.precisions)}.",
        )
        super().setup_environment()
        if self._groups:
            return
        self._groups = make_groups(self.root_device.type, self.axes, self.place)

    # -- the net

    def check(self, net: nn.Module) -> None:
        enough_blocks(net, self.axes.stages, self._slices, self.name)

    def shard(self, task: LightningModule) -> None:
        """Cut the task's net in place, once, before the optimizer of this stage is built."""
        net = task.get_submodule("net")
        if self._cut is not None and self._cut.net is net:
            return
        if net._compiled_call_impl is not None:
            raise UserError(
                f"compile.enabled=true compiles the whole net, which strategy={self.name} cuts: add "
                "compile.regional=true."
            )
        self._count = count_microbatches(net, self._microbatches, self._schedule, self.axes.stages)
        module = getattr(task.trainer, "datamodule", None)
        size = getattr(module, "batch_size", None)
        if task.trainer.state.fn == TrainerFn.FITTING and isinstance(size, int):
            self._check_batch(size // self.axes.data, f"data.batch_size={size}")
        self._cut = Cut(net, self.axes.stages, self.place[1], self._slices, self.name, self._spread)
        self._flow = Flow(self._cut, self._schedule, self._count, self._groups["stages"], self.root_device)
        net.forward = self._flow.everywhere  # `net(x)` on all ranks returns outputs
        whole: Any = task
        if getattr(whole, "_make_optimizer", None) is not None:
            whole._make_optimizer = partial(self._cut.make_optimizer, whole._make_optimizer)

    def _spread(self, net: nn.Module) -> None:
        """Shard the tensors of a stage; a hook for subclasses."""

    def _check_batch(self, size: int, said: str) -> None:
        divisor = f"which do not divide into strategy.microbatches={self._count}: choose a divisor of {size}."
        require(size % self._count == 0, f"{said} gives each replica {size} samples, {divisor}")

    @property
    def _parts(self) -> tuple[Cut, Flow]:
        assert self._cut is not None, "Task.configure_model has cut the net"
        assert self._flow is not None
        return self._cut, self._flow

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
        cut, _ = self._parts
        self.accelerator.setup(trainer)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and self._layer_sync is not None and self.axes.data > 1:
            if hasattr(self._layer_sync, "group"):
                self._layer_sync.group = self._groups["data"]
                self.model = self._layer_sync.apply(self.model)
            else:  # Lightning's own, on GPUs, has no groups
                task: Any = self.lightning_module
                nn.SyncBatchNorm.convert_sync_batchnorm(task.net, self._groups["data"])
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        agree(cut, self._groups, self.axes.data)
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            clipping: Any = self.precision_plugin
            clipping.clip_grad_by_norm = self._clip_by_norm
            clipping.clip_grad_by_value = self._clip_by_value
            share_overflow(self.precision_plugin)

    # -- steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, equal on all stages; `backward` adds the batch's gradients."""
        cut, flow = self._parts
        task: Any = self.lightning_module
        self._check_batch(len(batch[0]), "This batch")
        parts = task.split_batch(batch, self._count)
        share = 1.0 / (self._count * task.trainer.accumulate_grad_batches)
        scaler = getattr(self.precision_plugin, "scaler", None)
        losses: list[Tensor] = []

        def judge(outputs: Tensor, index: Tensor) -> Tensor:
            loss: Tensor = task.training_loss(outputs, parts[int(index)])
            losses.append(loss.detach().float())
            return (loss if scaler is None else scaler.scale(loss)) * share

        parameters = [p for p in cut.net.parameters() if p.requires_grad]
        kept = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with self.precision_plugin.train_step_context():
            flow.step(batch[0], parts[0][0], judge)
        for p in parameters:
            settle(p)
        self._new = {p: p.grad for p in parameters}
        for p, gradient in zip(parameters, kept, strict=True):
            p.grad = gradient
        if not cut.last:
            task.add_zeros("train")
        counts = task.step_counts or [torch.zeros((), dtype=torch.float32, device=self.root_device)]
        shared = torch.zeros(2, dtype=torch.float32, device=self.root_device)
        if cut.last:
            shared = torch.stack((torch.stack(losses).mean(), torch.stack(counts).sum().float()))
        dist.broadcast(
            shared, dist.get_global_rank(self._groups["stages"], self.axes.stages - 1), self._groups["stages"]
        )
        if task.step_counts is not None:
            task.step_counts[:] = [shared[1]]
        return shared[0]

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Add the gradients of `training_step`; reduce them over ranks before an optimizer step."""
        task = self.lightning_module
        assert task is not None
        self.pre_backward(closure_loss)
        scaled = self.precision_plugin.pre_backward(closure_loss, task)
        window = task.trainer.fit_loop.epoch_loop.window  # type: ignore[attr-defined]
        for p, gradient in self._new.items():
            if gradient is not None and window is not None:
                gradient.mul_(window.weight.to(gradient.device))
            if p.grad is None:
                p.grad = gradient
            elif gradient is not None:
                p.grad.add_(gradient)
        self._new = {}
        if not task.trainer.fit_loop._should_accumulate():
            self._reduce()
        closure_loss = self.precision_plugin.post_backward(scaled, task)
        self.post_backward(closure_loss)
        return closure_loss

    def _reduce(self) -> None:
        cut, _ = self._parts
        if cut.first or cut.last:
            reduce_together(cut.shared(), self._groups["ends"])
        if self.axes.data > 1:
            reduce_together(
                [p for p in cut.net.parameters() if p.requires_grad], self._groups["data"], 1.0 / self.axes.data
            )

    def _clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        cut, _ = self._parts
        twice = set() if cut.first else {id(p) for p in cut.shared()}
        parameters = self.precision_plugin.main_params(optimizer)
        clip_by_norm(list(parameters), clip_val, self._groups["model"], twice, self.place[2] == 0)

    def _clip_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        clip_by_value(list(self.precision_plugin.main_params(optimizer)), clip_val)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch, self.precision_plugin.val_step_context())

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch, self.precision_plugin.test_step_context())

    def _evaluate(self, split: str, batch: Any, context: AbstractContextManager[None]) -> None:
        task: Any = self.lightning_module
        with context:
            outputs = self._parts[1].forward(batch[0])
            if outputs is not None:
                task.evaluate_outputs(split, outputs, batch)
        if outputs is None:
            task.add_zeros(split)  # outside the context, which may make half precision the default

    # -- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        data, _, tensor = self.place
        if data == 0:
            ranks = self._groups["mesh"].mesh[0, :, tensor].tolist()
            gather(checkpoint, self._parts[0], ranks, self.root_device, send=tensor == 0)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._cut is not None:
            localise(checkpoint, self._cut)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [local_optimizer_state(state, self._parts[0]) for state in checkpoint["optimizer_states"]]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
