"""torchmetrics of a task: exact on one process and two, resumed after a stop, refused if unfit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score, roc_auc_score
from support.quiet import Batches
from support.ranks import on_ranks
from support.regression import loader, trainer
from torch import Tensor, nn
from torchmetrics import classification as tmc

from lathe.errors import UserError
from lathe.runs.inference import score
from lathe.strategies import DDP
from lathe.tasks import ClassificationTask

FACTS = {"channels": 1, "image_size": 2, "num_classes": 3}


def samples(n: int = 48, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, :3] + 0.5).argmax(dim=1)


def batches(x: Tensor, y: Tensor, size: int = 8) -> list[Any]:
    return list(zip(x.split(size), y.split(size), strict=True))


def task(*metrics: Any, lr: float = 0.0, **options: Any) -> ClassificationTask:
    torch.manual_seed(0)
    return ClassificationTask(
        nn.Linear(4, 3),
        optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=lr),
        metrics=list(metrics) or options.pop("given", None),
        **options,
    )


def both() -> list[Any]:
    return ["accuracy", tmc.MulticlassAUROC(num_classes=3), tmc.MulticlassF1Score(num_classes=3)]


def by_sklearn(net: nn.Module, x: Tensor, y: Tensor) -> dict[str, float]:
    with torch.no_grad():
        p = net(x).double().softmax(1).numpy()
    return {
        "auroc": roc_auc_score(y, p, multi_class="ovr", average="macro"),
        "f1_score": f1_score(y, p.argmax(1), average="macro"),
        "accuracy": float((p.argmax(1) == y.numpy()).mean()),
    }


def test_each_split_is_scikit_learns_and_stands_beside_the_sums() -> None:
    it, (x, y), (vx, vy) = task(*both()), samples(), samples(seed=1)
    run, memory = trainer(max_epochs=2)
    run.fit(it, loader(batches(x, y)), loader(batches(vx, vy)))
    for split, suffix, data in (("train", "_epoch", (x, y)), ("val", "", (vx, vy))):
        found = [row for _, row in memory.rows if f"{split}/auroc{suffix}" in row]
        assert len(found) == 2  # one per epoch, with separate states
        for name, value in by_sklearn(it.net, *data).items():
            assert [float(row[f"{split}/{name}{suffix}"]) for row in found] == pytest.approx([value] * 2, rel=1e-5)
    (tested,) = run.test(it, loader(batches(vx, vy)), verbose=False)
    assert tested["test/auroc"] == pytest.approx(by_sklearn(it.net, vx, vy)["auroc"], rel=1e-5)
    assert it.metric_names[:4] == ["train/loss", "train/accuracy", "train/auroc", "train/f1_score"]
    assert set(it.state_dict()) == {"net.weight", "net.bias"}
    assert (it.monitor, it.minimised) == ("val/accuracy", ("loss", "perplexity"))


def test_rows_that_only_fill_up_do_not_count_and_score_is_the_same() -> None:
    it, (x, y) = task(*both()), samples(20)
    filled = [(torch.cat((x, x[:4])), torch.cat((y, torch.full((4,), -100)))), (x[:4], torch.full((4,), -100))]
    run, _ = trainer()
    (found,) = run.validate(it, loader(filled), verbose=False)
    expected = by_sklearn(it.net, x, y)
    assert {name: found[f"val/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)
    scored = score(it, it.net, filled)
    assert {name: scored[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    nothing, _ = trainer()
    (found,) = nothing.validate(it, loader(filled[1:]), verbose=False) or ({},)
    assert found == {}


def test_what_is_monitored_and_which_way() -> None:
    assert task(*both()[1:]).monitor == "val/auroc"
    assert ClassificationTask(nn.Identity(), metrics=[]).monitor == "val/loss"
    it = ClassificationTask(nn.Identity(), metrics={"ece": tmc.MulticlassCalibrationError(3), "accuracy": "accuracy"})
    assert (it.reported, it.monitor) == (("loss", "accuracy", "ece"), "val/accuracy")
    assert "ece" in it.minimised
    monitor, ways = ClassificationTask.directions(both()[1:])
    assert (monitor, ways) == ("val/auroc", {"loss": True, "auroc": False, "f1_score": False})


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (tmc.MulticlassAUROC(num_classes=4), "does not accept predictions"),
        (tmc.BinaryAUROC(), "Use torchmetrics.classification.MulticlassAUROC"),
        (tmc.MulticlassConfusionMatrix(3), "expected a scalar"),
    ],
)
def test_metrics_that_do_not_fit_are_refused_before_data_are_touched(metric: Any, said: str) -> None:
    it = ClassificationTask(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), metrics=[metric])
    with pytest.raises(UserError, match=said):
        it.check_facts(FACTS)


# two ranks; the second has fewer samples that count, and none in validation


def on_two(rank: int) -> dict[str, Any]:
    (x, y), (vx, vy) = samples(), samples(20, seed=1)
    run, memory = trainer(devices=2, strategy=DDP(), use_distributed_sampler=False)
    held = (vx, vy) if rank == 0 else (vx, torch.full((20,), -100))
    it = task(*both())
    run.fit(it, loader(batches(x[rank::2], y[rank::2], 4)), loader([held]))
    return {k: float(v) for _, row in memory.rows for k, v in row.items() if "auroc" in k or "f1" in k} | {
        k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val/")
    }


def test_two_processes_are_equal_to_scikit_learn() -> None:
    first, second = on_ranks(on_two)
    it = task()
    train, val = by_sklearn(it.net, *samples()), by_sklearn(it.net, *samples(20, seed=1))
    for name in ("auroc", "f1_score"):
        assert first[f"train/{name}_epoch"] == pytest.approx(train[name], rel=1e-5)
        assert first[f"val/{name}"] == second[f"val/{name}"] == pytest.approx(val[name], rel=1e-5)


def test_a_continued_epoch_counts_all_of_its_samples(tmp_path: Path) -> None:
    from tasks.test_base import SaveAt

    data = batches(*samples())
    metrics = [*both(), tmc.MulticlassMatthewsCorrCoef(3)]
    run, whole = trainer(SaveAt(tmp_path / "a.ckpt", 3), max_epochs=2)
    run.fit(task(*metrics, lr=0.1), Batches(data), loader(data))
    run, continued = trainer(max_epochs=2)
    run.fit(task(*metrics, lr=0.1), Batches(data), loader(data), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert continued.rows == [(step, row) for step, row in whole.rows if step is not None and step > 4]
    assert "train/auroc_epoch" in {name for _, row in continued.rows for name in row}
