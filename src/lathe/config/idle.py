"""Keys that are read only where another key has a certain value."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lathe.config.words import key_of

# in a group: the key, beside which key it is read, and with which of its values
_MASKS = (("jumps", "schedule", "stepped"), ("batches", "criterion", "wanda"), ("seed", "criterion", "random"))
READ_WITH: dict[str, tuple[tuple[str, str, str], ...]] = {
    "compression.prune": (*_MASKS, ("block", "granularity", "block")),
    "compression.prune_structured": (*_MASKS, ("norm", "criterion", "magnitude")),
    "compression.prune_nm": _MASKS,
    "compression.qat": (("percentile", "observer", "percentile"),),
    "compression.ptq_static": (("percentile", "observer", "percentile"),),
}


def idle(typed: Sequence[str], resolved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The key and a sentence for each word that was typed for a key that nothing reads."""
    for group, pairs in READ_WITH.items():
        part: Any = resolved
        for name in group.split("."):
            part = part.get(name) if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping):
            continue
        for key, other, value in pairs:
            word = next((item for item in typed if key_of(item) == f"{group}.{key}"), None)
            if word is not None and other in part and part[other] != value:
                yield (
                    f"{group}.{key}",
                    f"{word} has no effect: it is read with {group}.{other}={value} alone, and here it is "
                    f"{part[other]}: leave it out, or choose that.",
                )
