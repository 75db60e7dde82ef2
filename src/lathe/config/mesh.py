"""How a run's processes are laid out: data replicas x tensor ranks x pipeline stages. Imports no torch."""

from dataclasses import dataclass
from math import prod
from typing import Any

from lathe.config.values import is_valid
from lathe.errors import require

SIZES = ("data", "tensor", "stages")


@dataclass(frozen=True)
class Axes:
    """Sizes of a mesh whose product is the number of processes. Ranks count through `tensor` fastest, then `stages`,
    then `data`.
    """

    data: int = 1
    tensor: int = 1
    stages: int = 1


def axes(strategy: dict[str, Any], world: int) -> Axes:
    """The sizes that a strategy's keys `data`, `tensor` and `stages` give for `world` processes.

    A key that the strategy does not have is 1, except `data`: without one, every process that the others leave is a
    data replica. One of the keys may be null and takes what remains.

    Raises:
        UserError: a size that is no number from 1, two that are null, or a product that is not `world`.
    """
    named = {key: strategy[key] for key in SIZES if key in strategy}
    for key, size in named.items():
        fits = size is None or is_valid(size, {"type": "integer", "minimum": 1})
        require(fits, f"strategy.{key}={size!r}: give a whole number from 1, or null for what remains.")
    given = {"data": None, "tensor": 1, "stages": 1, **named}
    open_keys = [key for key, size in given.items() if size is None]
    require(
        len(open_keys) <= 1, f"strategy.{' and strategy.'.join(open_keys)} are both null: give one of them a number."
    )
    fixed = prod(size for size in given.values() if size is not None)
    shown = (
        " x ".join(f"strategy.{key}={'null' if size is None else size}" for key, size in named.items()) or "strategy"
    )
    divides = world % fixed == 0 if open_keys else world == fixed
    way = f"a multiple of {fixed} processes" if open_keys else f"{fixed} processes"
    require(
        divides, f"{shown} needs {way}, but trainer.devices x trainer.num_nodes = {world}: change one of these keys."
    )
    return Axes(**{key: world // fixed if size is None else size for key, size in given.items()})


def data_replicas(strategy: dict[str, Any], world: int) -> int:
    """How many of `world` processes see different data.

    Raises:
        UserError: as `axes`.
    """
    return axes(strategy, world).data if any(key in strategy for key in SIZES) else world
