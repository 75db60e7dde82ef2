"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2; Zhao et al. 2023, arXiv:2304.11277).

Its base class, for strategies with DTensor parameters, has the process group, setup, checkpoints and clipping.
"""

import atexit
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lathe.config.types import Count
from lathe.config.validation import validated
from lathe.errors import require
from lathe.nets import blocks_of
from lathe.strategies import sharded_files
from lathe.strategies.dtensors import entry_like, full_tree, install_clipping, parameters_by_id, shard_like


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy, with four differences.

    It shards a plain net by itself (`shard`), works in a single process, reads and writes the checkpoints of every
    other strategy, and clips gradients on mixed meshes. `checkpoint` is full (one plain file, gathered by rank 0) or
    sharded (a folder to which every rank writes its shards).
    """

    name: ClassVar[str]  # in configs/strategy
    keeps_parameters = False  # whether each parameter keeps its name and its global shape during training
    reshapes = True  # `shard` changes the net: code that needs the plain net rebuilds it from a checkpoint

    def __init__(self, checkpoint: str = "full") -> None:
        super().__init__(save_distributed_checkpoint=checkpoint == "sharded")
        self._sharded_net: Any = None

    def make_mesh(self) -> DeviceMesh:
        """Return the mesh of all ranks; the process group exists when this is called."""
        raise NotImplementedError

    def apply_sharding(self, task: LightningModule, net: nn.Module) -> None:
        """Shard the plain net over the mesh, in place."""
        raise NotImplementedError

    def shard(self, task: LightningModule) -> None:
        """Shard `task.net`, which is plain and equal on every rank; a second call does nothing."""
        if task.net is not self._sharded_net:
            self.precision_plugin.convert_module(task)
            self.apply_sharding(task, task.get_submodule("net"))
            self._sharded_net = task.net

    def _configure_launcher(self) -> None:
        """Launch nothing: the ranks are already running."""

    def setup_environment(self) -> None:
        if self.root_device.type == "cuda":
            torch.cuda.set_device(self.root_device)
            self._process_group_backend = "cpu:gloo,cuda:nccl"  # gloo for tensors that are offloaded to the CPU
        if self.world_size == 1 and not dist.is_initialized():
            store = dist.HashStore()
            dist.init_process_group(self._get_process_group_backend(), store=store, rank=0, world_size=1)
            # gloo aborts a process that exits with a group
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        self._setup_distributed()
        self._device_mesh = self.make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def setup(self, trainer: Trainer) -> None:
        task = self.lightning_module
        assert task is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.shard(task)
        self.model = task
        self.model_to_device()
        evaluations = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
        for loop in (*evaluations, trainer.predict_loop):
            loop.inference_mode = False  # its tensors lack the version counters that fully_shard needs
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        install_clipping(self.precision_plugin)

    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            require(
                not optimizer.defaults.get("fused") or isinstance(optimizer, torch.optim.Adam),
                f"optimizer.fused=true: the fused step of {type(optimizer).__name__} takes no sharded parameters. Use "
                "optimizer.fused=null.",
            )

    # -- checkpoints

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the sharded state; `save_checkpoint` gathers it after callbacks have added theirs."""
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state in torch's format, with sharded entries."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return plain.state_dict()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        path = Path(self.broadcast(str(filepath)))
        if self._save_distributed_checkpoint:
            sharded_files.save(checkpoint, path)
            return
        checkpoint = full_tree(checkpoint, keep=self.is_global_zero)
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options=storage_options)
            sharded_files.sweep(path)  # in case an earlier checkpoint here was sharded

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the file on every rank, which takes its shards later; of a sharded folder, read only them."""
        path = Path(self.broadcast(str(checkpoint_path)))
        if not sharded_files.is_sharded(path):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            check = getattr(self.checkpoint_io, "check", None)  # Lightning's own has none
            if check is not None:
                check(state, path)
            return state
        assert self.lightning_module is not None
        return sharded_files.load(path, self.lightning_module.state_dict(), self.optimizers)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        state = {
            name: shard_like(value, own[name]) if name in own else value
            for name, value in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            by_id, entries = parameters_by_id(optimizer), {}
            for number, entry in state["state"].items():
                entries[number] = {name: entry_like(value, by_id.get(number)) for name, value in entry.items()}
                for name, value in entry.items():
                    if entries[number][name] is value and isinstance(value, torch.Tensor):
                        entries[number][name] = value.clone()
            optimizer.load_state_dict({**state, "state": entries})


class FSDP(ShardedStrategy):
    """Shards parameters, gradients and optimizer state over ranks, which get slices of the global batch.

    The parameters of one unit at a time are gathered for its forward and backward pass. Units are the net's `blocks`,
    or in a net without them the smallest modules of at least `min_params` parameters. The rest belongs to the root,
    which is gathered as a whole. On a single process the net is not sharded, except with offload or a sharded
    checkpoint.

    `replicas` is the number of groups of ranks with a full copy each (hybrid sharding); parameters are sharded within a
    group.
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
        require(
            self.world_size % self.replicas == 0,
            f"strategy.replicas={self.replicas} does not divide the {self.world_size} processes.",
        )
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
            module
            for module in unit.modules()
            if isinstance(module, _BatchNorm)
            and any(not hasattr(parameter, "device_mesh") for parameter in module.parameters(recurse=False))
        ]
        if narrow is not None and norms:  # one group, gathered at once
            fully_shard(norms, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False), **options)
        fully_shard(unit, mp_policy=policy, **options)


def units(net: nn.Module, min_params: int) -> list[nn.Module]:
    """Return the modules that are gathered separately, inner before outer; shared parameters are in none."""
    blocks = list(dict.fromkeys(blocks_of(net)))
    if blocks:
        return [block for block in blocks if any(True for _ in block.parameters())]
    uses = Counter(parameter for module in net.modules() for parameter in module.parameters(recurse=False))
    shared = {parameter for parameter, count in uses.items() if count > 1}
    large: list[nn.Module] = []

    def collect(module: nn.Module) -> int:
        """Append the smallest units in `module` (or itself); return the number of its parameters in no unit."""
        loose = sum(parameter.numel() for parameter in module.parameters(recurse=False) if parameter not in shared)
        loose += sum(collect(child) for child in module.children())
        whole = not any(parameter in shared for parameter in module.parameters())
        container = isinstance(module, nn.ModuleList | nn.ModuleDict)  # which has no forward
        if loose < min_params or not whole or container:
            return loose
        large.append(module)
        return 0

    collect(net)
    return [module for module in large if module is not net]
