"""An interruption does not change the average."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.net_state import Saves, assert_same, copy_of
from torch import Tensor

from lathe.callbacks.ema import EMA

pytestmark = pytest.mark.law3


@pytest.mark.filterwarnings("ignore:callbacks.ema. none of the run's 1 optimizer steps was averaged")  # yet
@pytest.mark.parametrize("stop", [1, 5, 6, 7, 10])
@pytest.mark.parametrize("strips", [True, False])
def test_resume_is_bit_for_bit(tiny: SimpleNamespace, tmp_path: Path, stop: int, strips: bool) -> None:
    def run(resume: str | None, max_steps: int) -> tuple[EMA, dict[str, Tensor], dict[str, Any]]:
        ema, task = EMA(decay=0.9, every_n_steps=2, start_step=1), tiny.Task(strips=strips)
        file = tmp_path / f"{max_steps}"
        trainer = tiny.trainer(ema, Saves(file), max_epochs=3, max_steps=max_steps)
        trainer.fit(task, tiny.Loader(), ckpt_path=resume, weights_only=True)
        return ema, copy_of(task.net), torch.load(file / f"step={max_steps}.ckpt", weights_only=True)

    whole = run(None, 18)
    run(None, stop)
    parts = run(str(tmp_path / f"{stop}" / f"step={stop}.ckpt"), 18)
    assert parts[0].updates == whole[0].updates == 8
    assert_same(parts[1], whole[1])
    assert_same(parts[2]["state_dict"], whole[2]["state_dict"])
    assert_same(parts[2]["ema"]["raw"], whole[2]["ema"]["raw"])


def test_a_checkpoint_between_step_and_update_loses_nothing(tiny: SimpleNamespace, tmp_path: Path) -> None:
    class SavesEarly(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "early.ckpt")

    whole, parts = tiny.Task(), tiny.Task()
    tiny.trainer(SavesEarly(), EMA(decay=0.9)).fit(whole, tiny.Loader())
    tiny.trainer(EMA(decay=0.9)).fit(parts, tiny.Loader(), ckpt_path=str(tmp_path / "early.ckpt"))
    assert_same(copy_of(parts.net), copy_of(whole.net))


def test_a_checkpoint_without_average_warns_and_starts_from_its_weights(tiny: SimpleNamespace, tmp_path: Path) -> None:
    tiny.trainer(Saves(tmp_path), max_epochs=1).fit(tiny.Task(), tiny.Loader())
    ema = EMA()
    with pytest.warns(UserWarning, match="holds no moving average"):
        tiny.trainer(ema).fit(tiny.Task(), tiny.Loader(), ckpt_path=str(tmp_path / "step=6.ckpt"))
    assert ema.updates == 6
