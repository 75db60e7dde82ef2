"""Horovod (Sergeev and Del Balso 2018, arXiv:1802.05799), for clusters that use its ring all-reduce."""

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lathe.errors import UserError, require

COMMAND = "horovodrun -np 2 --gloo python train.py strategy=horovod trainer.devices=2"


class Horovod(DDPStrategy):
    """Data replicas whose gradients are averaged by Horovod during the backward pass.

    Everything else (metrics, generators, BatchNorm's statistics) uses torch's process group, as under every strategy.
    Accumulated batches are averaged once, with the last of them. A parameter that no rank used keeps no gradient; one
    that some ranks used is averaged with zeros for the others, as DistributedDataParallel does with
    find_unused_parameters.

    Raises:
        UserError: Horovod is not installed, or horovodrun has not started this rank; in a step: a gradient is sparse.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("horovod") is None:
            raise UserError("strategy=horovod needs Horovod: build it with bash scripts/install_horovod.sh.")
        if "HOROVOD_RANK" not in os.environ or os.environ["HOROVOD_RANK"] != os.environ.get("RANK"):
            raise UserError(f"strategy=horovod takes its ranks from horovodrun and no other launcher: {COMMAND}")
        super().__init__()
        self._hooks: list[RemovableHandle] = []
        self._parameters: list[nn.Parameter] = []
        self._pending: list[tuple[Tensor, Tensor, Any]] = []  # gradient, contiguous copy, handle
        self._sent: set[int] = set()
        self._accumulates = False

    def setup_distributed(self) -> None:
        super().setup_distributed()
        import horovod.torch as hvd

        if not hvd.is_initialized():
            hvd.init()
        ranks = (hvd.rank(), hvd.size()) == (self.global_rank, self.world_size)
        require(ranks, "Horovod and the Trainer count ranks differently: give each host the same number of slots.")

    def configure_ddp(self) -> None:
        """Broadcast the weights, and hook each parameter to send its gradient, in place of DDP's wrapper."""
        assert self.model is not None
        _sync_module_states(self.model)
        self._parameters = list(self.model.parameters())
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad:  # one that is unfrozen later is sent after the backward pass
                self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._ready, index)))

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        self._pending, self._sent = [], set()

    def _ready(self, index: int, parameter: Tensor) -> None:
        if not self._accumulates:
            self._send(index, parameter)

    def _send(self, index: int, parameter: Tensor) -> None:
        import horovod.torch as hvd

        gradient = parameter.grad
        assert gradient is not None
        require(not gradient.is_sparse, "strategy=horovod does not average sparse gradients: use strategy=ddp.")
        self._sent.add(index)
        sent = gradient.contiguous()  # Horovod takes no others
        handle = hvd.allreduce_async_(sent, name=f"gradient.{index}", op=hvd.Average)
        self._pending.append((gradient, sent, handle))

    def post_backward(self, closure_loss: Tensor) -> None:
        """Wait for the averages, before the gradients are clipped."""
        if self._accumulates or not self._hooks:
            return
        # parameters without a hook, and those with gradients only from earlier batches of the window
        for index, parameter in enumerate(self._parameters):
            if index not in self._sent and parameter.grad is not None:
                self._send(index, parameter)
        used = torch.zeros(len(self._parameters), dtype=torch.int32)
        used[list(self._sent)] = 1
        # raises after launch.timeout if a rank is missing; Horovod would wait forever
        torch.distributed.all_reduce(used)
        for index in used.nonzero().flatten().tolist():
            if index not in self._sent:
                self._parameters[index].grad = torch.zeros_like(self._parameters[index])
                self._send(index, self._parameters[index])
        import horovod.torch as hvd

        for gradient, sent, handle in self._pending:
            hvd.synchronize(handle)
            if sent is not gradient:
                gradient.copy_(sent)
        self._pending = []

    def on_validation_start(self) -> None:
        """Broadcast rank 0's BatchNorm statistics, which the checkpoints have, unless they are synchronised."""
        assert self.model is not None
        if self._layer_sync is None:
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def teardown(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        super().teardown()
