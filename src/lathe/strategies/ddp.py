"""DistributedDataParallel with communication hooks on every backend."""

import inspect
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.strategies import DDPStrategy
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from lathe.config.types import Count
from lathe.config.validation import validated


def auto() -> None:
    """Choose no strategy: the run uses one device, or DDP with its defaults for several."""


class DDP(DDPStrategy):
    """Lightning's DDPStrategy, which never ignores a communication hook.

    `comm_hook` is fp16, bf16 (gradients are sent at half their size) or powersgd (Vogels et al. 2019).

    Raises:
        UserError: the hook is unknown, or torch does not accept the PowerSGD settings.
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
        super().__init__(
            find_unused_parameters=find_unused_parameters,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            **({} if broadcast_buffers else _without_buffer_broadcast()),
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


def _without_buffer_broadcast() -> dict[str, Any]:
    """Return the argument by the name that this torch has: 2.13 renamed it and warns about the old one."""
    known = inspect.signature(nn.parallel.DistributedDataParallel.__init__).parameters
    return {"forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers": False}


def _bfloat16(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[Tensor]:
    """Call torch's bf16_compress_hook; under its own name torch accepts it only on NCCL."""
    return default_hooks.bf16_compress_hook(state, bucket)
