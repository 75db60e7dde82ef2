"""DistributedDataParallel with communication hooks, and BatchNorm over the global batch, on GPUs and on gloo."""

import inspect
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from lightning.pytorch.strategies import DDPStrategy
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.config.types import Count
from lathe.config.validation import validated


def auto() -> None:
    """Choose no strategy: the run uses one device, or DDP with its defaults for several."""


class DDP(DDPStrategy):
    """Lightning's DDPStrategy, which never ignores a communication hook.

    `comm_hook` is fp16, bf16 (gradients are sent at half their size) or powersgd (Vogels et al. 2019).
    """

    @validated
    def __init__(
        self,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: Count = 25,
        comm_hook: Literal["fp16", "bf16", "powersgd"] | None = None,
        powersgd_rank: Count = 1,
        powersgd_start_step: Annotated[int, Field(ge=2)] = 1000,
    ) -> None:
        # torch 2.13 has renamed the argument, and warns about the old name
        known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        buffers: dict[str, Any] = {} if broadcast_buffers else {name: False}
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            **buffers,
        )
        self._hook_name, self._rank, self._start = comm_hook, powersgd_rank, powersgd_start_step

    def _register_ddp_hooks(self) -> None:
        # Lightning registers hooks only on CUDA, and does not warn on other devices
        if self._hook_name is None:
            return
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        if self._hook_name == "powersgd":
            state = powerSGD_hook.PowerSGDState(
                process_group=None, matrix_approximation_rank=self._rank, start_powerSGD_iter=self._start
            )
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif self._hook_name == "fp16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            self.model.register_comm_hook(None, _bfloat16)


def _bfloat16(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's bf16_compress_hook; under its own name torch accepts it only on NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)


class SyncBatchNorm(LayerSync):
    """Makes every BatchNorm use the batches of all ranks. torch's SyncBatchNorm needs a GPU.

    Parameters and buffers stay the same objects under the same names; `revert` restores the plain layers. `group` holds
    the ranks whose batches are combined; None is all ranks.
    """

    group: torch.distributed.ProcessGroup | None = None

    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, (nn.SyncBatchNorm, _GlobalBatchNorm)):
                module.__dict__["_plain_class"] = type(module)
                module.__dict__["_group"] = self.group
                module.__class__ = _GlobalBatchNorm  # parameters, hooks and names stay
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _GlobalBatchNorm):
                module.__class__ = module.__dict__.pop("_plain_class")  # as in apply
                del module.__dict__["_group"]
        return model


class _AllGather(torch.autograd.Function):
    """Gathers x [k] of a group's ranks as [ranks, k]; gradients of all ranks are summed per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup | None) -> Tensor:
        ctx.group = group
        rows = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(rows, x.contiguous(), group=group)
        return torch.stack(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total[torch.distributed.get_rank(ctx.group)], None


class _GlobalBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics cover all ranks' samples.

    Each rank's mean and centered sum of squares are combined as by Chan et al. 1979: sums of squares about zero would
    lose the digits of a variance that is small compared with the mean.
    """

    def _check_input_dim(self, x: Tensor) -> None:
        pass  # one class for 1 to 3 dimensions

    def forward(self, x: Tensor) -> Tensor:
        synchronised = self.training and torch.distributed.is_available() and torch.distributed.is_initialized()
        group: torch.distributed.ProcessGroup | None = self.__dict__["_group"]
        if not synchronised or torch.distributed.get_world_size(group) == 1:
            return super().forward(x)
        dims = [0, *range(2, x.dim())]
        shape = [1, -1] + [1] * (x.dim() - 2)
        input_dtype, dtype = x.dtype, torch.promote_types(x.dtype, torch.float32)
        x = x.to(dtype)
        local = x.numel() // max(x.shape[1], 1)
        own_mean = x.sum(dims) / max(local, 1)
        own_squares = (x - own_mean.view(shape)).square().sum(dims)
        rows = _AllGather.apply(torch.cat([own_mean, own_squares, x.new_full((1,), local)]), group)
        means, squares, counts = rows.split([x.shape[1], x.shape[1], 1], dim=1)
        counts = counts.detach()
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        variance = (squares + counts * (means - mean).square()).sum(0) / count
        if self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        scale = torch.rsqrt(variance + self.eps)
        normal = (x - mean.view(shape)) * scale.view(shape)
        if self.affine:
            normal = normal * self.weight.to(dtype).view(shape) + self.bias.to(dtype).view(shape)
        return normal.to(input_dtype)
