"""LightningModules whose core takes and returns nested containers, and their data."""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset


class Fusion(nn.Module):
    """Tokens and a vector with a mask to logits and features."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.linear = nn.Linear(3, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)

    def forward(self, tokens: Tensor, extra: dict[str, Tensor], scale: float = 1.0) -> dict[str, Any]:
        mask = extra["mask"].unsqueeze(-1)
        pooled = (self.embedding(tokens) * mask).sum(1) / mask.sum(1).clamp_min(1)
        hidden = F.relu(self.norm(pooled + scale * self.linear(extra["vector"])))
        return {"logits": self.head(hidden), "parts": (hidden, tokens.max(1).values), "nothing": None}


class LitFusion(LightningModule):
    """Classifies dict batches; its prediction is a dict as well."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.backbone = Fusion(width)

    def outputs(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        extra = {"mask": batch["mask"], "vector": batch["vector"]}
        found: dict[str, Any] = self.backbone(batch["tokens"], extra=extra, scale=0.5)
        return found

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self.outputs(batch)["logits"], batch["label"])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits, label = self.outputs(batch)["logits"], batch["label"]
        self.log("val_loss", F.cross_entropy(logits, label), batch_size=len(label))
        self.log("val_accuracy", (logits.argmax(1) == label).float().mean(), batch_size=len(label))

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        logits = self.outputs(batch)["logits"]
        return {"label": logits.argmax(1), "probabilities": logits.softmax(1)}

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.5)


class Rows(Dataset[Any]):
    def __init__(self, n: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tokens, self.vector = torch.randint(0, 11, (n, 6), generator=draw), torch.randn(n, 3, generator=draw)
        self.mask = (torch.rand(n, 6, generator=draw) > 0.3).float()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        vector = self.vector[row]
        found = {"tokens": self.tokens[row], "vector": vector, "mask": self.mask[row]}
        return found | {"label": (vector.sum() > 0).long()}


class FusionData(LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(Rows(48), 16, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Rows(26), 16)

    def predict_dataloader(self) -> Any:
        return DataLoader(Rows(26), 10)


class Regressor(LightningModule):
    """A net of one tensor; the default predict_step calls `forward`."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), *(nn.Linear(16, 16) for _ in range(layers)), nn.ReLU())
        self.net.append(nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.net(x)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch["vector"]), batch["vector"][:, :2])

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch["vector"]), batch["vector"][:, :2]))

    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=0.05)


class Sorting(nn.Module):
    """Has a branch on the values of its input, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x if x.sum().item() > 0 else -x)


class Branching(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.net = Sorting()  # type: ignore[assignment]
