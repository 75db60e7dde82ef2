"""A schedule restored into a longer run continues as one of that length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim import lr_scheduler as torchs

from lathe.trainer.schedule_resume import replan

pytestmark = pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning", "ignore:Detected call of")


def warmed(optimizer: SGD, n: int) -> Any:
    parts = [torchs.LinearLR(optimizer, 0.1, 1, 3), torchs.CosineAnnealingLR(optimizer, n - 3)]
    return torchs.SequentialLR(optimizer, parts, [3])


KINDS: dict[str, Callable[[SGD, int], Any]] = {
    "one cycle": lambda optimizer, n: torchs.OneCycleLR(optimizer, 0.5, total_steps=n),
    "cosine": lambda optimizer, n: torchs.CosineAnnealingLR(optimizer, n),
    "linear": lambda optimizer, n: torchs.LinearLR(optimizer, 1, 0.1, n),
    "polynomial": lambda optimizer, n: torchs.PolynomialLR(optimizer, n, 2),
    "steps": lambda optimizer, n: torchs.MultiStepLR(optimizer, [n // 2, n - 3]),
    "constant": lambda optimizer, n: torchs.ConstantLR(optimizer, 0.5, n - 2),
    "warmed up": warmed,
}


def made(kind: str, n: int, steps: int) -> tuple[SGD, Any]:
    """A schedule of length `n` after some steps."""
    optimizer = SGD([{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in (0.5, 0.05)])
    scheduler = KINDS[kind](optimizer, n)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def rates(optimizer: SGD, scheduler: Any, steps: int) -> list[list[float]]:
    found = [[group["lr"] for group in optimizer.param_groups]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append([float(group["lr"]) for group in optimizer.param_groups])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("done", [6, 10])  # within the shorter schedule, and at its end
def test_a_longer_run_follows_the_longer_schedule(kind: str, done: int) -> None:
    optimizer, scheduler = made(kind, 20, 0)
    fresh = scheduler.state_dict()
    for part, saved in zip((optimizer, scheduler), made(kind, 10, done), strict=True):
        part.load_state_dict(saved.state_dict())
    changes = replan(scheduler, fresh)
    assert changes
    assert all(" (was " in change for change in changes)
    expected = rates(*made(kind, 20, done), 20 - done)
    for mine, theirs in zip(rates(optimizer, scheduler, 20 - done), expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("kind", [*KINDS, "chained"])
def test_the_same_length_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chained = lambda optimizer, n: torchs.ChainedScheduler([KINDS["cosine"](optimizer, n)])  # noqa: E731
    monkeypatch.setitem(KINDS, "chained", chained)
    optimizer, scheduler = made(kind, 10, 6)
    state = scheduler.state_dict()
    _, other = made(kind, 10, 0)
    before = [group["lr"] for group in optimizer.param_groups]
    assert replan(scheduler, other.state_dict()) == []
    assert [group["lr"] for group in optimizer.param_groups] == before
    assert scheduler.state_dict() == state
