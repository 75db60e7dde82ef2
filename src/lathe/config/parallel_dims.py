"""Sizes of the device mesh: data replicas x tensor ranks x pipeline stages. Imports no torch."""

from dataclasses import dataclass
from math import prod
from typing import Any

from lathe.errors import require

SIZES = ("data", "tensor", "stages")


@dataclass(frozen=True)
class Axes:
    """Sizes whose product is the number of processes. Ranks count through `tensor` fastest, then `stages`, `data`."""

    data: int = 1
    tensor: int = 1
    stages: int = 1


def axes(strategy: dict[str, Any], world: int) -> Axes:
    """Return the sizes that the keys `data`, `tensor` and `stages` of a strategy give for `world` processes.

    A missing key is 1, but for `data`, which takes the remaining processes. One key may be null for that. Raises
    UserError if two are null, or the product is not `world`.
    """
    options = {key: strategy[key] for key in SIZES if key in strategy}
    sizes = {"data": None, "tensor": 1, "stages": 1, **options}
    rest = [key for key, size in sizes.items() if size is None]
    require(len(rest) < 2, f"strategy.{' and strategy.'.join(rest)} are both null: give one of them a number.")
    fixed = prod(size for size in sizes.values() if size is not None)
    factors = [f"strategy.{key}={'null' if size is None else size}" for key, size in options.items()]
    text = " x ".join(factors) or "strategy"
    needs = f"a multiple of {fixed}" if rest else str(fixed)
    require(
        world % fixed == 0 if rest else world == fixed,
        f"{text} needs {needs} processes, but trainer.devices x trainer.num_nodes = {world}: change one of these keys.",
    )
    return Axes(**{key: world // fixed if size is None else size for key, size in sizes.items()})


def data_replicas(strategy: dict[str, Any], world: int) -> int:
    """Count the processes of `world` that see different data. Raises UserError as `axes`."""
    return axes(strategy, world).data if any(key in strategy for key in SIZES) else world
