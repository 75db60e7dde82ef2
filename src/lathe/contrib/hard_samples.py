"""Train on the hardest samples of the last epochs."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lathe.callbacks.module_access import planned_batches
from lathe.callbacks.skippable_hooks import SkippableHooks
from lathe.config.types import Count, OpenShare, Share
from lathe.config.validate import SPLIT_NETS
from lathe.config.validation import validated
from lathe.data.order import Selection
from lathe.errors import require
from lathe.files import csv_text, write_atomically
from lathe.measure.processes import everyones

KEY = "hard_samples"  # in a checkpoint
MOST = 1000  # rows in hard_samples.csv
OUT = "leave hard_samples out of callbacks"


class HardSamples(SkippableHooks, Callback):
    """Train each epoch on a `share` of the training samples: the hardest ones and random others.

    The hardest have the largest cross-entropy when last trained on, augmented, without label smoothing or weights; see
    `Selection`. Ranks exchange losses at an epoch's end, so that they choose the same samples as one process, up to
    rounding. Checkpoints keep them; hard_samples.csv in the run directory lists the largest at the end.

    Args:
        share: of the training samples in an epoch; schedules and step counts are shorter accordingly.
        hardest: share of an epoch's samples chosen by loss.
        passes: how often each sample is trained on before losses decide.
    """

    every_step = ("on_train_batch_start",)

    @validated
    def __init__(self, share: OpenShare = 0.35, hardest: Share = 0.7, passes: Count = 1) -> None:
        self.share, self.hardest, self.passes = share, hardest, passes
        self._selection = Selection(share, hardest, passes)
        self._loader: Any = None
        self._losses_of: Any = None
        self._rows: Tensor | None = None  # this rank's samples of the current epoch, [batches, local batch]
        self._batch = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        data: Any = getattr(trainer, "datamodule", None)
        message = f"samples of {type(data).__name__} can't be chosen by number: use images, a dataset with a __len__"
        require(getattr(data, "selects", False), f"callbacks.hard_samples: {message}, or {OUT}.")
        strategy = type(trainer.strategy).__name__
        require(strategy not in SPLIT_NETS, f"callbacks.hard_samples needs a whole net, and {strategy} cuts it: {OUT}.")
        message = f"{type(pl_module).__name__} has no cross-entropy of each sample: use task=classification"
        require(hasattr(pl_module, "sample_losses"), f"callbacks.hard_samples: {message}, or {OUT}.")
        self._selection = data.selection = Selection(self.share, self.hardest, self.passes)
        self._rows = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        module: Any = pl_module
        loader: Any = trainer.datamodule.train_dataloader()  # type: ignore[attr-defined]
        n, count = loader.n, self._selection.count(loader.n, loader.global_batch_size)
        require(loader.shuffle, f"callbacks.hard_samples: trainer.overfit_batches takes the same few samples: {OUT}.")
        mixes = getattr(getattr(loader, "augment", None), "mixes", False)
        require(
            not mixes, f"callbacks.hard_samples: data.augment mixes samples: switch mixup and cutmix off, or {OUT}."
        )
        whole = "compile.scope=step hides the logits of a step: use compile.scope=net"
        require("whole_step" not in vars(module), f"callbacks.hard_samples: {whole}, or {OUT}.")
        if trainer.is_global_zero:
            print(f"hard_samples: an epoch takes {count} of {n} training samples.", flush=True)
        steps = planned_batches(trainer, loader.limit)
        if steps is not None and steps * loader.global_batch_size <= n * self.passes:
            often = "once" if self.passes == 1 else f"{self.passes} times"
            rank_zero_warn(
                f"callbacks.hard_samples: this run ends after {steps} batches of {loader.global_batch_size}, before "
                f"each of {n} samples was trained on {often}, from which on losses decide: make it longer."
            )
        self._loader, self._losses_of = loader, module.sample_losses
        module.observers.append(self._look)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._rows = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch_idx

    @torch.no_grad()
    def _look(self, split: str, outputs: Any, batch: Any) -> None:
        if split != "train":
            return
        if self._rows is None:
            self._rows = self._loader.rows().to(outputs.device)
        rows, target = self._rows[self._batch], batch[1]
        message = (
            f"a batch of {len(rows)} samples has targets of {tuple(target.shape)} ({target.dtype}), not a class each"
        )
        classes = not target.is_floating_point() and len(target) == len(rows)
        require(classes, f"callbacks.hard_samples: {message}: let data.collate_fn keep them apart, or {OUT}.")
        self._selection.note(rows, self._losses_of(outputs, batch))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mine = self._selection
        mine.merge(everyones((mine.losses.cpu(), mine.turns.cpu())))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self.on_train_epoch_end(trainer, pl_module)
        checkpoint[KEY] = self._selection.state()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        if KEY in checkpoint:
            self._selection.restore(checkpoint[KEY])
        else:
            rank_zero_warn("callbacks.hard_samples: the checkpoint has no losses of samples: all count as unseen.")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero or self._loader is None:
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        losses, turns = self._selection.losses.cpu(), self._selection.turns.cpu()
        hardest = losses.where(turns > 0, -1.0).topk(min(MOST, int((turns > 0).sum()))).indices.tolist()
        rows = []
        for number in hardest:
            name = data.name_of("train", number)
            label = "" if self._loader.labels is None else int(self._loader.labels[number])
            rows.append((number, label, f"{float(losses[number]):.6g}", int(turns[number]), name or ""))
        text = csv_text(("sample", "label", "loss", "turns", "file"), rows)
        write_atomically(Path(trainer.default_root_dir) / "hard_samples.csv", text)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        module: Any = pl_module
        if self._look in getattr(module, "observers", ()):
            module.observers.remove(self._look)
