"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv:2304.11277)."""

from collections import Counter
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import UserError
from lathe.nets import blocks_of
from lathe.strategies.sharded import ShardedStrategy


class FSDP(ShardedStrategy):
    """Shards parameters, gradients and optimizer state over ranks, which get slices of the global batch.

    The parameters of one unit at a time are gathered for its forward and backward pass. Units are the net's `blocks`,
    or in a net without them the smallest modules of at least `min_params` parameters. The rest belongs to the root,
    which is gathered as a whole. On a single process the net is not sharded, except with offload or a sharded
    checkpoint.

    `replicas` is the number of groups of ranks with a full copy each (hybrid sharding); parameters are sharded within a
    group.

    Raises:
        UserError: `replicas` does not divide the ranks.
    """

    name = "fsdp"
    keeps_parameters = True

    @validated
    def __init__(
        self,
        min_params: Count = 100_000,
        reshard_after_forward: bool | None = None,
        cpu_offload: bool = False,
        replicas: Count = 1,
        checkpoint: Literal["full", "sharded"] = "full",
    ) -> None:
        super().__init__(checkpoint)
        self.min_params, self.replicas = min_params, replicas
        self.reshard_after_forward, self.cpu_offload = reshard_after_forward, cpu_offload
        self._alone = False

    def make_mesh(self) -> DeviceMesh:
        if self.world_size % self.replicas:
            raise UserError(f"strategy.replicas={self.replicas} does not divide the {self.world_size} processes.")
        kind = self.root_device.type
        if self.replicas == 1:
            return init_device_mesh(kind, (self.world_size,), mesh_dim_names=("data_parallel",))
        shape = (self.replicas, self.world_size // self.replicas)
        return init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def apply_sharding(self, task: LightningModule, net: nn.Module) -> None:
        if self.world_size == 1 and not self.cpu_offload and not self._save_distributed_checkpoint:
            if not self._alone:  # a test shards once more
                rank_zero_warn("strategy=fsdp shares the net out among processes, and there is one: it stays whole.")
            self._alone = True
            return
        if self._layer_sync is not None and self.world_size > 1:
            self._layer_sync.apply(task)
        shard_net(
            task.get_submodule("net"),
            self.device_mesh,
            precision=str(self.precision_plugin.precision),
            min_params=self.min_params,
            reshard_after_forward=self.reshard_after_forward,
            offload=CPUOffloadPolicy(self.root_device.type == "cuda") if self.cpu_offload else OffloadPolicy(),
        )

    def model_to_device(self) -> None:
        if not self.cpu_offload:  # fully_shard has already moved the buffers
            super().model_to_device()


def shard_net(
    net: nn.Module,
    mesh: DeviceMesh,
    *,
    precision: str,
    min_params: int,
    reshard_after_forward: bool | None,
    offload: OffloadPolicy,
) -> None:
    """Apply `fully_shard` to the units of `net`, then to `net`.

    In mixed precision, parameters are gathered and used in the 16-bit format, and gradients are reduced in float32.
    BatchNorm layers stay in float32, as under autocast: their kernels do not mix 16-bit parameters with float32
    statistics.
    """
    options: dict[str, Any] = {"mesh": mesh, "offload_policy": offload}
    narrow = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    policy = MixedPrecisionPolicy()
    if narrow is not None:
        policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    for unit in [*units(net, min_params), net]:
        # null: torch keeps the root gathered, which backward needs first
        options["reshard_after_forward"] = reshard_after_forward if unit is not net else None
        norms: list[nn.Module] = [
            module for module in unit.modules() if isinstance(module, _BatchNorm) and _unsharded(module)
        ]
        if narrow is not None and norms:  # one group, gathered at once
            fully_shard(norms, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        fully_shard(unit, mp_policy=policy, **options)


def units(net: nn.Module, min_params: int) -> list[nn.Module]:
    """Return the modules that are gathered separately, inner before outer; shared parameters are in none."""
    blocks = list(dict.fromkeys(blocks_of(net)))
    if blocks:
        return [block for block in blocks if any(True for _ in block.parameters())]
    found: list[nn.Module] = []
    _collect(net, min_params, _shared(net), found)
    return [module for module in found if module is not net]


def _collect(module: nn.Module, min_params: int, shared: set[nn.Parameter], found: list[nn.Module]) -> int:
    """Append the smallest units in `module` (or itself); return the number of its parameters in no unit."""
    loose = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter not in shared)
    loose += sum(_collect(child, min_params, shared, found) for child in module.children())
    whole = not any(parameter in shared for parameter in module.parameters())
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which has no forward
    if loose < min_params or not whole or container:
        return loose
    found.append(module)
    return 0


def _shared(net: nn.Module) -> set[nn.Parameter]:
    uses = Counter(parameter for module in net.modules() for parameter in module.parameters(recurse=False))
    return {parameter for parameter, count in uses.items() if count > 1}


def _unsharded(module: nn.Module) -> bool:
    return any(not hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False))
