"""Which split a metric is of, by its name: as Lathe's tasks name it (val/accuracy), or as a LightningModule does
(val_accuracy, validation_accuracy). Imports no torch.
"""

import re

SPLIT = re.compile(r"(train|val|test)(?:id|idation)?[/_](?=.)")


def split_of(name: str) -> str | None:
    """train, val or test; None for a metric of no split."""
    found = SPLIT.match(name)
    return None if found is None else found[1]
