"""Third-party optimizers and schedulers: construction by signature, and trials before training."""

import inspect
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lathe.errors import ArgumentError, UserError, did_you_mean

LENGTH = "total_steps"  # the parameter that gets the run's number of optimizer steps


def wants_length(factory: Callable[..., Any]) -> bool:
    """Return whether a scheduler, or one that it contains, has a parameter `total_steps`."""
    return LENGTH in inspect.signature(factory).parameters or any(map(wants_length, _inner(factory)))


def _is_scheduler(item: Any) -> bool:
    return isinstance(item, partial) or (inspect.isclass(item) and issubclass(item, LRScheduler))


def _inner(factory: Any) -> list[Any]:
    """Return the schedulers that one such as SequentialLR contains."""
    lists = [value for value in getattr(factory, "keywords", {}).values() if isinstance(value, list)]
    return [item for value in lists for item in value if _is_scheduler(item)]


def _made(factory: Any, optimizer: Optimizer, total_steps: int | None) -> Any:
    function, given = getattr(factory, "func", factory), dict(getattr(factory, "keywords", {}))
    for key, value in given.items():
        if isinstance(value, list):  # SequentialLR's and ChainedScheduler's schedulers, in order
            given[key] = [_made(item, optimizer, total_steps) if _is_scheduler(item) else item for item in value]
    parameters = list(inspect.signature(function).parameters)
    if LENGTH in parameters:
        given[LENGTH] = total_steps
    named = "optimizer" in parameters[1:]  # ChainedScheduler takes it second
    return function(optimizer=optimizer, **given) if named else function(optimizer, **given)


def build_scheduler(factory: Callable[..., Any], optimizer: Optimizer, total_steps: int | None) -> LRScheduler:
    """Return the scheduler that `factory` makes; it gets `total_steps` if it `wants_length`."""
    name, before = _name(factory), _ratios(optimizer)
    try:
        made = _made(factory, optimizer, total_steps)
    except UserError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"_target_={name} refused {_typed(factory)} ({_said(error)}): correct that value."
        ) from error
    if not isinstance(made, LRScheduler):
        raise ArgumentError(
            f"_target_={name}: expected a scheduler such as torch.optim.lr_scheduler.StepLR, got {_kind(made)}."
        )
    if any(abs(one - other) > 1e-6 for one, other in zip(before, _ratios(optimizer), strict=True)):
        raise ArgumentError(
            f"_target_={name} gives all groups one rate, and theirs differ (layer_decay, Muon): choose another."
        )
    return made


def _ratios(optimizer: Optimizer) -> list[float]:
    """Return each group's learning rate as a share of the largest."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    largest = max(rates)
    return [rate / largest for rate in rates] if largest else [1.0 for _ in rates]


def check_scheduler(factory: Any) -> None:
    """Check a scheduler's class or function and its keys; try torch's own schedulers for a few steps."""
    function, name = getattr(factory, "func", factory), _name(factory)
    if not callable(function) or (inspect.isclass(function) and not issubclass(function, LRScheduler)):
        raise ArgumentError(
            f"_target_={name}: expected a scheduler such as torch.optim.lr_scheduler.StepLR, got {_kind(function)}."
        )
    for key, value in getattr(factory, "keywords", {}).items():
        for number, item in enumerate(value if isinstance(value, list) else ()):
            if _is_scheduler(item):
                try:
                    check_scheduler(item)
                except ArgumentError as error:
                    raise ArgumentError(*(f"{key}[{number}].{sentence}" for sentence in error.args)) from error
    _check_keys(function, name, getattr(factory, "keywords", {}))
    if function.__module__.startswith("torch."):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler = build_scheduler(factory, optimizer, 1000)
            step: Any = scheduler.step
            try:
                for _ in range(3):
                    optimizer.step()
                    step(1.0) if isinstance(scheduler, ReduceLROnPlateau) else step()
            except Exception as error:
                raise ArgumentError(
                    f"_target_={name} refused {_typed(factory)} ({_said(error)}): correct that value."
                ) from error


def _check_keys(function: Any, name: str, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    own = "optimizer" if "optimizer" in parameters else next(iter(parameters), None)
    names = [key for key in parameters if key != own]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for key in given:
        if key not in names and not takes_any:
            hint = did_you_mean(key, names, f"its keys are {', '.join(names)}.")
            raise ArgumentError(f"{key} is not a key of {name}: {hint}")
    if LENGTH in given:
        raise ArgumentError(f"{LENGTH}={given[LENGTH]} is known from the run: leave it out.")
    for key in names:
        parameter = parameters[key]
        fixed = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not fixed and key not in given and key != LENGTH:
            raise ArgumentError(f"{key}: {name} needs a value for it; add one.")


def counted_in_steps(factory: Any) -> str | None:
    """Return a note that a scheduler of torch counts steps, not epochs; None for other schedulers."""
    if wants_length(factory) or not getattr(factory, "func", factory).__module__.startswith("torch."):
        return None
    return (
        f"{_name(factory)} is stepped after every optimizer step: {_typed(factory)} counts steps, not epochs "
        "(interval=epoch counts those)."
    )


def try_out(kind: type[Optimizer], options: Mapping[str, Any]) -> None:
    """Make one of torch's optimizers step on a single weight: some values are checked only then."""
    for key, value in options.items():
        parameter = inspect.signature(kind).parameters.get(key)
        if parameter is not None and "bool" in str(parameter.annotation) and not isinstance(value, bool):
            raise ArgumentError(f"{key}={value!r}: expected true or false.")
    if not kind.__module__.startswith("torch.") or options.get("capturable"):  # capturable needs a GPU
        return
    weight = torch.zeros(1, 1, requires_grad=True)
    weight.grad = torch.ones(1, 1)
    try:
        kind([weight], **options).step()
    except Exception as error:
        raise refused(kind, options, error) from error


def refused(kind: type[Optimizer], options: Mapping[str, Any], error: Exception) -> ArgumentError:
    """Return the error for an exception of an optimizer."""
    typed = ", ".join(f"{key}={value}" for key, value in options.items() if key != "lr") or "its defaults"
    return ArgumentError(f"kind={kind.__name__} refused {typed} ({_said(error)}): correct that value.")


def _name(factory: Any) -> str:
    function = getattr(factory, "func", factory)
    return str(getattr(function, "__name__", function))


def _kind(thing: Any) -> str:
    if inspect.isclass(thing):
        return "an optimizer" if issubclass(thing, Optimizer) else f"the class {thing.__name__}"
    return f"an object of {type(thing).__name__}"


def _typed(factory: Any) -> str:
    given = factory.keywords if isinstance(factory, partial) else {}
    shown = {
        key: f"[{', '.join(map(_name, value))}]"
        if isinstance(value, list) and any(map(_is_scheduler, value))
        else value
        for key, value in given.items()
    }
    return ", ".join(f"{key}={value}" for key, value in shown.items()) or "its defaults"


def _said(error: Exception) -> str:
    kind = "" if isinstance(error, (TypeError, ValueError, RuntimeError)) else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())
