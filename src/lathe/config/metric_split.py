"""Splits of metrics by their names: val/accuracy of Lathe's tasks, val_accuracy or validation_accuracy of others."""

import re

SPLIT = re.compile(r"(train|val|test)(?:id|idation)?[/_](?=.)")


def split_of(name: str) -> str | None:
    """Return train, val or test; None for a metric of no split."""
    found = SPLIT.match(name)
    return None if found is None else found[1]
