"""The first losses of twelve recipes are those that tests/losses holds."""

import json
from pathlib import Path

import pytest
from losses.record import ALL, HERE, RECIPES, STEPS, family, read
from support.commands import check, run


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_losses_are_the_recorded_ones(recipe: str, tmp_path: Path) -> None:
    recorded = json.loads((HERE / f"{recipe}.json").read_text())
    # another model of the same family may add up in another order; another family rounds otherwise
    expected, tolerance, compared = recorded.get(family()), 1e-4, STEPS
    if expected is None:
        expected, tolerance, compared = next(iter(recorded.values())), 1e-2, 6  # differences grow with the steps
    check(run(*ALL, *RECIPES[recipe], f"paths.log_dir={tmp_path}", cwd=tmp_path))
    losses = read(tmp_path)
    assert len(losses) == len(expected) == STEPS
    for step, (a, b) in enumerate(zip(losses[:compared], expected, strict=False), 1):
        assert a == pytest.approx(b, rel=tolerance), f"{recipe}: the first differing step is {step}"
