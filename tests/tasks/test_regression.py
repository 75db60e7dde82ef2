"""Regression and multi-label classification compared with scikit-learn; sums over processes are in test_base."""

from typing import Any

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch import LightningDataModule
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score, roc_auc_score
from support.regression import trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MultilabelAUROC

from lathe.data.external import share
from lathe.errors import UserError
from lathe.tasks import MultiLabelTask, RegressionTask, Task


class Numbers(LightningDataModule):
    """Targets for a regression or a multi-label classification."""

    def __init__(self, kind: str, n: int = 44) -> None:
        super().__init__()
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
        y = {"value": x[:, 0] * 2 + x[:, 1], "values": x[:, :2] - 1, "labels": (x[:, :2] > 0).float()}[kind]
        self.data = TensorDataset(x, y)

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(self.data, 10)


def build(kind: str) -> Task:
    torch.manual_seed(0)
    options: dict[str, Any] = {"optimizer": lambda net: torch.optim.SGD(net.parameters(), lr=0.05)}
    if kind == "labels":
        return MultiLabelTask(nn.Linear(4, 2), metrics=["accuracy", MultilabelAUROC(2)], **options)
    metrics = ["mae", "rmse", *([tm.R2Score()] if kind == "value" else [])]
    return RegressionTask(nn.Linear(4, 1 if kind == "value" else 2), metrics=metrics, **options)


def fitted(kind: str) -> tuple[Task, dict[str, float]]:
    data, it = Numbers(kind), build(kind)
    share(data, 0)
    run, memory = trainer(max_epochs=2, use_distributed_sampler=False)
    run.fit(it, datamodule=data)
    found = {k: float(v) for _, row in memory.rows for k, v in row.items()}
    return it, found


def expected(kind: str, net: nn.Module) -> dict[str, float]:
    x, y = Numbers(kind).data.tensors
    with torch.no_grad():
        out = net(x)
    if kind == "labels":
        return {
            "loss": F.binary_cross_entropy_with_logits(out, y).item(),
            "accuracy": ((out > 0) == (y > 0)).float().mean().item(),
            "auroc": roc_auc_score(y, out.sigmoid(), average="macro"),
        }
    out = out.view_as(y)
    mse = mean_squared_error(y, out)
    found = {"loss": mse, "mae": mean_absolute_error(y, out), "rmse": mse**0.5}
    return found | ({"r2_score": r2_score(y, out)} if kind == "value" else {})


@pytest.mark.parametrize("kind", ["value", "values", "labels"])
def test_metrics_are_scikit_learns(kind: str) -> None:
    it, found = fitted(kind)
    wanted = expected(kind, it.net)
    assert {name: found[f"val/{name}"] for name in wanted} == pytest.approx(wanted, rel=1e-4)
    assert set(wanted) <= {name.partition("/")[2].removesuffix("_epoch") for name in found if name.startswith("train/")}
    assert it.monitor == "val/loss"
    assert {"loss", "mae", "rmse"} & set(it.reported) <= set(it.minimised)


def total(it: Task, outputs: Tensor, y: Tensor) -> float:
    return sum(value.item() for value in it.losses(outputs, (None, y)).values())


def test_labels_that_fill_up_do_not_count_and_ones_are_weighed() -> None:
    logits, y = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    it = MultiLabelTask(nn.Identity(), pos_weight=[2.0, 3.0])
    weight = torch.tensor([2.0, 3.0])
    wanted = F.binary_cross_entropy_with_logits(logits, y, pos_weight=weight).item()
    assert total(it, logits, y) == pytest.approx(wanted)
    filled = torch.cat((y, torch.full((2, 2), -100.0))), torch.cat((logits, logits))
    it.eval()
    assert total(it, filled[1], filled[0]) == pytest.approx(wanted)
    assert it.reduce(filled[1], (None, filled[0]), torch.tensor(1.0)).tolist() == [2.0, 1.5, 2.0]
    assert total(it, logits, torch.full((2, 2), -100)) == 0
    with pytest.raises(UserError, match=r"expected \[batch, labels\]"):
        total(it, logits, y[:, 0])


def test_an_output_for_each_row_is_not_broadcast() -> None:
    it, y = RegressionTask(nn.Identity()), torch.tensor([0.0, 1.0, 2.0])
    assert total(it, torch.tensor([[0.0], [1.0], [4.0]]), y) == pytest.approx(4 / 3)
    assert total(RegressionTask(nn.Identity(), loss=nn.L1Loss()), y.unsqueeze(1) + 1, y) == 1
    with pytest.raises(UserError, match="expected equal shapes"):
        total(it, torch.zeros(3, 2), y)
