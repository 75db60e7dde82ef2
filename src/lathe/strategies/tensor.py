"""Tensor parallelism: shards a net's layers by the plan that the net declares."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lathe.config.parallel_dims import axes
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.strategies.clipping import reduce_partial
from lathe.strategies.fsdp import shard_net
from lathe.strategies.one_by_one import as_asked_for, step_one_by_one
from lathe.strategies.sharded import ShardedStrategy
from lathe.strategies.tensor_plan import check_limits, parallelize, plan_of


class TensorParallel(ShardedStrategy):
    """Shards each layer over `tensor` ranks with the same batch; `data` groups split the global batch.

    With `fsdp`, a rank's shards are sharded again over the data replicas (2D parallelism); without it, replicas are
    equal and average their gradients. With `sequence_parallel`, activations between the sharded layers are slices of
    dimension 1. Logits are gathered: every rank of a group computes the whole loss.

    Raises:
        UserError: the sizes do not multiply to the number of processes, or the net can't be sharded so.
    """

    name = "tensor"

    @validated
    def __init__(
        self,
        tensor: Count | None = None,
        data: Count | None = 1,
        sequence_parallel: bool = True,
        fsdp: bool = True,
        reshard_after_forward: bool | None = None,
        checkpoint: Literal["full", "sharded"] = "full",
    ) -> None:
        super().__init__(checkpoint)
        self.tensor, self.data = tensor, data
        self.sequence_parallel, self.fsdp, self.reshard_after_forward = sequence_parallel, fsdp, reshard_after_forward
        self._several_meshes = False

    def check(self, net: nn.Module) -> None:
        """Raise UserError if the plan or the limits of a plain net do not allow these sizes."""
        plan_of(net)
        check_limits(net, axes({"tensor": self.tensor, "data": self.data}, self.world_size).tensor)

    def make_mesh(self) -> DeviceMesh:
        sizes = axes({"tensor": self.tensor, "data": self.data}, self.world_size)
        return init_device_mesh(
            self.root_device.type, (sizes.data, sizes.tensor), mesh_dim_names=("data_parallel", "tensor_parallel")
        )

    def spread(self, task: LightningModule, net: nn.Module) -> None:
        replicas = self.device_mesh["data_parallel"]
        if self._layer_sync is not None and replicas.size() > 1:
            if hasattr(self._layer_sync, "group"):
                self._layer_sync.group = replicas.get_group()
            self._layer_sync.apply(task)
        net = task.get_submodule("net")
        parallelize(net, self.device_mesh["tensor_parallel"], self.sequence_parallel)
        if self.fsdp and replicas.size() > 1:
            shard_net(
                net,
                replicas,
                precision=str(self.precision_plugin.precision),
                min_params=100_000,
                reshard_after_forward=self.reshard_after_forward,
                offload=OffloadPolicy(),
            )

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        for optimizer in self.optimizers:
            self._one_by_one(optimizer)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Complete the sums of sequence-parallel layers and, without fsdp, average over the replicas.

        It runs after each backward pass: gradients of earlier micro-batches are equal on all replicas, so averaging
        them again changes nothing.
        """
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        parameters = [parameter for parameter in self.lightning_module.parameters() if parameter.grad is not None]
        for parameter in parameters:
            reduce_partial(parameter)
        replicas = self.device_mesh["data_parallel"]
        if not self.fsdp and replicas.size() > 1:
            for parameter in parameters:
                gradient = parameter.grad
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                assert isinstance(local, torch.Tensor)
                torch.distributed.all_reduce(local, group=replicas.get_group())
                local.div_(replicas.size())

    # -- optimizers

    def _one_by_one(self, optimizer: Optimizer) -> None:
        self._several_meshes = step_one_by_one(optimizer, "tensor")

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        return as_asked_for(state) if self._several_meshes else state

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        for optimizer in self.optimizers:
            self._one_by_one(optimizer)
