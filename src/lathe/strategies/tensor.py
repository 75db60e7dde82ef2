"""Tensor parallelism: shards a net's layers by the plan that the net declares.

The plan's words are Megatron's column and row shards (Shoeybi et al. 2019, arXiv:1909.08053) and sequence parallelism
(Korthikanti et al. 2022, arXiv:2205.05198): between the sharded layers, each rank holds a slice of dimension 1, and
norms work on that slice.
"""

import re
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from lathe.config.parallel_dims import axes
from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import did_you_mean, require
from lathe.strategies.dtensors import MixedMeshes, reduce_together, settle
from lathe.strategies.fsdp import ShardedStrategy, shard_net


class TensorParallel(MixedMeshes, ShardedStrategy):
    """Shards each layer over `tensor` ranks with the same batch; `data` groups split the global batch.

    With `fsdp`, a rank's shards are sharded again over the data replicas (2D parallelism); without it, replicas are
    equal and average their gradients. With `sequence_parallel`, activations between the sharded layers are slices of
    dimension 1. Logits are gathered: every rank of a group computes the whole loss.
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

    def check(self, net: nn.Module) -> None:
        """Raise UserError if the plan or the limits of a plain net do not allow these sizes."""
        plan_of(net)
        check_limits(net, axes({"tensor": self.tensor, "data": self.data}, self.world_size).tensor)

    def make_mesh(self) -> DeviceMesh:
        sizes = axes({"tensor": self.tensor, "data": self.data}, self.world_size)
        return init_device_mesh(
            self.root_device.type, (sizes.data, sizes.tensor), mesh_dim_names=("data_parallel", "tensor_parallel")
        )

    def apply_sharding(self, task: LightningModule, net: nn.Module) -> None:
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

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Complete the sums of sequence-parallel layers and, without fsdp, average over the replicas.

        It runs after each backward pass: gradients of earlier micro-batches are equal on all replicas, so averaging
        them again changes nothing.
        """
        super().post_backward(closure_loss)
        assert self.lightning_module is not None
        parameters = [parameter for parameter in self.lightning_module.parameters() if parameter.grad is not None]
        for parameter in parameters:
            settle(parameter)
        replicas = self.device_mesh["data_parallel"]
        if not self.fsdp and replicas.size() > 1:
            reduce_together(parameters, replicas.get_group(), replicas.size())


# -- a net's plan


def styles(in_slices: bool) -> dict[str, ParallelStyle | None]:
    """Return torch's style for each word of a plan; between the sharded layers ranks hold slices or the whole."""
    stream, whole = Shard(1) if in_slices else Replicate(), Replicate()
    sliced: dict[str, ParallelStyle] = {
        "sequence": SequenceParallel(use_local_output=True),
        "split": PrepareModuleOutput(output_layouts=whole, desired_output_layouts=stream),
        "join": PrepareModuleInput(input_layouts=stream, desired_input_layouts=whole, use_local_output=True),
    }
    return {
        "column": ColwiseParallel(input_layouts=stream),
        "row": RowwiseParallel(output_layouts=stream),
        "gather": ColwiseParallel(input_layouts=stream, output_layouts=stream),
        "logits": ColwiseParallel(input_layouts=stream, output_layouts=whole),
        "vocab": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        **{word: style if in_slices else None for word, style in sliced.items()},
    }


def plan_of(net: nn.Module) -> dict[str, str]:
    """Return the word of each module, by name: the net's `tensor_plan` with its patterns expanded."""
    name = type(net).__name__
    plan: dict[str, str] = getattr(net, "tensor_plan", None) or {}
    require(
        bool(plan),
        f"strategy=tensor cuts a net by its `tensor_plan`, and {name} declares none: use strategy=fsdp or declare one.",
    )
    known, word_by_module = styles(True), dict[str, str]()
    for pattern, word in plan.items():
        require(word in known, f"{name}.tensor_plan[{pattern!r}]={word!r}: {did_you_mean(word, list(known))}")
        expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
        matches = [module_name for module_name, _ in net.named_modules() if expression.fullmatch(module_name)]
        require(bool(matches), f"{name}.tensor_plan[{pattern!r}] fits no module of the net.")
        word_by_module |= dict.fromkeys(matches, word)
    return word_by_module


def check_limits(net: nn.Module, size: int) -> None:
    """Raise UserError if `size` does not divide a number in the net's `tensor_limits`."""
    for key, number in getattr(net, "tensor_limits", {}).items():
        require(number % size == 0, f"model.net.{key}={number} does not divide by strategy.tensor={size}.")


def parallelize(net: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Shard `net` by its plan, in place, with ties. A plan without `split` disables sequence parallelism."""
    word_by_module = plan_of(net)
    check_limits(net, mesh.size())
    in_slices = sequence_parallel and "split" in word_by_module.values()
    by_word = styles(in_slices)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in net.modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((module, own_name))
    for name, word in word_by_module.items():
        module, style = net.get_submodule(name), by_word[word]
        if word == "split" and in_slices:
            module.register_forward_hook(partial(check_length, mesh.size()))  # runs before the hook that slices
        if style is not None:
            parallelize_module(module, mesh, style, src_data_rank=None)  # all ranks have the same weights
    for (first, name), *others in places.values():  # torch shards each use of a tied weight by itself
        for module, own_name in others:
            shared, other = first.get_parameter(name), module.get_parameter(own_name)
            require(
                getattr(shared, "placements", None) == getattr(other, "placements", None),
                f"{type(net).__name__}.tensor_plan shards two uses of the weight {own_name} in different ways. Give "
                "both modules words that go together, such as vocab and logits.",
            )
            setattr(module, own_name, shared)


def check_length(size: int, module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Raise UserError if the sequence in dimension 1 does not divide by `size`."""
    require(
        output.shape[1] % size == 0,
        f"strategy.sequence_parallel=true: a sequence of {output.shape[1]} tokens does not divide by "
        f"strategy.tensor={size}. Use strategy.sequence_parallel=false, or another length.",
    )
