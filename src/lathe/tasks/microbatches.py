"""A batch in equal parts, as the stages of a pipeline take it."""

from typing import Any

from lathe.errors import UserError


def microbatches(batch: Any, n: int) -> list[Any]:
    """See `Task.split_batch`."""
    size = len(batch[0])
    if size % n:
        raise UserError(
            f"strategy.microbatches={n} does not divide a replica's batch of {size} samples: take a divisor."
        )
    parts = [[item / n] * n if item.dim() == 0 else list(item.chunk(n)) for item in batch]
    return [tuple(part) for part in zip(*parts, strict=True)]
