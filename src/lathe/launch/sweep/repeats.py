"""Several runs of each trial of a search, over seeds or folds. Their mean is the trial's value."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lathe.config.override_parsing import key_of
from lathe.config.values import shown
from lathe.errors import require
from lathe.launch.sweep.space import word
from lathe.runs.optuna_study import compares_repeats, pruner_of

THRESHOLD = 0.1  # p below which Optuna's WilcoxonPruner ends a trial, by its default


def repeats_of(values: Mapping[str, Any] | None, words: Sequence[str], space: Mapping[str, Any]) -> list[list[str]]:
    """Return the overrides of each run of a trial; one run without overrides if sweep.repeats is None."""
    if values is None:
        return [[]]
    require(bool(values), "sweep.repeats is empty: name a key and its values, {seed: [1, 2, 3]}, or leave it out.")
    typed = {key_of(item): item for item in words}
    for key in values:
        require(key not in space, f"sweep.repeats.{key}: sweep.space draws it for the whole trial: name it in one.")
        require(key not in typed, f"sweep.repeats.{key}: {typed.get(key)} is typed as well: leave it out.")
    found = [[word(*item) for item in zip(values, point, strict=True)] for point in itertools.product(*values.values())]
    again = next((point for index, point in enumerate(found) if point in found[:index]), None)
    require(
        again is None, f"sweep.repeats={shown(values)}: {' '.join(again or [])} is there twice, and would count so."
    )
    return found


def check_pruner(options: Mapping[str, Any], count: int) -> bool:
    """Return whether the pruner compares the `count` repeats of a trial; raise UserError if they don't fit."""
    pruner, name = options["pruner"], f"sweep.pruner={shown(options['pruner'])}"
    compares = compares_repeats(pruner_of(options))
    alone = options.get("repeats") is None
    require(
        not (compares and alone),
        f"{name} compares the runs of a trial, which has one: set sweep.repeats={{seed: [1, 2, 3, 4, 5]}}, or choose "
        "asha.",
    )
    require(
        compares or alone or pruner == "none",
        f"{name} compares validations of single runs, and sweep.repeats has {count} runs for each trial: choose "
        "wilcoxon or none.",
    )
    if compares:
        limit = pruner.get("p_threshold", THRESHOLD) if isinstance(pruner, Mapping) else THRESHOLD
        least = math.floor(-math.log2(limit)) + 1  # repeats that all fall behind have p = 2 ** -least
        require(
            count > least,
            f"{name} can end a trial after {least} runs at the earliest (p < {limit:g}), and sweep.repeats has "
            f"{count}: give {least + 1} or more, or choose none.",
        )
    return compares
