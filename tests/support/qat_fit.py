"""Ten steps of a small net with a checkpoint in between, for the tests of quantization-aware training."""

import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lathe.callbacks import ExactResume
from lathe.compression.quantization.callback import QAT
from lathe.compression.quantization.net import quantizers
from lathe.compression.structure import apply_structure
from lathe.nets import recompute
from lathe.strategies import SyncBatchNorm, compile_net
from lathe.strategies.fsdp import FSDP
from lathe.tasks import ClassificationTask, LanguageModellingTask, Task
from lathe.trainer import Trainer
from support.quiet import Batches, quiet_trainer
from support.strategy_fit import NETS, adamw, batches

STEPS = 10


class Data(LightningDataModule):
    """The rank's shard of each batch; validation is the first batch."""

    def __init__(self, name: str, n: int, part: tuple[int, int]) -> None:
        super().__init__()
        self.items = [(x.chunk(part[1])[part[0]], y.chunk(part[1])[part[0]]) for x, y in batches(name, n)]

    def train_dataloader(self) -> Batches:
        return Batches(self.items)

    def val_dataloader(self) -> Batches:
        return Batches(self.items[:1])


class Saves(Callback):
    """Saves a checkpoint after optimizer step `at`, and records the quantizers' state after each step."""

    def __init__(self, path: Path | None, at: int) -> None:
        self.path, self.at = path, at
        self.seen: dict[int, tuple[bool, bool, bool]] = {}
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        every = quantizers(pl_module.net)
        norms = [module.training for module in pl_module.net.modules() if isinstance(module, _BatchNorm)]
        self.seen[trainer.global_step] = (
            all(q.is_enabled for q in every),
            all(q.is_observing for q in every if not q.symmetric),
            all(norms),
        )
        if trainer.global_step == self.at and self.path is not None and not self.path.exists():
            trainer.save_checkpoint(self.path)


def fit(
    name: str,
    strategy: Any = "auto",
    *,
    part: tuple[int, int] = (0, 1),
    save: Path | None = None,
    at: int = 5,
    resume: Path | None = None,
    compiled: bool = False,
    recomputed: str = "none",
    accumulate: int = 1,
    extra: tuple[Callback, ...] = (),
    plugins: tuple[Any, ...] = (),
    options: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """Train ten optimizer steps: rounding from step 3, ranges fixed from 7, BatchNorm's statistics from 8."""
    torch.manual_seed(0)
    net = NETS[name]()
    make = without_decay if (options or {}).get("lsq") else adamw
    task: Task = LanguageModellingTask(net, make) if name in ("gpt", "untied") else ClassificationTask(net, make)
    if resume is not None:
        apply_structure(task.net, torch.load(resume, weights_only=True)["structure"])
    recompute.apply(task.net, recomputed)
    compile_net(task.net, "cpu", enabled=compiled, backend="aot_eager", fullgraph=True)
    qat = QAT(**{"start": 0.3, "freeze_observers": 0.7, "freeze_batchnorm": 0.8, **(options or {})})
    saves = Saves(save, at)
    trainer = quiet_trainer(
        ExactResume(0),
        qat,
        *extra,
        saves,
        devices=part[1],
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        val_check_interval=1.0,
        num_sanity_val_steps=1,
        plugins=[*plugins, SyncBatchNorm()] if part[1] > 1 else [*plugins],
        **trainer_options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer.fit(task, datamodule=Data(name, STEPS * accumulate, part), ckpt_path=resume, weights_only=True)
    state = trainer.strategy.lightning_module_state_dict() if not isinstance(strategy, FSDP) else full_state(task.net)
    return {
        "state": {k.removeprefix("net."): v.detach().clone() for k, v in state.items()},
        "seen": saves.seen,
        "losses": saves.losses,
        "report": qat.report(),
        "ready": qat.ready(trainer),
        "task": None if part[1] > 1 else task,
    }


def full_state(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in net.state_dict().items()}


def without_decay(net: nn.Module) -> torch.optim.Optimizer:
    scales = [p for name, p in net.named_parameters() if name.endswith("_quantizer.growth")]
    others = [p for name, p in net.named_parameters() if not name.endswith("_quantizer.growth")]
    return torch.optim.AdamW([{"params": others}, {"params": scales, "weight_decay": 0.0}], lr=1e-2)
