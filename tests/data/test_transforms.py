"""`data.augment` as a list of transforms and functions; test_loader.py covers devices and resumes."""

import colorsys
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from lathe.data import (
    Augment,
    ColorJitter,
    CutMix,
    Cutout,
    ImageDataModule,
    Mixup,
    RandAugment,
    RandomCrop,
    RandomErasing,
    RandomFlip,
    RandomResizedCrop,
    Synthetic,
    Transform,
    TrivialAugmentWide,
)
from lathe.data import transforms as ops
from lathe.data.augment import recipe
from lathe.data.loader import ImageLoader
from lathe.data.order import Batch
from lathe.data.random import Rng
from lathe.data.transforms import OPS, resized
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


def equal(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True)
    )


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
def test_a_list_gives_the_bits_of_the_same_fields(make: Make, fields: dict[str, Any], items: Any) -> None:
    old, new = make(batch_size=10, augment=Augment(**fields)), make(batch_size=10, augment=items)
    for _ in range(2):
        assert equal(list(old), list(new))


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
        (lambda x, rng: x - x.float().mean(), "gives another image when it is called with other images"),
        (lambda x, rng: x / 0, "returned numbers from nan"),
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


@pytest.mark.parametrize("augment", [{}, {"crop": 4}, 4, "flip"])
def test_what_is_no_list_is_refused(augment: Any) -> None:
    with pytest.raises(UserError, match=rf"^augment={augment!r}: expected .*a list"):
        module(augment)
    with pytest.raises(UserError, match=rf"^augment={augment!r}: expected a list of transforms, or lathe\.data\.Aug"):
        recipe(augment)


def test_a_transform_of_bytes_after_a_function_that_returns_floats_is_refused() -> None:
    with pytest.raises(UserError, match=r"data\.augment\[1\]: RandAugment takes uint8 images"):
        module([noisy, RandAugment()]).setup("fit")
    module([RandAugment(), noisy]).setup("fit")


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


# The transforms of `data.augment` compared per image with Pillow, colorsys and torch's interpolation.


N = 24


def pictures(channels: int, height: int = 13, width: int = 17, n: int = N) -> Tensor:
    """uint8 [n, channels, height, width], smooth and noisy ones of different spans; the last two are of one colour."""
    random = torch.Generator().manual_seed(channels)
    coarse = torch.rand((n, channels, 4, 4), generator=random)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bilinear")
    noise = torch.rand((n, channels, height, width), generator=random)
    share = torch.linspace(0, 1, n)[:, None, None, None]
    low = torch.rand((n, channels, 1, 1), generator=random) / 2
    images = ((low + (1 - low) * (share * noise + (1 - share) * smooth)) * 255).round().to(torch.uint8)
    images[-2], images[-1] = 7, 255
    return images


def to_pil(image: Tensor) -> Image.Image:
    return Image.fromarray(image[0].numpy() if len(image) == 1 else image.permute(1, 2, 0).numpy())


def from_pil(image: Image.Image) -> Tensor:
    array = torch.from_numpy(np.array(image))
    return array[None] if array.ndim == 2 else array.permute(2, 0, 1)


def one_by_one(images: Tensor, levels: Tensor, function: Callable[[Image.Image, float], Image.Image]) -> Tensor:
    return torch.stack([from_pil(function(to_pil(i), float(v))) for i, v in zip(images, levels, strict=True)])


EXACT: dict[str, tuple[Any, Any, Any]] = {
    "brightness": (ops.brightness, lambda i, v: ImageEnhance.Brightness(i).enhance(v), (0, 2)),
    "contrast": (ops.contrast, lambda i, v: ImageEnhance.Contrast(i).enhance(v), (0, 2)),
    "color": (ops.saturation, lambda i, v: ImageEnhance.Color(i).enhance(v), (0, 2)),
    "sharpness": (ops.sharpness, lambda i, v: ImageEnhance.Sharpness(i).enhance(v), (0, 2)),
    "posterize": (ops.posterize, lambda i, v: ImageOps.posterize(i, int(v)), [*range(1, 9)] * 3),
    "solarize": (ops.solarize, ImageOps.solarize, (0, 255)),
    "auto_contrast": (ops.autocontrast, lambda i, _: ImageOps.autocontrast(i), (0, 1)),
    "equalize": (ops.equalize, lambda i, _: ImageOps.equalize(i), (0, 1)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", EXACT)
def test_operations_on_pixels_are_pillows_to_the_bit(name: str, channels: int) -> None:
    operation, reference, span = EXACT[name]
    images = pictures(channels, *((40, 30) if name == "equalize" else (13, 17)))
    levels = torch.linspace(*span, N) if isinstance(span, tuple) else torch.tensor(span)
    found = operation(images, levels)
    assert found.dtype == torch.uint8
    assert torch.equal(found, one_by_one(images, levels, reference))
    assert name == "color" or not torch.equal(found, images)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


MOVED: dict[str, tuple[Any, Any, tuple[float, float]]] = {
    "shear_x": (ops.shear_x, lambda i, v: affine(i, 1, v, 0, 0, 1, 0), (-0.99, 0.99)),
    "shear_y": (ops.shear_y, lambda i, v: affine(i, 1, 0, 0, v, 1, 0), (-0.99, 0.99)),
    "translate_x": (ops.translate_x, lambda i, v: affine(i, 1, 0, -int(v), 0, 1, 0), (-9.7, 9.7)),
    "translate_y": (ops.translate_y, lambda i, v: affine(i, 1, 0, 0, 0, 1, -int(v)), (-9.7, 9.7)),
    "rotate": (ops.rotate, lambda i, v: i.rotate(v, Image.Resampling.NEAREST), (-135, 135)),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", MOVED)
def test_moved_pixels_are_pillows(name: str, channels: int) -> None:
    """Except between two pixels: Pillow counts in 1/65536 of a pixel."""
    operation, reference, (low, high) = MOVED[name]
    images, levels = pictures(channels, 32, 30), torch.linspace(low, high, N, dtype=torch.float64)
    differ = (operation(images, levels) != one_by_one(images, levels, reference)).any(1).float().mean()
    assert differ <= (0.002 if name in ("rotate", "shear_x", "shear_y") else 0)
    assert not torch.equal(operation(images, levels), images)


def test_hue_is_turned_as_colorsys_does() -> None:
    images, shifts = pictures(3, 5, 7), torch.linspace(-0.5, 0.5, N)
    found = ops.hue(images, shifts)
    for image, shift, turned in zip(images, shifts.tolist(), found, strict=True):
        for before, after in zip(image.flatten(1).T.tolist(), turned.flatten(1).T.tolist(), strict=True):
            h, s, v = colorsys.rgb_to_hsv(*(x / 255 for x in before))
            expected = [255 * x for x in colorsys.hsv_to_rgb((h + shift) % 1, s, v)]
            assert max(abs(a - b) for a, b in zip(after, expected, strict=True)) <= 0.51
    assert torch.equal(ops.hue(images, torch.zeros(N)), images)


def test_a_box_is_enlarged_as_torch_interpolates() -> None:
    images, random = pictures(3, 20, 30), torch.Generator().manual_seed(0)
    tall, wide = torch.randint(1, 21, (N,), generator=random), torch.randint(1, 31, (N,), generator=random)
    top = (torch.rand(N, generator=random) * (21 - tall)).long()
    left = (torch.rand(N, generator=random) * (31 - wide)).long()
    box = torch.stack((top, top + tall, left, left + wide), 1)
    box[0] = torch.tensor([0, 20, 0, 30])
    found = resized(images, box)
    assert torch.equal(found[0], images[0])
    for image, (a, b, c, d), enlarged in zip(images, box.tolist(), found, strict=True):
        expected = torch.nn.functional.interpolate(image[None, :, a:b, c:d].float(), (20, 30), mode="bilinear")[0]
        assert (enlarged.float() - expected).abs().max() <= 0.501
    torch.testing.assert_close(resized(images.float(), box).round(), found.float(), rtol=0, atol=1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("policy", [TrivialAugmentWide(), RandAugment(3, 19)])
def test_policies_do_their_operations_one_image_after_another(policy: Any, channels: int) -> None:
    images, rng = pictures(channels, 32, 32, 400), Rng(1, 2, torch.arange(400))
    found = policy(images, rng)
    again, expected = Rng(1, 2, torch.arange(400)), images
    if isinstance(policy, RandAugment):
        chosen, places = (
            again.integers(14, 3),
            torch.full((400, 3), 19),
        )  # 20 would shear by 0.2, whose rows lie between two pixels
        coins = again.uniform(3) < 0.5
    else:
        chosen, places = again.integers(14)[:, None], again.integers(31)[:, None]
        coins = again.uniform()[:, None] < 0.5
    names = list(OPS)
    levels = policy.levels(32, 32)
    for column in range(chosen.shape[1]):
        done = []
        for image, op, place, coin in zip(
            expected, chosen[:, column], places[:, column], coins[:, column], strict=True
        ):
            name, (first, last) = names[op], levels.get(names[op]) or (0, 0)
            level = first + (last - first) * int(place) / 30
            level = -level if coin and OPS[name][1] else level
            if name in EXACT:
                level = 1 + level if name in ("brightness", "color", "contrast", "sharpness") else level
                done.append(from_pil(EXACT[name][1](to_pil(image), round(level) if name == "posterize" else level)))
            elif name in MOVED:
                done.append(from_pil(MOVED[name][1](to_pil(image), level)))
            else:
                done.append(image)
        expected = torch.stack(done)
    assert (found == expected).all(1).float().mean() > 0.995
    assert chosen.unique().tolist() == list(range(14))
    same = (found == images).flatten(1).all(1).float().mean()
    assert same < 0.5


def test_published_levels() -> None:
    """Posterize keeps 8 to 2 bits in TrivialAugment, 8 to 4 in RandAugment, rounded as torchvision does."""
    for policy, span in ((TrivialAugmentWide(), 6), (RandAugment(), 4)):
        first, last = policy.levels(32, 32)["posterize"] or (0, 0)
        bits = torch.linspace(first, last, 31, dtype=torch.float64).round().int()
        published = 8 - (torch.arange(31) / (30 / span)).round().int()
        assert (bits - published).abs().max() <= 1  # halves are rounded to even on either side
        assert (bits != published).sum() <= span
    assert RandAugment().levels(32, 48)["translate_x"] == (0, 150 / 331 * 48)
    assert TrivialAugmentWide().levels(32, 48)["translate_x"] == (0, 32)


def test_jitter_is_its_four_operations_in_each_order() -> None:
    images, jitter = pictures(3, n=200), ColorJitter(0.4, 1.5, 0.3, 0.1)
    found, rng = jitter(images, Rng(0, 0, torch.arange(200))), Rng(0, 0, torch.arange(200))
    u, order = rng.uniform(4), rng.uniform(4).argsort(1)
    spans = {"brightness": (0.6, 1.4), "contrast": (0, 2.5), "saturation": (0.7, 1.3), "hue": (-0.1, 0.1)}
    for i in range(200):
        image = images[i : i + 1]
        for number in order[i].tolist():
            name, (low, high) = list(spans.items())[number]
            share = float(u[i, number])
            image = getattr(ops, name)(image, torch.tensor([low + (high - low) * share]))
        assert (image.int() - found[i].int()).abs().max() <= 1
    assert len({tuple(row) for row in order.tolist()}) == 24
    only = ColorJitter(brightness=0.5)(images, Rng(0, 0, torch.arange(200)))
    assert torch.equal(only, ops.brightness(images, 0.5 + u[:, 0]))


ALL = [
    RandomErasing(fill="random"),
    RandomResizedCrop(),
    ColorJitter(0.4, 0.4, 0.4, 0.2),
    RandAugment(),
    TrivialAugmentWide(),
]


@pytest.mark.law2
@pytest.mark.parametrize("transform", ALL, ids=lambda item: type(item).__name__)
@pytest.mark.parametrize(("channels", "height", "width"), [(3, 7, 11), (1, 28, 28)])
def test_an_image_is_the_same_bits_in_any_batch(transform: Transform, channels: int, height: int, width: int) -> None:
    if channels == 1 and isinstance(transform, ColorJitter):
        transform = ColorJitter(0.4, 0.4)
    transform.check(channels, height, width)
    images, samples = pictures(channels, height, width, 61), torch.arange(61) * 7
    before = images.clone()
    whole = transform(images, Rng(5, 3, samples))
    assert torch.equal(images, before)  # the data set is not modified
    assert (whole.dtype, whole.shape) == (images.dtype, images.shape)
    assert not torch.equal(whole, images)
    for part in (slice(0, 30), slice(30, 61), slice(59, 60), torch.randperm(61)):
        assert torch.equal(transform(images[part], Rng(5, 3, samples[part])), whole[part])
    assert not torch.equal(transform(images, Rng(5, 4, samples)), whole)
