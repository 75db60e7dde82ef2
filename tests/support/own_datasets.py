"""Datasets and transforms as users write them, and a fake of Hugging Face's."""

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset


def pictures(n: int, classes: int = 2, side: int = 4) -> tuple[Tensor, Tensor]:
    y = torch.arange(n) % classes
    x = torch.randn(n, 1, side, side, generator=torch.Generator().manual_seed(n))
    return x + y.view(-1, 1, 1, 1), y


def values(n: int = 200) -> TensorDataset:
    """Return images with two values each."""
    x, _ = pictures(n)
    return TensorDataset(x, x.flatten(1) @ torch.linspace(-1, 1, 32).view(16, 2))


def labels(n: int = 200) -> TensorDataset:
    """Return images with two labels each."""
    x, y = values(n).tensors
    return TensorDataset(x, (y > 0).long())


def normalised(mean: list[float], std: list[float], n: int = 40, gamma: float = 1.0) -> TensorDataset:
    """Return all 256 values of a pixel in each channel, as from torchvision's `ToTensor` and `Normalize`."""
    pixels = (torch.arange(256).view(1, 1, 16, 16) + torch.arange(n).view(n, 1, 1, 1)).remainder(256)
    x = (pixels.float().div(255) ** gamma).repeat(1, len(mean), 1, 1)
    return TensorDataset(
        x.sub_(torch.tensor(mean)[:, None, None]).div_(torch.tensor(std)[:, None, None]), pixels[:, 0, 0, 0] % 2
    )


class Pictures(Dataset[Any]):
    """Images and class numbers; number 5 has another shape or label, if `odd` is "shape" or "label"."""

    def __init__(self, n: int = 100, classes: int = 2, odd: str = "", labels_at_hand: bool = True) -> None:
        self.x, self.y = pictures(n, classes)
        self.odd, self.read = odd, 0
        if labels_at_hand:
            self.targets = self.y.tolist()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        self.read += 1
        x, y = self.x[row], int(self.y[row])
        if self.odd and row == 5:
            return (x[:, :3], y) if self.odd == "shape" else (x, 7)
        return x, y


class Odd:
    """20 equal samples."""

    def __init__(self, x: Any = None, y: Any = 1) -> None:
        self.x, self.y = torch.zeros(1, 4, 4) if x is None else x, y
        self.targets = [0] * 20

    def __len__(self) -> int:
        return 20

    def __getitem__(self, row: int) -> Any:
        return self.x, self.y


class Drawing(Pictures):
    """Draws from each global generator."""

    def __getitem__(self, row: int) -> Any:
        x, y = super().__getitem__(row)
        return x + 0.1 * torch.randn(x.shape) + random.random() + float(np.random.normal()), y


class Columns:
    """The interface of datasets.Dataset that Lathe uses: columns, slices and `with_format`; not a torch class."""

    def __init__(self, n: int = 100, form: str | None = None, names: list[str] | None = None) -> None:
        self._x, self._y = pictures(n)
        self._form = form
        self.features = {"image": object(), "label": SimpleNamespace(names=names or ["cat", "dog"]), "id": object()}

    @property
    def column_names(self) -> list[str]:
        return list(self.features)

    def __len__(self) -> int:
        return len(self._x)

    def with_format(self, form: str | None) -> "Columns":
        return Columns(len(self), form, self.features["label"].names)  # type: ignore[attr-defined]

    def _row(self, row: int) -> dict[str, Any]:
        if self._form == "torch":
            return {"image": self._x[row], "label": self._y[row], "id": f"row {row}"}
        return {"image": self._x[row].tolist(), "label": int(self._y[row]), "id": f"row {row}"}

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [self._row(row)[key] for row in range(len(self))]
        if isinstance(key, int):
            return self._row(key)
        rows = range(len(self))[key] if isinstance(key, slice) else key  # columns of these rows, as a dict
        return {name: [self._row(row)[name] for row in rows] for name in self.features}

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        return [self._row(key) for key in keys]


def load_columns(form: str | None = "torch", n: int = 100) -> Columns:
    """Return the equivalent of `datasets.load_dataset(..., split="train").with_format("torch")`."""
    return Columns(n).with_format(form)


class Shift:
    """A transform that draws."""

    def __init__(self, by: float = 1.0) -> None:
        self.by = by

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.by * torch.rand(())


def halve(x: Tensor) -> Tensor:
    return x / 2


def padded(samples: list[Any]) -> Any:
    """A collate_fn for images of different heights."""
    height = max(x.shape[1] for x, _ in samples)
    x = torch.stack([torch.nn.functional.pad(x, (0, 0, 0, height - x.shape[1])) for x, _ in samples])
    return x, torch.tensor([y for _, y in samples])


class NoLength:
    def __getitem__(self, row: int) -> Any:
        return torch.zeros(1), 0


class Flow(IterableDataset[Any]):
    """A stream of samples that draws, and restarts each epoch."""

    def __init__(self, n: int = 96) -> None:
        self.x, self.y = pictures(n)
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[Any]:
        for row in range(len(self.x)):
            yield self.x[row] + 0.1 * torch.randn(1), int(self.y[row])


class Stateful(Flow):
    """Resumes from its state."""

    start, at = 0, 0

    def __iter__(self) -> Iterator[Any]:
        first, self.start = self.start, 0
        for row in range(first, len(self.x)):
            self.at = row + 1
            yield self.x[row] + 0.1 * torch.randn(1), int(self.y[row])

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]
