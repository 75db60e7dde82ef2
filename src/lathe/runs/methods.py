"""The methods of compression of a run, made from the configuration."""

from functools import partial
from typing import Any

from lathe.callbacks import Compression
from lathe.config.compression_plan import methods, windows
from lathe.runs import score
from lathe.runs.nodes import make_part


def make_methods(cfg: dict[str, Any]) -> list[Compression]:
    """The callbacks that `compression` lists, in their order, each with its share of the run.

    Raises:
        UserError: one can't be built.
    """
    group = cfg.get("compression") or {}
    shares = windows(group)
    made: list[Compression] = []
    for name, node in methods(group).items():
        method: Compression = make_part(
            {key: value for key, value in node.items() if key != "kind"}, f"compression.{name}", Compression
        )
        method.window = shares[name]
        if hasattr(method, "open_run"):
            method.open_run = partial(score.open_net, key=f"compression.{name}.teacher")
        made.append(method)
    return made
