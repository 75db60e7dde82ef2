"""What may stand at a key: a value, a part, several parts by name, or a group of keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from lathe.config.schema.rule import Rule


@dataclass(frozen=True)
class Part:
    """A group with a `_target_`, whose class says what else it takes; `needs` are keys that the launch reads itself.
    One that may be `empty` has a choice without any key.
    """

    null: bool = False
    empty: bool = False
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Parts:
    """Parts by name, beside `settings` of the group itself; null leaves one out. `noun` is what one is called."""

    noun: str
    settings: "Mapping[str, Place]" = field(default_factory=dict)


@dataclass(frozen=True)
class Keys:
    """A group of these keys and no others; all of them have to be there but the `optional` ones."""

    keys: "Mapping[str, Place]"
    optional: tuple[str, ...] = ()
    null: bool = False


Place = Rule | Part | Parts | Keys
