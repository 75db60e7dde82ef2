"""A dataset's random draws (`random`, `numpy.random`, `torch`) as a function of (seed, epoch, sample)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from lathe.data.generators import GENERATORS, put_back, seed_all, seeding
from lathe.data.random import hashed_seed, sample_seeds


class Rows(list[int]):
    """Indices of the samples of a batch, and their epoch."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class Rowed(list[Any]):
    """The samples of a batch, and their indices in the dataset."""

    def __init__(self, samples: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__(samples)
        self.rows = rows


class Reads(ABC):
    """A dataset that reads the samples of a batch from another `dataset` itself."""

    dataset: Any

    @abstractmethod
    def read(self, rows: Sequence[int], steps: Iterator[Any] | None) -> Any:
        """Return the input of the collate function; take one of `steps` before each sample, to seed its draws."""


def draws_nothing(dataset: Any) -> bool:
    """Return whether a dataset is known to draw nothing, such as a TensorDataset."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or getattr(dataset, "draws_nothing", False) is True


def fetch(dataset: Any, rows: Sequence[int], steps: Iterator[Any] | None = None) -> Any:
    """Return the samples, by `__getitems__` if there is one; with `steps`, one by one after each step."""
    if isinstance(dataset, Reads):
        return dataset.read(rows, steps)
    if steps is not None:
        return [dataset[row] for _, row in zip(steps, rows, strict=True)]
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(rows)
    return [dataset[row] for row in rows]


class Seeded(Dataset[Any]):
    """A dataset whose draws from the global generators follow from (seed, epoch, sample).

    The generators are restored after each batch. In a worker they are seeded by the batch, for a `collate_fn` that
    draws; `collate_draws` False saves that. Seeding can cost more than reading a sample, so only generators in use are
    seeded: a batch is read, and read again if it has drawn from another generator.
    """

    def __init__(self, dataset: Any, seed: int, collate_draws: bool = True) -> None:
        self.dataset, self.seed, self.collate_draws = dataset, seed, collate_draws
        self._drawn_from: set[int] = set()  # indices in GENERATORS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, rows: Rows) -> Any:
        with put_back() as taken:
            while True:
                known, steps = self._drawn_from, None
                if known:
                    words = sample_seeds(self.seed, rows, rows.epoch)
                    steps = seeding([GENERATORS[place] for place in sorted(known)], words)
                samples = fetch(self.dataset, rows, steps)
                others = [place for place in range(len(GENERATORS)) if place not in known]
                moved = {place for place in others if GENERATORS[place].moved(taken[place])}
                if not moved:
                    break
                self._drawn_from = known | moved
        if self.collate_draws and rows and get_worker_info() is not None:
            seed_all(hashed_seed(self.seed, f"batch of {rows[0]}", rows.epoch))
        return samples if isinstance(self.dataset, Reads) else Rowed(samples, rows)


def drawn_in_turn(samples: Iterator[Any], numbers: Iterable[int], seed: int, epoch: int) -> list[Any]:
    """Return the next samples, drawn by (seed, epoch, number) for each of `numbers`; fewer at the end."""
    found = []
    with put_back():
        for number in numbers:
            seed_all(hashed_seed(seed, f"sample {number}", epoch))
            try:
                found.append(next(samples))
            except StopIteration:
                break
    return found
