"""The first losses of twelve recipes are those that tests/losses holds."""

import json

import pytest
from losses.record import HERE, RECIPES, STEPS, family, losses


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_losses_are_the_recorded_ones(recipe: str) -> None:
    recorded = json.loads((HERE / f"{recipe}.json").read_text())
    # another model of the same family may add up in another order; another family rounds otherwise
    wanted, tolerance = recorded.get(family()), 1e-4
    if wanted is None:
        wanted, tolerance = next(iter(recorded.values())), 1e-2
    found = losses(recipe)
    assert len(found) == len(wanted) == STEPS
    for step, (a, b) in enumerate(zip(found, wanted, strict=True), 1):
        assert a == pytest.approx(b, rel=tolerance), f"{recipe}: the first differing step is {step}"
