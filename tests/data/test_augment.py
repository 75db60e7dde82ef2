"""Batched augmentation compared with per-sample references that use the same random numbers."""

import numpy as np
import pytest
import torch

from lathe.data.augment import Augment, Draws, Normalizer, box_mask, crop_and_flip, cutout, draw, mix
from lathe.data.loader import Bank


def reference(images: torch.Tensor, draws: Draws, padding: int, fill: str) -> torch.Tensor:
    """Augment one image at a time, with NumPy's pad and slices."""
    mode = {"zero": "constant", "reflect": "reflect"}[fill]
    result = []
    for i, image in enumerate(images.numpy()):
        flipped = image[:, :, ::-1] if draws.flip is not None and draws.flip[i] else image
        padded = np.pad(flipped, ((0, 0), (padding, padding), (padding, padding)), mode=mode)
        top, left = (0, 0) if draws.top is None else (int(draws.top[i]), int(draws.left[i]))
        result.append(padded[:, top : top + image.shape[1], left : left + image.shape[2]])
    return torch.from_numpy(np.stack(result))


@pytest.mark.parametrize("fill", ["zero", "reflect"])
@pytest.mark.parametrize("flip", ["none", "random"])
@pytest.mark.parametrize(("padding", "shape"), [(0, (1, 8, 8)), (3, (2, 5, 7))])
def test_crop_and_flip_equal_a_plain_reference_bit_for_bit(
    fill: str, flip: str, padding: int, shape: tuple[int, int, int]
) -> None:
    images = torch.randint(0, 256, (60, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = draw(Augment(crop=padding, flip=flip), seed=1, epoch=2, n=60, height=shape[1], width=shape[2])
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(1))[:37]
    expected = reference(images[rows], draws[rows], padding, fill)
    assert torch.equal(crop_and_flip(images[rows], draws[rows], padding, fill), expected)
    bank = Bank(images, padding, fill, flips=flip != "none")
    assert torch.equal(bank.gather(rows, draws[rows]), expected)
    if padding:
        bank.windows = bank.strided_windows()  # as on a GPU
        assert torch.equal(bank.gather(rows, draws[rows]), expected)


def test_all_offsets_and_both_sides_occur() -> None:
    draws = draw(Augment(crop=1, flip="random"), seed=0, epoch=0, n=2000, height=8, width=8)
    assert len({*zip(draws.top.tolist(), draws.left.tolist(), draws.flip.tolist(), strict=True)}) == 18


def test_alternating_flip_turns_every_sample_at_every_epoch() -> None:
    flips = [draw(Augment(flip="alternating"), seed=0, epoch=e, n=1000, height=8, width=8).flip for e in range(4)]
    assert torch.equal(flips[0], ~flips[1])
    assert torch.equal(flips[0], flips[2])
    assert torch.equal(flips[1], flips[3])
    assert 400 < flips[0].sum() < 600


def test_switching_a_method_on_leaves_the_others_numbers_alone() -> None:
    one, every = Augment(crop=2), Augment(crop=2, flip="random", cutout=4, mixup=1.0, cutmix=1.0)
    alone, together = (draw(augment, seed=0, epoch=3, n=50, height=8, width=8) for augment in (one, every))
    assert torch.equal(alone.top, together.top)
    assert torch.equal(alone.left, together.left)


@pytest.mark.parametrize("side", [4, 5, 20])
def test_cutout_is_a_square_that_the_border_cuts_off(side: int) -> None:
    images = torch.full((500, 3, 16, 16), 200, dtype=torch.uint8)
    draws = draw(Augment(cutout=side), seed=0, epoch=0, n=500, height=16, width=16)
    filled = cutout(images, draws.cutout, torch.tensor([1, 2, 3], dtype=torch.uint8))
    changed = (filled != 200).all(1)
    area = changed.flatten(1).sum(1)
    assert area.max() == min(side, 16) ** 2
    # at a corner, the part that begins at the centre is left
    assert area.min() >= (side - side // 2) ** 2 if side < 16 else True
    assert filled[0, :, changed[0]].unique(dim=1).flatten().tolist() == [1, 2, 3]


def test_mixup_weighs_pixels_and_labels_alike() -> None:
    own, partner = torch.full((100, 3, 8, 8), 1.0), torch.full((100, 3, 8, 8), -3.0)
    draws = draw(Augment(mixup=1.0), seed=0, epoch=0, n=100, height=8, width=8)
    mixed, targets = mix(own, partner, torch.zeros(100).long(), torch.ones(100).long(), draws, 3)
    share = draws.share
    torch.testing.assert_close(mixed, (share - 3 * (1 - share))[:, None, None, None].expand_as(mixed))
    assert torch.equal(targets, torch.stack([share, 1 - share, torch.zeros(100)], dim=1))
    assert share.std() > 0.2


def test_cutmix_pastes_a_box_and_counts_its_pixels() -> None:
    own, partner = torch.zeros(200, 1, 8, 8), torch.ones(200, 1, 8, 8)
    draws = draw(Augment(cutmix=1.0), seed=0, epoch=0, n=200, height=8, width=8)
    mixed, targets = mix(own, partner, torch.zeros(200).long(), torch.ones(200).long(), draws, 2)
    assert set(mixed.unique().tolist()) == {0.0, 1.0}
    torch.testing.assert_close(targets[:, 1], mixed.mean((1, 2, 3)))
    assert torch.equal(mixed[:, 0] == 1, box_mask(draws.paste, 8, 8)[:, 0])


def test_with_both_each_sample_takes_either() -> None:
    draws = draw(Augment(mixup=1.0, cutmix=1.0), seed=0, epoch=0, n=1000, height=8, width=8)
    pasted = (draws.paste[:, 1] > draws.paste[:, 0]) & (draws.paste[:, 3] > draws.paste[:, 2])
    assert not (pasted & (draws.share < 1)).any()
    assert 420 < (draws.share < 1).sum() < 580


def test_normalisation_is_the_textbook_formula() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    normalizer = Normalizer((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 3)
    expected = (images.double() / 255 - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / torch.tensor([0.2, 0.25, 0.3])[
        :, None, None
    ]
    torch.testing.assert_close(normalizer(images), expected.float(), rtol=0, atol=2e-6)
    assert normalizer.fill.tolist() == [102, 128, 153]
