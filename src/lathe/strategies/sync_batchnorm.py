"""BatchNorm over the global batch, on GPUs and on gloo."""

from typing import Any

import torch
from lightning.pytorch.plugins.layer_sync import LayerSync
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


class SyncBatchNorm(LayerSync):
    """Lets every BatchNorm of a net see the batches of all ranks (torch's SyncBatchNorm refuses tensors that are not on a GPU).

    Parameters and buffers stay the same objects under the same names; `revert` brings the plain layers back.
    """

    def apply(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm):
                module.__dict__["_plain_class"] = type(module)
                module.__class__ = _GlobalBatchNorm
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _GlobalBatchNorm):
                module.__class__ = module.__dict__.pop("_plain_class")
        return model


class _AllReduce(torch.autograd.Function):
    """The sum over ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        torch.distributed.all_reduce(total)
        return total


class _GlobalBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of all ranks' samples, from the sums of x and of its squares about a shared centre.

    The running mean serves as the centre: sums of squares about a far-off zero would lose the digits of a small variance.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.dim()}")

    def forward(self, input: Tensor) -> Tensor:
        synchronised = self.training and torch.distributed.is_available() and torch.distributed.is_initialized()
        if not synchronised or torch.distributed.get_world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        dims = [0, *range(2, input.dim())]
        shape = [1, -1] + [1] * (input.dim() - 2)
        dtype = torch.promote_types(input.dtype, torch.float32)
        x = input.to(dtype)
        centre = torch.zeros(x.shape[1], dtype=dtype, device=x.device)
        if self.running_mean is not None:
            centre = self.running_mean.detach().to(dtype, copy=True)
        shifted = x - centre.view(shape)
        local = x.numel() / max(x.shape[1], 1)
        parts = [shifted.sum(dims), shifted.square().sum(dims), torch.full((1,), local, dtype=dtype, device=x.device)]
        sums, squares, count = _AllReduce.apply(torch.cat(parts)).split([x.shape[1], x.shape[1], 1])
        count = count.detach()
        offset = sums / count
        variance = squares / count - offset.square()
        if self.training and self.running_mean is not None and self.running_var is not None:
            with torch.no_grad():
                assert self.num_batches_tracked is not None
                self.num_batches_tracked.add_(1)
                momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_((offset + centre).to(self.running_mean.dtype), momentum)
                unbiased = variance * count / (count - 1).clamp(min=1)
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        scale = torch.rsqrt(variance.clamp(min=0) + self.eps)
        normal = (shifted - offset.view(shape)) * scale.view(shape)
        if self.affine:
            normal = normal * self.weight.to(dtype).view(shape) + self.bias.to(dtype).view(shape)
        return normal.to(input.dtype)
