"""A dataset's random draws (`random`, `numpy.random`, `torch`) as a function of (seed, epoch, sample)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset, Subset, TensorDataset, get_worker_info

from lathe.data.generators import GENERATORS, put_back, seed_all, seeding
from lathe.data.random import hashed_seed, sample_seeds


class Rows(list[int]):
    """Samples of a batch, by number, and the epoch in which they are drawn."""

    def __init__(self, rows: Iterable[int], epoch: int) -> None:
        super().__init__(rows)
        self.epoch = epoch


class Rowed(list[Any]):
    """The samples of a batch, and which of the dataset they are."""

    def __init__(self, samples: Sequence[Any], rows: Sequence[int]) -> None:
        super().__init__(samples)
        self.rows = rows


class Reads(ABC):
    """A dataset that knows best how to read the samples of a batch of another `dataset`."""

    dataset: Any

    @abstractmethod
    def read(self, rows: Sequence[int], steps: Iterator[Any] | None) -> Any:
        """What the collate function is given. Where there are `steps`, samples are read one at a time, and each after
        the next step, which seeds what it draws from.
        """


def draws_nothing(dataset: Any) -> bool:
    """Whether a dataset is known to draw nothing: tensors, or some of their rows."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) is TensorDataset or getattr(dataset, "draws_nothing", False) is True


def fetch(dataset: Any, rows: Sequence[int], steps: Iterator[Any] | None = None) -> Any:
    """The samples, all at once from a dataset that can (`__getitems__`, as torch's own loader asks for them); one after
    another where there are `steps`, each after the next of these.
    """
    if isinstance(dataset, Reads):
        return dataset.read(rows, steps)
    if steps is not None:
        return [dataset[row] for _, row in zip(steps, rows, strict=True)]
    if getattr(dataset, "__getitems__", None):
        return dataset.__getitems__(rows)
    return [dataset[row] for row in rows]


class Seeded(Dataset[Any]):
    """A dataset that is asked for the samples of an epoch, and whose draws from the global generators follow from
    (seed, epoch, sample). The generators are left as they were; in a worker, which has nothing else to draw, they
    follow from the batch afterwards, for a `collate_fn` that draws.

    Seeding for each sample costs more than many a sample, so only those generators are that are drawn from: a batch is
    first read without, and read again if another generator has moved than was known.

    Args:
        dataset: of the user, or one that `Reads`.
        seed: of the run.
        collate_draws: whether the `collate_fn` may; False spares the seeding for it.
    """

    def __init__(self, dataset: Any, seed: int, collate_draws: bool = True) -> None:
        self.dataset, self.seed, self.collate_draws = dataset, seed, collate_draws
        self._drawn_from: set[int] = set()  # places in GENERATORS

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
    """The next samples, one for each of their `numbers`, drawn as (seed, epoch, number) say; fewer at the end."""
    found = []
    with put_back():
        for number in numbers:
            seed_all(hashed_seed(seed, f"sample {number}", epoch))
            try:
                found.append(next(samples))
            except StopIteration:
                break
    return found
