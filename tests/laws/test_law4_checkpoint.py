"""Laws 4 and 7: a last.ckpt with a missing part is refused before training, in one sentence that names the file."""

import io
from pathlib import Path

import pytest
import torch
from support.interruptions import QUICK, Interrupted, Interruption, equal, interruption, train_through
from support.runs import new_run

import lathe.training.train
from lathe.errors import UserError

__all__ = ["interruption"]  # a fixture

pytestmark = pytest.mark.law7

OPTIONS = (*QUICK, "trainer.max_epochs=2", "callbacks.checkpoint.every_n_train_steps=1")
MODULE = (
    *(word for word in OPTIONS if not word.startswith("model")),
    "model=lightning",
    "model.net={_target_: support.own_lightning.LitNet, width: 16}",
    "callbacks.checkpoint.monitor=val_loss",
    "callbacks.checkpoint.mode=min",
)
# Runs whose checkpoints have different parts.
KINDS = {
    "plain": (*OPTIONS, "model.net.dropout=0.2", "callbacks=[default,early_stopping]"),
    "averaged": (*OPTIONS, "callbacks=[default,ema]", "scheduler=plateau"),
    "compressed": (*OPTIONS, "compression=[distill,prune,qat]", "compression.distill.teacher=ema"),
    "module": MODULE,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_without_one_of_its_parts_is_refused(
    kind: str, tmp_path: Path, interruption: Interruption
) -> None:
    options = (*KINDS[kind], "compression.receipt=none") if kind == "compressed" else KINDS[kind]
    alone = train_through(new_run(tmp_path / "alone", *options), [], interruption)
    cfg = new_run(tmp_path / "died", *options)
    interruption.hook, interruption.step = "on_train_batch_start", 8
    with pytest.raises(Interrupted):
        lathe.training.train.train(dict(cfg))
    died = Path(cfg["paths"]["run_dir"])
    last, metrics = died / "checkpoints" / "last.ckpt", (died / "metrics.csv").read_text()
    content = last.read_bytes()
    whole = torch.load(last, weights_only=True)
    parts = [(name,) for name in whole if name != "outline"] + [("callbacks", name) for name in whole["callbacks"]]
    assert len(parts) > 10
    for part in parts:
        state = torch.load(io.BytesIO(content), weights_only=True)
        del (state if len(part) == 1 else state[part[0]])[part[-1]]
        torch.save(state, last)
        with pytest.raises(UserError, match=r"last\.ckpt") as refused:
            train_through(cfg, [], interruption)
        assert "\n" not in str(refused.value), part
        assert (died / "metrics.csv").read_text() == metrics
    last.write_bytes(content)
    train_through(cfg, [], interruption)
    equal(alone, died)
