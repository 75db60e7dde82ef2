"""Law 3 for settings of a callback: frozen parameters, modules in eval mode, attributes of the Trainer."""

import random
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from support.interruptions import QUICK, SEED, Interruption, equal, interruption, train_through
from support.runs import new_run

import lathe.training.train

__all__ = ["interruption"]  # a fixture

BATCHES = 6  # of an epoch


class Changes(Callback):
    """Changes one setting at the start of an epoch, or at the end of the first validation after it."""

    def __init__(self, what: str, epoch: int, validation: bool) -> None:
        self.what, self.epoch, self.validation = what, epoch, validation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.what == "unfreeze":
            next(pl_module.parameters()).requires_grad_(False)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch and not self.validation:
            self.change(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == self.epoch and self.validation and not trainer.sanity_checking:
            self.change(trainer, pl_module)

    def change(self, trainer: Any, module: LightningModule) -> None:
        if self.what in ("freeze", "unfreeze"):
            next(module.parameters()).requires_grad_(self.what == "unfreeze")
        elif self.what == "eval":
            for part in module.modules():
                if type(part).__name__ == "Dropout":
                    part.eval()
        elif self.what == "accumulate":
            trainer.accumulate_grad_batches = 2
        elif self.what == "clip":
            trainer.gradient_clip_val = 0.01
        else:
            trainer.limit_val_batches = 1


KINDS = ("freeze", "unfreeze", "eval", "accumulate", "clip", "validation")


def hold(folder: Path, interruption: Interruption, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    chance = random.Random(f"{SEED} {kind}")
    epoch = chance.randrange(2)
    validation = kind in ("freeze", "unfreeze", "clip") and chance.random() < 0.5
    after = epoch * BATCHES if kind == "accumulate" else (epoch + 1) * BATCHES
    death = ("on_train_batch_start", after + chance.randrange(2, 7))
    make = lathe.training.train.make_callbacks
    monkeypatch.setattr(
        lathe.training.train, "make_callbacks", lambda *args: [Changes(kind, epoch, validation), *make(*args)]
    )
    options = (
        *("model.net.dropout=0.3", "trainer.max_epochs=4", "callbacks.checkpoint.every_n_train_steps=2"),
        "data.eval_batch_size=100",
    )
    # shown if the test fails
    print(f"LATHE_KILL_SEED={SEED}, {kind} in epoch {epoch}, validation={validation}: {death}")

    def trained(name: str, deaths: list[tuple[str, int]]) -> Path:
        return train_through(new_run(folder / name, *QUICK, *options), deaths, interruption)

    equal(trained("alone", []), trained("killed", [death]))


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_callback_has_changed_is_kept(
    tmp_path: Path, interruption: Interruption, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    hold(tmp_path, interruption, monkeypatch, kind)
