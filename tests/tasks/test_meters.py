"""torchmetrics of a task: exact on one process and on two, continued after a stop, refused where they do not fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics as tm
from sklearn.metrics import f1_score, roc_auc_score
from support.ranks import on_ranks
from support.regression import loader, trainer
from torch import Tensor, nn
from torchmetrics import classification as tmc

from lathe.errors import UserError
from lathe.runs.inference import score
from lathe.strategies import DDP
from lathe.tasks import ClassificationTask
from lathe.tasks.meters import Meters, metric_name

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


def test_names_are_those_of_the_classes_in_snake_case() -> None:
    names = {"MulticlassAUROC": "auroc", "BinaryF1Score": "f1_score", "MultilabelFBetaScore": "f_beta_score"}
    names |= {"R2Score": "r2_score", "MeanAbsoluteError": "mean_absolute_error", "KLDivergence": "kl_divergence"}
    assert {name: metric_name(name) for name in names} == names


def test_each_split_is_scikit_learns_and_stands_beside_the_sums() -> None:
    it, (x, y), (vx, vy) = task(*both()), samples(), samples(seed=1)
    run, memory = trainer(max_epochs=2)
    run.fit(it, loader(batches(x, y)), loader(batches(vx, vy)))
    for split, suffix, data in (("train", "_epoch", (x, y)), ("val", "", (vx, vy))):
        found = [row for _, row in memory.rows if f"{split}/auroc{suffix}" in row]
        assert len(found) == 2  # an epoch each, with states of its own
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


def test_top5_accuracy_is_a_sum_and_a_binary_metric_takes_the_second_class() -> None:
    logits = torch.arange(14.0).view(2, 7)
    it = ClassificationTask(nn.Identity(), metrics=["top5_accuracy"]).eval()
    assert score(it, lambda x: x, [(logits, torch.tensor([1, 2]))])["top5_accuracy"] == 0.5
    x, y = samples()
    it = ClassificationTask(nn.Identity(), metrics=[tmc.BinaryAUROC()])
    found = score(it, lambda x: x[:, :2], [(x, y % 2)])["auroc"]
    assert found == pytest.approx(roc_auc_score(y % 2, x[:, :2].softmax(1)[:, 1]), rel=1e-6)


def test_what_is_monitored_and_which_way() -> None:
    assert task(*both()[1:]).monitor == "val/auroc"
    assert ClassificationTask(nn.Identity(), metrics=[]).monitor == "val/loss"
    it = ClassificationTask(nn.Identity(), metrics={"ece": tmc.MulticlassCalibrationError(3), "accuracy": "accuracy"})
    assert (it.reported, it.monitor) == (("loss", "accuracy", "ece"), "val/accuracy")
    assert "ece" in it.minimised
    monitor, ways = ClassificationTask.directions(both()[1:])
    assert (monitor, ways) == ("val/auroc", {"loss": True, "auroc": False, "f1_score": False})


class Curve(tm.Metric):
    higher_is_better = None

    def __init__(self) -> None:
        super().__init__()
        self.add_state("seen", torch.zeros(2), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.seen = self.seen + 1

    def compute(self) -> Tensor:
        return self.seen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["acuracy"], r"metrics=acuracy: the task has no such metric; did you mean accuracy\?"),
        (["accuracy", "accuracy"], "metrics: two are called accuracy"),
        ([tmc.BinaryAUROC(), tmc.MulticlassAUROC(3)], "metrics: two are called auroc; name them"),
        (["loss"], "two are called loss; the loss is always reported"),
        ([nn.Linear(1, 1)], r"metrics\.linear=Linear: expected a torchmetric"),
        ([tm.MeanMetric()], r"metrics\.mean_metric=MeanMetric: expected a torchmetric"),
        ("accuracy", "metrics=accuracy: expected a list"),
        ({"a/b": tmc.BinaryAUROC()}, r"metrics\.a/b: a metric's name has letters"),
        ({"mine": "accuracy"}, r"metrics\.mine=accuracy: a metric of the task's own keeps its name"),
    ],
)
def test_metrics_that_can_not_be_are_refused_at_once(given: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ClassificationTask(nn.Identity(), metrics=given)


def test_metrics_of_other_answers_are_told_for_labels_and_values() -> None:
    meters = Meters({"a": tmc.MulticlassF1Score(3), "b": tmc.MultilabelF1Score(4), "c": tmc.BinaryF1Score()})
    with pytest.raises(
        UserError, match=r"take torchmetrics\.classification\.MultilabelF1Score, with num_labels: 3"
    ) as told:
        meters.check_kinds("labels", 3)
    assert "task.metrics.b: MultilabelF1Score is of 4 labels, and the task predicts 3 labels: set num_labels: 3." in (
        told.value.args
    )
    assert len(told.value.args) == 2  # a binary metric takes labels as they are
    with pytest.raises(UserError, match=r"predicts 1 values: take a metric of values, such as") as told:
        meters.check_kinds("values", 1)
    assert len(told.value.args) == 3
    Meters({"a": tmc.BinaryAUROC(), "b": tmc.MulticlassAUROC(2), "c": Curve()}).check_kinds("classes", 2)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (tmc.MulticlassAUROC(num_classes=4), r"^task\.metrics\.auroc: MulticlassAUROC is of 4 classes, and the task "),
        (
            tmc.BinaryAUROC(),
            r"^task\.metrics\.auroc: BinaryAUROC is of two classes, and the task predicts 3 classes: take "
            r"torchmetrics\.classification\.MulticlassAUROC, with num_classes: 3\.$",
        ),
        (tmc.MultilabelF1Score(3), r"MultilabelF1Score is of 3 labels, and the task predicts 3 classes: take torchmet"),
        (
            tm.PearsonCorrCoef(),
            r"^task\.metrics\.pearson_corr_coef: PearsonCorrCoef does not take predictions \[8, 3\]",
        ),
        (tmc.MulticlassConfusionMatrix(3), r"gives a tensor \[3, 3\] of int64: expected a scalar\.$"),
        (Curve(), r"metrics\.curve: Curve gives a tensor \[2\]"),
        ("top5_accuracy", r"of data\.num_classes=3 classes the right one is always among five"),
    ],
)
def test_metrics_that_do_not_fit_are_told_before_data_are_touched(metric: Any, words: str) -> None:
    it = ClassificationTask(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), metrics=[metric])
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=words):
        it.check_facts(FACTS)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_half_precision_module_keeps_its_metrics_number_format() -> None:
    it = task(tmc.MulticlassAveragePrecision(3, thresholds=5), tmc.MulticlassF1Score(3)).to(torch.bfloat16)
    assert it.meters is not None
    states = [getattr(m, name) for m in it.meters.modules() if isinstance(m, tm.Metric) for name in m._defaults]
    assert {state.dtype for state in states} == {torch.int64}
    assert {buffer.dtype for buffer in it.meters.buffers()} == {torch.float32}


# two ranks, of which the second has fewer samples that count, and in validation none


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


@pytest.mark.parametrize("at", [0, 3])
def test_a_continued_epoch_counts_all_of_its_samples(tmp_path: Path, at: int) -> None:
    from tasks.test_base import SaveAt, Stateful

    data = batches(*samples())
    metrics = [*both(), tmc.MulticlassMatthewsCorrCoef(3)]
    run, whole = trainer(SaveAt(tmp_path / "a.ckpt", at), max_epochs=2)
    run.fit(task(*metrics, lr=0.1), Stateful(data), loader(data))
    run, continued = trainer(max_epochs=2)
    run.fit(task(*metrics, lr=0.1), Stateful(data), loader(data), ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert continued.rows == [(step, row) for step, row in whole.rows if step is not None and step > at + 1]
    assert "train/auroc_epoch" in {name for _, row in continued.rows for name in row}
