"""Lightning's Trainer: its messages in keys of a configuration, and limits that exclude each other."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lathe.config.schema.check import component_keys
from lathe.config.values import shown

_TYPED = {"None": "null", "True": "true", "False": "false"}


def with_keys(said: str) -> str:
    """A sentence of Lightning's on one line, in which arguments of its Trainer are what they are here: keys."""

    def key(found: re.Match[str]) -> str:
        value = "" if found[2] is None else f"={_TYPED.get(found[2], found[2])}"
        return f"trainer.{found[1]}{value}"

    names = "|".join(component_keys("lightning.Trainer") or ())
    return re.sub(rf"`({names})(?:=([^`]+))?`", key, " ".join(said.split()))


def overfitting(cfg: Mapping[str, Any]) -> Iterator[str]:
    """`overfit_batches` takes the place of two limits, in Lightning without a word."""
    trainer = cfg["trainer"]
    for key in ("limit_train_batches", "limit_val_batches") if trainer.get("overfit_batches") else ():
        limit = trainer.get(key)
        if limit not in (None, trainer["overfit_batches"]) and not (isinstance(limit, float) and limit == 1):
            yield (
                f"trainer.{key}={shown(limit)} has no effect beside trainer.overfit_batches="
                f"{shown(trainer['overfit_batches'])}, which says how many batches train and validate: drop one of the "
                "two."
            )
