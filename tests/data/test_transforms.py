"""`data.augment` as a list of transforms and functions; test_loader.py covers devices and resumes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lathe.data import (
    Augment,
    CutMix,
    Cutout,
    ImageDataModule,
    Mixup,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomFlip,
    Synthetic,
)
from lathe.data.loader import ImageLoader
from lathe.data.order import Batch
from lathe.data.random import Rng
from lathe.errors import UserError

pytestmark = pytest.mark.law2
Make = Callable[..., ImageLoader]


def noisy(images: torch.Tensor, rng: Rng, scale: float = 10.0) -> torch.Tensor:
    """A user's function that returns float32."""
    return images + scale * rng.normal(*images.shape[1:])


class Stripe:
    """A user's class: a black column at a random place."""

    def __call__(self, images: torch.Tensor, rng: Rng) -> torch.Tensor:
        here = torch.arange(images.shape[-1], device=images.device) == rng.integers(images.shape[-1], 1)
        return images.masked_fill(here[:, None, None], 0)


LISTS: dict[str, list[Any]] = {
    "fields": [RandomCrop(1), RandomFlip(), Cutout(3)],
    "late fields": [RandomErasing(1.0), RandomFlip("alternating"), RandomCrop(2, "reflect"), Cutout(3), Mixup(0.4)],
    "own": [RandomFlip(), Stripe(), functools.partial(noisy, scale=3.0), RandomErasing(fill="random"), CutMix(1.0)],
}
KINDS = pytest.mark.parametrize("kind", ["resident", "workers"])


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


@KINDS
@pytest.mark.parametrize("normalize", ["batch", "folded"])
@pytest.mark.parametrize(
    ("fields", "items"),
    [
        ({"crop": 2, "crop_fill": "reflect"}, [RandomCrop(2, "reflect")]),
        ({"crop": 1, "flip": "random"}, [RandomFlip(), RandomCrop(1)]),
        (
            {"crop": 2, "flip": "alternating", "cutout": 3, "mixup": 0.4, "cutmix": 1.0},
            [RandomCrop(2), RandomFlip("alternating"), Cutout(3), Mixup(0.4), CutMix(1.0)],
        ),
        ({"cutmix": 1.0}, CutMix(1.0)),
        ({}, []),
    ],
)
def test_a_list_gives_the_bits_of_the_same_fields(
    make: Make, kind: str, normalize: str, fields: dict[str, Any], items: Any
) -> None:
    form = {"normalize": normalize} if kind == "resident" else {}
    old = make(kind, batch_size=10, augment=Augment(**fields), **form)
    new = make(kind, batch_size=10, augment=items, **form)
    for _ in range(2):
        assert equal(list(old), list(new))


def test_one_more_in_the_list_leaves_the_numbers_of_the_others_alone(make: Make) -> None:
    alone, beside = RandomErasing(1.0, fill="zero"), [RandomErasing(1.0, fill="zero"), RandomErasing(1.0, fill="zero")]
    settings: dict[str, Any] = {"batch_size": 10, "normalizer": None}
    ((one, _), *_) = make(augment=[alone], **settings)
    ((two, _), *_) = make(augment=[Stripe(), alone], **settings)
    ((three, _), *_) = make(augment=beside, **settings)
    assert torch.equal((two == 0) | (one != 0), torch.ones_like(one, dtype=torch.bool))  # black pixels stay black
    assert (three == 0).sum() > (one == 0).sum()  # the second of a kind has its own random numbers


def test_images_are_those_of_the_transforms_called_by_hand(split: Any, make: Make) -> None:
    """In list order, with numbers by (seed, epoch, sample). Unshuffled: a sample's index is its place."""
    augment = [Stripe(), noisy]
    loader = make(batch_size=10, augment=augment, normalizer=None, shuffle=False, seed=5)
    for epoch in range(2):
        for number, (x, _) in enumerate(loader):
            samples = torch.arange(number * 10, number * 10 + 10)
            images = Stripe()(torch.from_numpy(split.images[samples]), Rng(5, epoch, samples, "Stripe/0"))
            assert torch.equal(x, noisy(images, Rng(5, epoch, samples, "noisy/0")))


def test_random_erasing_covers_a_box_of_the_asked_size() -> None:
    images = torch.full((4000, 3, 20, 30), 200, dtype=torch.uint8)
    rng = Rng(0, 0, torch.arange(4000), fill=torch.tensor([1, 2, 3], dtype=torch.uint8))
    erased = RandomErasing(0.3, (0.1, 0.2), (0.5, 2.0))(images, rng)
    assert erased.dtype == torch.uint8
    mask = (erased != images).all(1)
    assert erased.movedim(1, -1)[mask].unique(dim=0).tolist() == [[1, 2, 3]]
    area = mask.flatten(1).sum(1)
    assert abs(float((area > 0).float().mean()) - 0.3) < 0.03
    hit = mask[area > 0]
    tall, wide = hit.any(2).sum(1), hit.any(1).sum(1)
    assert torch.equal(tall * wide, hit.flatten(1).sum(1))  # a box
    assert area[area > 0].min() > 0.08 * 600
    assert area.max() < 0.22 * 600
    assert (wide / tall).min() > 0.4
    assert (wide / tall).max() < 2.5
    assert hit.any(2).any(0).all()  # at every place
    assert hit.any(1).any(0).all()
    assert len(RandomErasing(1.0, fill="random")(images[:1], Rng(0, 0, torch.arange(1))).unique()) > 20


def test_numbers_are_those_of_the_sample_and_uniform() -> None:
    whole, part = Rng(3, 1, torch.arange(50_000), "x"), Rng(3, 1, torch.tensor([4, 40_000]), "x")
    u, n, i = whole.uniform(2), whole.normal(3, 2), whole.integers(5)
    assert torch.equal(part.uniform(2), u[[4, 40_000]])
    assert torch.equal(part.normal(3, 2), n[[4, 40_000]])
    assert torch.equal(part.integers(5), i[[4, 40_000]])
    assert u.min() >= 0
    assert u.max() < 1
    assert torch.allclose(torch.histc(u, 10) / 100_000, torch.tensor(0.1), atol=0.004)
    assert float(u.T.corrcoef()[0, 1].abs()) < 0.02
    assert abs(float(n.mean())) < 0.01
    assert abs(float(n.std()) - 1) < 0.01
    assert (i.bincount() / 50_000 - 0.2).abs().max() < 0.01
    others = [Rng(4, 1, whole.samples, "x"), Rng(3, 2, whole.samples, "x"), Rng(3, 1, whole.samples, "y")]
    for other in others:
        assert float(torch.stack((u[:, 0], other.uniform())).corrcoef()[0, 1].abs()) < 0.02


def module(augment: Any, **settings: Any) -> ImageDataModule:
    source = Synthetic(num_classes=4, channels=1, image_size=8, train_size=64, val_size=16, test_size=16)
    facts = {"num_classes": 4, "channels": 1, "image_size": 8, "mean": [0.5], "std": [0.25], "batch_size": 16}
    return ImageDataModule(source, augment=augment, **(facts | settings))


def test_own_functions_are_tried_and_the_generators_left_alone() -> None:
    before = torch.get_rng_state()
    data = module([Stripe(), noisy, RandomCrop(1)])
    data.setup("fit")
    assert torch.equal(torch.get_rng_state(), before)
    x, _ = next(iter(data.train_dataloader()))
    assert x.shape == (16, 1, 8, 8)
    assert x.dtype == torch.float32
    assert abs(float(x.mean())) < 1  # normalised, on the scale of pixels


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (lambda x, rng: x + torch.rand(1), "draws from random, numpy.random or torch"),
        (lambda x, rng: x - x.float().mean(), "depends on the others of its batch"),
        (lambda x, rng: x / 0, "returned NaN or infinity"),
        (lambda x, rng: x / 255, r"returned numbers from 0 to 0"),
    ],
)
def test_what_is_not_reproducible_is_refused_before_the_first_epoch(function: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.augment\[1\].*{sentence}.*$"):
        module([RandomFlip(), function]).setup("fit")
    module([RandomFlip(), function]).setup("test")  # the test split does not call it


@pytest.mark.parametrize(
    ("augment", "sentence"),
    [
        ([Stripe], r"augment\[0\] is the class Stripe"),
        ([Mixup(1.0), RandomFlip()], r"augment\[1\]: RandomFlip comes after Mixup"),
    ],
)
def test_lists_that_cannot_be_are_refused(augment: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        module(augment)


def test_a_transform_of_bytes_after_a_function_that_returns_floats_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.augment\[1\]: RandAugment takes uint8 images"):
        module([noisy, RandAugment()]).setup("fit")
    module([RandAugment(), noisy]).setup("fit")


def test_folded_normalisation_leaves_no_pixels_to_transform() -> None:
    with pytest.raises(UserError, match=r"data\.normalize=folded"):
        module([Stripe()], normalize="folded")


@KINDS
@pytest.mark.parametrize("normalize", ["batch", "folded"])
@pytest.mark.parametrize(
    ("fields", "items"),
    [
        ({"crop": 2, "crop_fill": "reflect"}, [RandomCrop(2, "reflect")]),
        ({"crop": 1, "flip": "random"}, [RandomFlip(), RandomCrop(1)]),
        (
            {"crop": 2, "flip": "alternating", "cutout": 3, "mixup": 0.4, "cutmix": 1.0},
            [RandomCrop(2), RandomFlip("alternating"), Cutout(3), Mixup(0.4), CutMix(1.0)],
        ),
        ({"cutmix": 1.0}, CutMix(1.0)),
        ({}, []),
    ],
)
def test_fields_and_the_list_of_transforms_give_the_same_bits(
    make: Make, kind: str, normalize: str, fields: dict[str, Any], items: Any
) -> None:
    form = {"normalize": normalize} if kind == "resident" else {}
    old = make(kind, batch_size=10, augment=Augment(**fields), **form)
    new = make(kind, batch_size=10, augment=items, **form)
    for _ in range(2):
        assert equal(list(old), list(new))


def test_numbers_are_splitmix64() -> None:
    def mixed(x: int) -> int:
        x &= 2**64 - 1
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    rng = Rng(0, 0, torch.arange(2))
    first = mixed(int(rng._keys[1]) + 0x9E3779B97F4A7C15)
    assert int(rng.bits(1)[1]) % 2**64 == first
    assert mixed(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the published first number of seed 0
