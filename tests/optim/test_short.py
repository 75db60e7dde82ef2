"""The update of a small net equals torch's optimizers bit for bit, with fewer calls."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, LRScheduler

from lathe.optim.short import MOST, short_schedule, short_step, short_zero_grad


class OwnSGD(SGD):
    """A user's step."""


def made(kind: type[SGD] = SGD, **options: Any) -> SGD:
    """Build an optimizer over two groups of equal weights at each call; one weight never has a gradient."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3), nn.Linear(2, 2))
    decay = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim == 1]
    return kind([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.1, **options)


def weights(optimizer: Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained(optimizer: SGD, step: Callable[[SGD], Callable[[], Any]], steps: int = 6) -> list[Tensor]:
    """Return weights and states after some steps, the second half with another rate."""
    generator = torch.Generator().manual_seed(2)
    for number in range(steps):
        for parameter in weights(optimizer):
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.grad = None if parameter.shape[-1] == 2 else drawn
        if number == steps // 2:
            for group in optimizer.param_groups:
                group["lr"] = 0.03
        step(optimizer)()
    states = [
        state["momentum_buffer"] for state in optimizer.state.values() if state.get("momentum_buffer") is not None
    ]
    return [*(parameter.detach() for parameter in weights(optimizer)), *states]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.01},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
    ],
    ids=str,
)
def test_every_digit_is_torchs(options: dict[str, Any]) -> None:
    optimizer = made(**options)
    assert short_step(optimizer) != optimizer.step
    expected, found = trained(made(**options), lambda one: one.step), trained(optimizer, short_step)
    assert len(found) == len(expected) == 6 + (4 if options.get("momentum") else 0)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def hooked() -> SGD:
    optimizer = made()
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda: AdamW([nn.Parameter(torch.zeros(3))]),
        lambda: SGD([nn.Parameter(torch.zeros(MOST + 1))]),
        lambda: made(OwnSGD),
        lambda: made(fused=True),
        lambda: made(maximize=True),
        hooked,
    ],
    ids=["another", "large", "subclass", "fused", "maximize", "hooked"],
)
def test_others_keep_their_own(make: Callable[[], Optimizer]) -> None:
    optimizer = make()
    assert short_step(optimizer) == optimizer.step


def test_hooks_that_come_later_are_called() -> None:
    optimizer, called = made(), []
    step = short_step(optimizer)
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    step()
    assert called == [1]


class OwnLambda(LambdaLR):
    """A user's step."""


def scheduled(kind: Any = LambdaLR, factor: Any = lambda step: 1 / (1 + 0.1 * step), **options: Any) -> LRScheduler:
    return kind(made(**options), factor)


def state(scheduler: LRScheduler) -> dict[str, Any]:
    kept = {key: value for key, value in vars(scheduler).items() if key not in ("optimizer", "lr_lambdas")}
    return kept | {"rates": [group["lr"] for group in scheduler.optimizer.param_groups]}


def test_a_schedule_has_torchs_rates_and_state() -> None:
    ours, theirs = scheduled(), scheduled()
    step = short_schedule(ours)
    assert step != ours.step
    for scheduler in (ours, theirs):
        short_step(scheduler.optimizer)()
    for _ in range(5):
        step()
        theirs.step()
        assert state(ours) == state(theirs)
    ours.load_state_dict(theirs.state_dict())
    step()
    theirs.step()
    assert state(ours) == state(theirs)
    assert ours.get_last_lr() == theirs.get_last_lr()


@pytest.mark.parametrize("scheduler", [ExponentialLR(made(), 0.9), scheduled(OwnLambda)], ids=["another", "subclass"])
def test_other_schedules_keep_their_own(scheduler: LRScheduler) -> None:
    assert short_schedule(scheduler) == scheduler.step


def test_gradients_are_gone() -> None:
    optimizer = made()
    for parameter in weights(optimizer):
        parameter.grad = torch.ones_like(parameter)
    assert short_zero_grad(optimizer) != optimizer.zero_grad
    short_zero_grad(optimizer)()
    assert all(parameter.grad is None for parameter in weights(optimizer))
