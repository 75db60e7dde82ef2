"""Classes that are in the data and not in a split of them."""

from collections.abc import Mapping, Sequence

import numpy as np
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lathe.data.checks import first_few
from lathe.data.splits import Labels


def name_of(label: int, names: Sequence[str] | None) -> str:
    """What people call a class: its name, or its number where it has none, as a label that is no class."""
    return names[label] if names is not None and 0 <= label < len(names) else f"class {label}"


def tell_absent(key: str, labels: Labels, rows: Mapping[str, Labels], names: Sequence[str] | None, ways: str) -> None:
    """Warns of the classes that some samples have, by `labels` [n], and those of a split, its `rows`, do not: its
    metrics say nothing of them. `names` are what the classes are called, None for their numbers; `ways` mend it.
    """
    absent = {split: np.setdiff1d(labels, labels[own]).tolist() for split, own in rows.items()}
    called = {split: first_few([name_of(label, names) for label in gone]) for split, gone in absent.items()}
    told = [f"{split} has none of {gone}" for split, gone in called.items() if gone]
    if told:
        rank_zero_warn(f"{key}: {', and '.join(told)}, and metrics say nothing of what a split has not: {ways}.")
