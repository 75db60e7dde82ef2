"""Metrics are exact means for any batches, ranks and interruptions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from support.ranks import on_ranks
from support.regression import batches, close, loader, metrics, task, trainer

from lathe.strategies import DDP


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "log_every_n_steps": 1}])
def test_a_logged_step_is_the_mean_over_the_samples_since_the_last(options: dict[str, int]) -> None:
    it, data = task(), batches()
    run, memory = trainer(**options)
    run.fit(it, loader(data))
    steps = [(step, row) for step, row in memory.rows if "train/loss" in row]
    assert [step for step, _ in steps] == ([1, 2, 3] if options else [2, 4, 6])
    for number, (_, row) in enumerate(steps):
        close(row, "train", metrics(it.net, data[2 * number : 2 * number + 2]))
        assert row["epoch"] == 0
    assert it.latest == {name: value for name, value in steps[-1][1].items() if name != "epoch"}


def test_the_epoch_is_the_mean_over_all_its_samples() -> None:
    it, data = task(), batches()
    run, memory = trainer(log_every_n_steps=4)  # leaves two batches over
    run.fit(it, loader(data))
    step, row = next((step, row) for step, row in memory.rows if "train/loss_epoch" in row)
    assert step == 6
    close(row, "train", metrics(it.net, data), "_epoch")
    close(run.callback_metrics, "train", metrics(it.net, data))


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_is_the_mean_over_samples(split: str) -> None:
    it, data = task(), batches(seed=1)
    run, memory = trainer()
    (returned,) = (run.validate if split == "val" else run.test)(it, loader(data), verbose=False)
    assert len(memory.rows) == 1
    assert returned == {name: memory.rows[0][1][name] for name in (f"{split}/loss", f"{split}/positive")}
    close(memory.rows[0][1], split, metrics(it.net, data))
    close(run.callback_metrics, split, metrics(it.net, data))


def test_validation_uses_the_plain_losses_and_training_the_objective() -> None:
    it, data = task(), batches()
    plain = it.objective
    it.objective = lambda outputs, batch: {**plain(outputs, batch), "extra": torch.tensor(100.0)}
    run, memory = trainer(log_every_n_steps=6)
    run.fit(it, loader(data), loader(data))
    mse = metrics(it.net, data)[0]
    assert next(row for _, row in memory.rows if "train/loss" in row)["train/loss"] == pytest.approx(
        mse + 100, rel=1e-6
    )
    assert next(row for _, row in memory.rows if "val/loss" in row)["val/loss"] == pytest.approx(mse, rel=1e-6)


def test_scheduler_gets_the_number_of_optimizer_steps() -> None:
    asked = []

    def schedule(optimizer: Any, total_steps: int) -> Any:
        asked.append(total_steps)
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    it = task(lr=1.0, scheduler=schedule)
    run, _ = trainer(max_epochs=2, accumulate_grad_batches=3)
    run.fit(it, loader(batches()))
    assert asked == [4]
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(1 / 5)  # stepped after each of four optimizer steps


class SaveAt(Callback):
    def __init__(self, path: Path, batch: int) -> None:
        self.path, self.batch = path, batch

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.batch and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def test_prediction_takes_images_with_or_without_labels() -> None:
    it, data = task(), batches()
    run, _ = trainer()
    pairs = run.predict(it, loader(data)) or []
    alone = run.predict(it, loader([x for x, _ in data])) or []
    with torch.no_grad():
        for (x, _), a, b in zip(data, pairs, alone, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, it.net(x))


# two ranks: 4 + 1, 3 + 4, 2 + 4 samples in three steps


def on_two(rank: int, folder: str) -> dict[str, Any]:
    data = batches()
    it = task()
    run, memory = trainer(
        SaveAt(Path(folder) / "two.ckpt", 1),
        log_every_n_steps=3,
        devices=2,
        strategy=DDP(),
        use_distributed_sampler=False,
    )
    run.fit(it, loader(data[rank::2]), loader(data[rank::2]))
    return {"rows": memory.rows, "metrics": {name: float(value) for name, value in run.callback_metrics.items()}}


def test_figures_are_sums_over_ranks(tmp_path: Path) -> None:
    ranks = on_ranks(on_two, str(tmp_path))
    data = batches()
    expected = metrics(task().net, data)
    for result in ranks:  # every rank decides by the same metrics
        close(result["metrics"], "train", expected)
        close(result["metrics"], "val", expected)
        rows = {name: value for step, row in result["rows"] for name, value in row.items() if step == 3}
        close(rows, "train", expected)
        close(rows, "train", expected, "_epoch")
        close(rows, "val", expected)
    sums = torch.load(tmp_path / "two.ckpt", weights_only=True)["task"]["sums"]
    loss, positive = metrics(task().net, data[:4])
    assert len(sums["window"]) == 2  # each rank's own
    assert torch.tensor(sums["window"]).sum(0).tolist() == pytest.approx([loss * 12, positive * 12, 12], rel=1e-6)
