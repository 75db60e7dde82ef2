"""Laws 2 and 3 for both loaders: devices and interruptions change nothing."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from data.test_transforms import LISTS, equal

from lathe.data.augment import Augment
from lathe.data.loader import ImageLoader, ResidentLoader

pytestmark = pytest.mark.law2

KINDS = pytest.mark.parametrize("kind", ["resident", "workers"])
# None: all that the fields of `data.augment` can do together
FIELDS = {"off": Augment(), "plain": Augment(crop=1, flip="random", cutout=3), "everything": None}
AUGMENTS = pytest.mark.parametrize("augment", [*FIELDS.values(), *LISTS.values()], ids=[*FIELDS, *LISTS])
Make = Callable[..., ImageLoader]


@KINDS
@AUGMENTS
def test_ranks_together_see_the_batches_of_one_process(make: Make, kind: str, augment: Any) -> None:
    settings = {"batch_size": 8} | ({"augment": augment} if augment else {})
    one = make(kind, **settings)
    for world in (2, 4):
        ranks = [make(kind, rank=r, world_size=world, **settings) for r in range(world)]
        for _ in range(2):  # epochs
            parts = zip(*ranks, strict=True)
            joined = [tuple(torch.cat(column) for column in zip(*batches, strict=True)) for batches in parts]
            assert equal(joined, list(one))
        one = make(kind, **settings)


@AUGMENTS
def test_workers_give_the_bits_of_the_resident_path(make: Make, augment: Any) -> None:
    settings = {"batch_size": 12} | ({"augment": augment} if augment else {})
    resident, stream = make(**settings), make("workers", **settings)
    for _ in range(2):
        assert equal(list(resident), list(stream))


@pytest.mark.parametrize("augment", FIELDS.values(), ids=FIELDS)
def test_folded_normalisation_gives_the_same_bits(make: Make, augment: Augment | None) -> None:
    settings = {"batch_size": 12} | ({"augment": augment} if augment else {})
    assert equal(list(make(**settings)), list(make(normalize="folded", **settings)))


def test_batches_have_the_declared_form(make: Make) -> None:
    x, y = next(iter(make(batch_size=8, augment=Augment(crop=1))))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((8, 3, 8, 8), torch.float32, (8,), torch.int64)
    x, y = next(iter(make(batch_size=8)))
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((8, 3, 8, 8), torch.float32, (8, 5), torch.float32)
    torch.testing.assert_close(y.sum(1), torch.ones(8))
    x, _ = next(iter(make(batch_size=8, augment=Augment(crop=1), normalizer=None)))
    assert x.dtype == torch.uint8


def test_an_epoch_shows_each_sample_at_most_once_and_epochs_differ(make: Make) -> None:
    loader = make(batch_size=16, augment=None, normalizer=None)
    epochs = [torch.cat([x for x, _ in loader]) for _ in range(2)]
    assert len(loader) == 3  # of 50 samples, 2 are left out
    assert all(len(epoch.unique(dim=0)) == 48 for epoch in epochs)
    assert not torch.equal(*epochs)


def test_mixing_partner_is_the_right_neighbour_in_the_global_batch(make: Make) -> None:
    plain = torch.cat([y for _, y in make(batch_size=10, augment=None)]).view(-1, 10)
    soft = torch.cat([y for _, y in make(batch_size=10, augment=Augment(mixup=1.0))]).view(-1, 10, 5)
    for own, partner, target in zip(plain.flatten(), plain.roll(-1, 1).flatten(), soft.flatten(0, 1), strict=True):
        assert set(target.nonzero().flatten().tolist()) <= {int(own), int(partner)}


@KINDS
@AUGMENTS
@pytest.mark.parametrize("interrupted", [1, 8])
def test_resume_continues_with_the_next_batch(make: Make, kind: str, augment: Any, interrupted: int) -> None:
    settings: dict[str, Any] = {"batch_size": 12} | ({"augment": augment} if augment else {})  # 4 batches an epoch
    whole = [batch for loader in [make(kind, **settings)] for _ in range(3) for batch in loader]
    first = make(kind, **settings)
    head = list(islice((batch for _ in range(3) for batch in first), interrupted))
    second = make(kind, **settings)
    second.load_state_dict(first.state_dict())
    tail = [batch for _ in range(4) for batch in second][: 12 - interrupted]
    assert equal(head + tail, whole)


def test_state_counts_what_was_yielded(make: Make) -> None:
    loader = make(batch_size=12)
    assert loader.state_dict() == {"epoch": 0, "batch": 0}
    abandoned = iter(loader)
    del abandoned
    states = []
    for _ in range(2):
        for _ in loader:
            states.append(tuple(loader.state_dict().values()))
    assert states == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 1), (1, 2), (1, 3), (1, 4)]
    assert next(iter(loader))[0].shape[0] == 12
    next(iter(loader))  # an epoch abandoned after its first batch is over
    assert loader.state_dict() == {"epoch": 3, "batch": 1}


@pytest.mark.parametrize("limit", [2, 0.5])
def test_a_state_at_the_trainers_limit_continues_with_the_next_epoch(make: Make, limit: float) -> None:
    loader = make(batch_size=12, limit=limit)
    list(islice(iter(loader), 2))
    resumed = make(batch_size=12, limit=limit)
    resumed.load_state_dict(loader.state_dict())
    assert equal([next(iter(resumed))], [next(iter(loader))])
    assert resumed.state_dict() == {"epoch": 1, "batch": 1}


@KINDS
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [3, 16, 64])
def test_evaluation_counts_every_sample_once(make: Make, kind: str, world: int, batch_size: int) -> None:
    ranks = [
        make(kind, train=False, augment=None, normalizer=None, batch_size=batch_size, rank=r, world_size=world)
        for r in range(world)
    ]
    shapes = {x.shape for rank in ranks for x, _ in rank}
    assert len(shapes) == 1
    assert len({len(list(rank)) for rank in ranks}) == 1
    images, labels = [], []
    for parts in zip(*ranks, strict=True):
        for x, y in parts:
            images.append(x[y != -100])
            labels.append(y[y != -100])
    reference = make(train=False, augment=None, normalizer=None, batch_size=50)
    assert equal([(torch.cat(images), torch.cat(labels))], list(reference))


@pytest.mark.parametrize("n", [1, 8, 9, 10])
@pytest.mark.parametrize("world", [1, 4])
def test_without_filling_rows_each_sample_is_there_once(n: int, world: int) -> None:
    """Each rank gets some of the last batch, if there are enough."""
    images, labels = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1), torch.arange(n)
    settings: dict[str, object] = {"num_classes": n, "normalizer": None, "augment": None, "device": torch.device("cpu")}
    counts, seen = [], []
    for rank in range(world):
        loader = ResidentLoader(images, labels, batch_size=8, rank=rank, world_size=world, **settings)
        loader.fills_up = False
        batches = list(loader)
        assert all(len(x) == len(y) > 0 for x, y in batches)
        counts.append(len(batches))
        seen += [label for _, y in batches for label in y.tolist()]
    assert sorted(seen) == list(range(n))
    if n % 8 == 0 or n % 8 >= world:
        assert counts == [-(-n // 8)] * world
