"""Pipeline parallelism: each rank holds a stage of the net, and micro-batches pass through the stages."""

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lathe.config.parallel_dims import Axes, axes
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import ArgumentError, require
from lathe.strategies.dtensors import MixedMeshes, install_clipping, local, reduce_together, settle
from lathe.strategies.partition import Partition, chain_of
from lathe.strategies.tensor import check_limits, parallelize, plan_of

Shape = tuple[torch.Size, torch.dtype]


class Pipeline(DDPStrategy):
    """Cuts a net's blocks into `stages` consecutive parts, one per rank, with `data` replicas.

    torch.distributed.pipelining sends micro-batches through the stages: GPipe (Huang et al. 2019, arXiv:1811.06965; all
    forward passes, then all backward passes), 1F1B (Narayanan et al. 2019, PipeDream; stores fewer activations) or
    interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473; `slices` parts per rank, less idle time). Optimization
    stays automatic: the schedule has run the backward passes when `training_step` returns, and `backward` adds its
    gradients.

    Clipping, accumulation, optimizer and callbacks work on local tensors. Checkpoints equal those of a single process.
    """

    reshapes = True
    name: ClassVar[str] = "pipeline"

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
        self._part: Any = None  # Partition, once the net is cut
        self._flow: Any = None
        self._new: dict[nn.Parameter, Tensor | None] = {}
        self._groups: dict[str, Any] = {}  # the mesh, and the process groups along its axes

    # -- the mesh

    @property
    def axes(self) -> Axes:
        """The sizes of the mesh."""
        return axes(self._sizes, self.world_size)

    @property
    def place(self) -> tuple[int, int, int]:
        """This rank's data replica, stage and tensor rank."""
        rest, tensor = divmod(self.global_rank, self.axes.tensor)
        return *divmod(rest, self.axes.stages), tensor

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.axes.data, "rank": self.place[0]}

    def setup_environment(self) -> None:
        require(
            self.axes.stages >= 2,
            f"strategy.stages={self._sizes['stages']} on {self.world_size} processes leaves nothing to cut: give at "
            "least 2 stages, or use strategy=ddp.",
        )
        super().setup_environment()
        if self._groups:
            return
        shape, (data, _, tensor) = self.axes, self.place
        names = ("data", "stages", "tensor")
        mesh = dist.device_mesh.init_device_mesh(
            self.root_device.type, (shape.data, shape.stages, shape.tensor), mesh_dim_names=names
        )
        self._groups = {"mesh": mesh, **{name: mesh[name].get_group() for name in names}}
        for d in range(shape.data):  # every rank creates all of these groups in the same order, as torch requires
            for t in range(shape.tensor):
                ends = dist.new_group([int(mesh.mesh[d, 0, t]), int(mesh.mesh[d, -1, t])])
                if (d, t) == (data, tensor):
                    self._groups["ends"] = ends  # the first and the last stage of this replica

    # -- the net

    def check(self, net: nn.Module) -> None:
        chain_of(net, self.name, self.axes.stages, self._slices)

    def shard(self, task: LightningModule) -> None:
        """Cut the task's net in place, once, before the optimizer of this stage is built."""
        net = task.get_submodule("net")
        if self._part is not None and self._part.net is net:
            return
        require(
            net._compiled_call_impl is None,
            f"compile.enabled=true compiles the whole net, which strategy={self.name} cuts: add compile.regional=true.",
        )
        self._count = count_microbatches(net, self._microbatches, self._schedule, self.axes.stages)
        size = getattr(getattr(task.trainer, "datamodule", None), "batch_size", None)
        if task.trainer.state.fn == TrainerFn.FITTING and isinstance(size, int):
            self._check_batch(size // self.axes.data)
        self._part = Partition(net, self.axes.stages, self.place[1], self._slices, self.name, self._apply_sharding)
        self._flow = Flow(self._part, self._schedule, self._count, self._groups["stages"], self.root_device)
        net.forward = self._flow.everywhere  # `net(x)` on all ranks returns outputs
        whole: Any = task
        if getattr(whole, "_make_optimizer", None) is not None:
            whole._make_optimizer = partial(self._part.make_optimizer, whole._make_optimizer)

    def _apply_sharding(self, net: nn.Module) -> None:
        """Shard the tensors of a stage; a hook for subclasses."""

    def _check_batch(self, size: int) -> None:
        require(
            size % self._count == 0,
            f"strategy.microbatches={self._count} does not divide a replica's batch of {size} samples.",
        )

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.model is not None
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
        # ranks that share a tensor start with equal values; a net may use its own generators
        state = self._part.net.state_dict()
        shared = {"data": list(state) if self.axes.data > 1 else []}
        shared["ends"] = self._part.outside if self._part.first or self._part.last else []
        for kind, names in shared.items():
            for name in names:
                dist.broadcast(
                    local(state[name]).detach(), dist.get_global_rank(self._groups[kind], 0), self._groups[kind]
                )
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting:
            uncounted = () if self._part.first else self._part.shared()
            install_clipping(self.precision_plugin, self._groups["stages"], uncounted)

    # -- steps

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss, equal on all stages; `backward` adds the batch's gradients."""
        part, stages = self._part, self._groups["stages"]
        task: Any = self.lightning_module
        self._check_batch(len(batch[0]))
        batches = task.split_batch(batch, self._count)
        share = 1.0 / (self._count * task.trainer.accumulate_grad_batches)
        scaler = getattr(self.precision_plugin, "scaler", None)
        losses: list[Tensor] = []

        def judge(outputs: Tensor, index: Tensor) -> Tensor:
            loss: Tensor = task.training_loss(outputs, batches[int(index)])
            losses.append(loss.detach().float())
            return (loss if scaler is None else scaler.scale(loss)) * share

        parameters = [p for p in part.net.parameters() if p.requires_grad]
        accumulated = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        with self.precision_plugin.train_step_context():
            self._flow.step(batch[0], batches[0][0], judge)
        for p in parameters:
            settle(p)
        self._new = {p: p.grad for p in parameters}
        for p, gradient in zip(parameters, accumulated, strict=True):
            p.grad = gradient
        if not part.last:
            task.add_zeros("train")
        counts = task.step_counts or [torch.zeros((), dtype=torch.float32, device=self.root_device)]
        shared = torch.zeros(2, dtype=torch.float32, device=self.root_device)
        if part.last:
            shared = torch.stack((torch.stack(losses).mean(), torch.stack(counts).sum().float()))
        dist.broadcast(shared, dist.get_global_rank(stages, self.axes.stages - 1), stages)
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
            if self._part.first or self._part.last:
                reduce_together(self._part.shared(), self._groups["ends"])
            if self.axes.data > 1:
                parameters = [p for p in self._part.net.parameters() if p.requires_grad]
                reduce_together(parameters, self._groups["data"], self.axes.data)
        closure_loss = self.precision_plugin.post_backward(scaled, task)
        self.post_backward(closure_loss)
        return closure_loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch, self.precision_plugin.val_step_context())

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch, self.precision_plugin.test_step_context())

    def _evaluate(self, split: str, batch: Any, context: AbstractContextManager[None]) -> None:
        task: Any = self.lightning_module
        with context:
            outputs = self._flow.forward(batch[0])
            if outputs is not None:
                task.evaluate_outputs(split, outputs, batch)
        if outputs is None:
            task.add_zeros(split)  # outside the context, which may make half precision the default

    # -- checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        data, _, tensor = self.place
        if data == 0:
            self._part.gather(checkpoint, self._groups["stages"], send=tensor == 0)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
        if self._part is not None:
            self._part.localize(checkpoint)
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [self._part.local_optimizer_state(state) for state in checkpoint["optimizer_states"]]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})


class ThreeD(MixedMeshes, Pipeline):
    """A pipeline of `stages` of `tensor` ranks (by the net's `tensor_plan`), with `data` replicas.

    Ranks count through tensor fastest, then stages, then data: the ranks that communicate most are neighbours
    (Narayanan et al. 2021, arXiv:2104.04473). With `sequence_parallel`, activations between the sharded layers are
    slices of dimension 1, and only a slice is sent from stage to stage.
    """

    name = "3d"

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

    def check(self, net: nn.Module) -> None:
        super().check(net)
        if self.axes.tensor > 1:
            plan_of(net)
            check_limits(net, self.axes.tensor)

    def _apply_sharding(self, net: nn.Module) -> None:
        if self.axes.tensor > 1:
            parallelize(net, self._groups["mesh"]["tensor"], self._sequence_parallel)


def count_microbatches(net: nn.Module, setting: int | None, schedule: str, stages: int) -> int:
    """Return the number of micro-batches per batch.

    By default it is 1 for a net with BatchNorm, which needs the whole batch; a larger number warns on rank 0.
    """
    norm = any(isinstance(module, _BatchNorm) for module in net.modules())
    count = setting if setting is not None else 1 if norm else 2 * stages
    why = f" (null is 1 for {type(net).__name__}, which has BatchNorm)" if norm and setting is None else ""
    if norm and count > 1:
        rank_zero_warn(
            f"strategy.microbatches={count}: BatchNorm sees one micro-batch at a time, so the result depends on this "
            "number."
        )
    key = f"strategy.microbatches={count}{why}: strategy.schedule={schedule}"
    enough = schedule != "1f1b" or count >= stages
    require(enough, f"{key} needs at least strategy.stages={stages}; raise it, or use strategy.schedule=gpipe.")
    rounds = max(1, count // stages)
    equal = schedule != "interleaved" or count % rounds == 0
    require(equal, f"{key} runs them in {rounds} equal rounds; use a multiple of strategy.stages={stages}.")
    return count


class Flow:
    """Runs a cut net with the other stages of `group`. Methods are collective, with the same input on all.

    A forward pass over zeros in evaluation mode finds the shapes between stages: it changes no statistics and draws no
    random numbers. torch's own inference would call modules and loss once more in training mode.
    """

    def __init__(
        self, part: Partition, schedule: str, microbatches: int, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self.part, self.kind, self.microbatches, self.group, self.device = part, schedule, microbatches, group, device
        self._shapes: dict[Shape, list[Shape]] = {}
        self._schedules: dict[Shape, Any] = {}
        self._judge: Callable[[Tensor, Tensor], Tensor] | None = None

    def _rank(self, k: int) -> int:
        return dist.get_global_rank(self.group, k % self.part.stages)

    def shapes(self, x: Tensor) -> list[Shape]:
        """Return shape and dtype before each slice and after the last, for an input like `x`."""
        key = (x.shape, x.dtype)
        if key not in self._shapes:
            flow: list[Shape] = [key]
            modes = [(module, module.training) for module in self.part.net.modules()]
            self.part.net.eval()
            try:
                for k in range(self.part.total):
                    box: list[Any] = [None]
                    if k in self.part.slices:
                        shape, dtype = flow[-1]
                        with torch.no_grad():
                            out = self.part.slices[k](torch.zeros(shape, dtype=dtype, device=self.device))
                        box = [(tuple(out.shape), out.dtype)]
                    dist.broadcast_object_list(box, src=self._rank(k), group=self.group, device=self.device)
                    flow.append((torch.Size(box[0][0]), box[0][1]))
            finally:
                for module, training in modes:
                    module.training = training
            self._shapes[key] = flow
        return self._shapes[key]

    def step(self, x: Tensor, part: Tensor, judge: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Run forward and backward passes of all micro-batches; gradients accumulate in the parameters.

        `part` is a micro-batch, for shapes. `judge` returns the last stage's loss, given outputs and the number of the
        micro-batch as a tensor of one element.
        """
        key = (part.shape, part.dtype)
        if key not in self._schedules:
            self._schedules[key] = self._schedule(self.shapes(part))
        self._judge = judge
        schedule = self._schedules[key]
        # targets are numbers of micro-batches, whose targets may be several tensors
        target = torch.arange(self.microbatches) if self.part.last else None
        # newer torch can skip merging the outputs
        merges = "return_outputs" in inspect.signature(schedule.step).parameters
        options = {"return_outputs": False} if merges else {}
        schedule.step(*([x] if self.part.first else []), target=target, **options)
        self._judge = None

    def _schedule(self, shapes: list[Shape]) -> Any:
        def empty(k: int, requires_grad: bool) -> Tensor:
            shape, dtype = shapes[k]
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=requires_grad)

        stages: list[Any] = [
            PipelineStage(
                submodule,
                k,
                self.part.total,
                self.device,
                group=self.group,
                input_args=empty(k, k > 0),
                output_args=empty(k + 1, True),
            )
            for k, submodule in self.part.slices.items()
        ]
        options: dict[str, Any] = {
            "n_microbatches": self.microbatches,
            "loss_fn": lambda outputs, target: self._judge(outputs, target),  # type: ignore[misc]  # set for each step
            "scale_grads": False,  # the loss is scaled before half precision could overflow
        }
        if self.kind == "interleaved":
            return ScheduleInterleaved1F1B(stages, **options)
        return (ScheduleGPipe if self.kind == "gpipe" else Schedule1F1B)(stages[0], **options)

    def forward(self, x: Tensor) -> Tensor | None:
        """Return the net's outputs on the last stage, None on the others; any batch size."""
        sent: list[tuple[Any, Tensor]] = []
        outputs = []
        for chunk in x.chunk(min(2 * self.part.stages, max(len(x), 1))):
            shapes = self.shapes(chunk)
            for k, submodule in self.part.slices.items():
                value = chunk
                if k > 0:
                    shape, dtype = shapes[k]
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                    dist.recv(value, src=self._rank(k - 1), group=self.group)
                value = submodule(value)
                if k == self.part.total - 1:
                    outputs.append(value)
                else:
                    sent.append((dist.isend(value, dst=self._rank(k + 1), group=self.group), value))
        for work, _ in sent:
            work.wait()
        return torch.cat(outputs) if outputs else None

    @torch.no_grad()
    def everywhere(self, x: Tensor) -> Tensor:
        """Return the net's outputs on every stage, as `net(x)` does while the net is cut."""
        outputs = self.forward(x)
        shape, dtype = self.shapes(x)[-1]
        outputs = torch.empty(shape, dtype=dtype, device=self.device) if outputs is None else outputs.contiguous()
        dist.broadcast(outputs, src=self._rank(self.part.total - 1), group=self.group)
        return outputs
