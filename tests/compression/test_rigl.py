"""Densities, random masks and exchanges match the paper."""

import pytest
import torch

from lathe.compression.pruning.rewiring import cosine_fraction, erdos_renyi_kernel, exchange, random_masks, uniform

SHAPES = {"conv1": (16, 3, 3, 3), "conv2": (16, 16, 3, 3), "conv3": (64, 64, 3, 3), "head": (10, 64)}


def sizes() -> dict[str, int]:
    return {name: torch.Size(shape).numel() for name, shape in SHAPES.items()}


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.95])
def test_densities_keep_the_asked_share(sparsity: float) -> None:
    for densities in (uniform(SHAPES, sparsity), erdos_renyi_kernel(SHAPES, sparsity)):
        kept = sum(densities[name] * size for name, size in sizes().items())
        assert kept == pytest.approx((1 - sparsity) * sum(sizes().values()))
        assert all(0 < density <= 1 for density in densities.values())


def test_erk_is_in_proportion_to_sum_over_product() -> None:
    densities = erdos_renyi_kernel(SHAPES, 0.8)
    assert densities["conv1"] == 1.0  # (16 + 3 + 3 + 3) / 432 exceeds its size
    ratio = {name: sum(shape) / sizes()[name] for name, shape in SHAPES.items()}
    sparse = [name for name in SHAPES if densities[name] < 1]
    assert len(sparse) >= 2
    scale = densities[sparse[0]] / ratio[sparse[0]]
    assert all(densities[name] / ratio[name] == pytest.approx(scale) for name in sparse)


def test_random_masks_have_exact_counts_and_depend_on_the_seed_alone() -> None:
    densities = erdos_renyi_kernel(SHAPES, 0.9)
    masks, again, other = (random_masks(SHAPES, densities, seed) for seed in (0, 0, 1))
    for name, shape in SHAPES.items():
        assert masks[name].shape == shape
        assert int(masks[name].sum()) == round(densities[name] * sizes()[name])
        assert torch.equal(masks[name], again[name])
    assert not torch.equal(masks["conv3"], other["conv3"])


def test_the_exchange_drops_the_smallest_and_grows_by_gradient() -> None:
    weight = torch.tensor([0.1, 4.0, 0.0, 2.0, 0.0, 0.0])
    mask = torch.tensor([True, True, False, True, False, False])
    gradient = torch.tensor([0.0, 0.0, 5.0, 9.0, 7.0, 1.0]).abs()
    new = exchange(weight, mask, gradient, 0.34)  # one of three
    assert new.tolist() == [False, True, False, True, True, False]
    # 0.1 was dropped, and the largest gradient that is not kept (9.0 is) was grown.
    back = exchange(weight, mask, torch.tensor([10.0, 0.0, 5.0, 9.0, 7.0, 1.0]), 0.34)
    assert torch.equal(back, mask)  # a weight just dropped may grow again
    assert torch.equal(exchange(weight, mask, gradient, 0.3), mask)  # less than one weight: no exchange


def test_the_exchange_keeps_the_number_of_weights_even_where_little_is_free() -> None:
    torch.manual_seed(0)
    for free in (0, 1, 5):
        mask = torch.ones(20, dtype=torch.bool)
        mask[:free] = False
        new = exchange(torch.randn(20) * mask, mask, torch.rand(20), 0.5)
        assert int(new.sum()) == 20 - free


def test_the_fraction_follows_a_cosine() -> None:
    assert cosine_fraction(0, 100, 0.3) == pytest.approx(0.3)
    assert cosine_fraction(50, 100, 0.3) == pytest.approx(0.15)
    assert cosine_fraction(100, 100, 0.3) == pytest.approx(0.0)
    assert cosine_fraction(300, 100, 0.3) == pytest.approx(0.0)
