"""A run is tested as it was trained: for its loggers, at its step, with the user's callbacks. Also if compression or a
strategy leaves a net that can't be tested as it is.
"""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from support.runs import SMALL, new_run, rows

from lathe.callbacks import EMA
from lathe.training.train import train

RUN = (*SMALL, "trainer.limit_train_batches=6", "compression.receipt=none", "callbacks.throughput=null")


class Own(Callback):
    """Count the test's batches, and report the run's step as a metric and to the loggers."""

    def __init__(self) -> None:
        self.batches = 0

    def on_test_batch_end(self, *args: Any) -> None:
        self.batches += 1

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.logger is not None
        trainer.logger.log_metrics({"test/told": 1.0}, trainer.global_step)
        pl_module.log_dict({"test/step": float(trainer.global_step), "test/batches": float(self.batches)})


class OwnEMA(EMA):
    """A changed callback of Lathe's: it belongs to the trained net."""

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    "words",
    [(), *((f"compression={name}",) for name in ("ptq_static", "[prune,qat]"))],
    ids=" ".join,
)
def test_it_is_seen_by_callbacks_and_loggers(words: tuple[str, ...], tmp_path: Path) -> None:
    own = f"+callbacks.own._target_={__name__}.Own"
    cfg = new_run(tmp_path, *RUN, own, *words)
    result = train(cfg)
    assert result["test/step"] == result["steps"] == 12
    assert result["test/batches"] == 5  # 297 images by 64
    *_, last = rows(Path(cfg["paths"]["run_dir"]))
    assert int(last["step"]) == 12
    assert float(last["test/told"]) == 1
    assert {name: float(last[name]) for name in result if name.startswith("test/")} == {
        name: value for name, value in result.items() if name.startswith("test/")
    }


def test_what_has_acted_on_the_trained_net_is_not_asked_for_another(tmp_path: Path) -> None:
    averaged = f"+callbacks.own={{_target_: {__name__}.OwnEMA, decay: 0.9}}"
    assert "test/accuracy" in train(new_run(tmp_path, *RUN, averaged, "compression=prune"))
