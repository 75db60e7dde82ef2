"""Base of strategies with DTensor parameters: process group, setup, checkpoints and clipping."""

import atexit
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lathe.errors import UserError
from lathe.strategies import sharded_files
from lathe.strategies.dtensors import (
    full_tree,
    install_clipping,
    load_full_optimizer_state,
    load_full_state_dict,
)


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

    # -- the mesh and the net on it, which subclasses define

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
        if self.world_size == 1 and not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group(self._get_process_group_backend(), store=store, rank=0, world_size=1)
            atexit.register(_end_group)
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
            if optimizer.defaults.get("fused") and not isinstance(optimizer, torch.optim.Adam):
                raise UserError(
                    f"optimizer.fused=true: the fused step of {type(optimizer).__name__} takes no sharded parameters. "
                    "Use optimizer.fused=null."
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
        return sharded_files.load_shards(path, self.lightning_module.state_dict(), self.optimizers, prefix="net.")

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        load_full_state_dict(self.lightning_module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state(optimizer, state)


def _end_group() -> None:
    # gloo aborts a process that exits with a group
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
