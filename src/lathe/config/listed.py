"""Parts that are typed whole in the list of a group, as in `callbacks=[default,{_target_: mine.Largest}]`: Hydra's
lists hold names of files alone, so each such part becomes a key of its own.
"""

import re
from collections.abc import Sequence
from itertools import count

from lathe.errors import require

PAIRS = {"[": "]", "{": "}", "(": ")"}
TARGET = re.compile(r"_target_ *: *['\"]?([\w.]+)")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
WHOLE_NODE = re.compile(r"\{.*\b_target_ *:", re.DOTALL)  # a part that is typed with its class, as in a file
NAMED = re.compile(r"(\w+) *: *(\{.*\})", re.DOTALL)


def spread(word: str, key: str, value: str, choices: Sequence[str]) -> list[str]:
    """The overrides that stand for a group's list with parts in it: the list of its names, and one that adds each part
    under its own name or that of its class. A word whose list holds no part, or whose brackets or quotes don't close,
    is returned as it is.

    Raises:
        UserError: a part has no class, or there are several lists with parts.
    """
    items = top_level(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    if not any(item.startswith("{") for item in items):
        several = not value.startswith("{") and top_level(value) and not items and re.search(r"[\[,] *\{", value)
        require(
            not several,
            f"{word}: a sweep goes over names of files: write each part in configs/{key}/<name>.yaml, and sweep over "
            "those names.",
        )
        return [word]
    names = [item for item in items if not item.startswith("{")]
    parts: dict[str, str] = {}
    for item in items:
        for name, part in _parts(word, item, choices) if item.startswith("{") else []:
            numbered = (f"{name}_{n}" for n in count(2) if f"{name}_{n}" not in choices)
            parts[name if name not in parts else next(new for new in numbered if new not in parts)] = part
    return [f"{key}=[{','.join(names)}]" if names else f"{key}=none", *(f"+{key}.{n}={p}" for n, p in parts.items())]


def _parts(word: str, item: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Names and nodes of one mapping: a part itself, or parts by name as in a file of the group."""
    entries = top_level(item[1:-1])
    named = [match for entry in entries if (match := NAMED.fullmatch(entry)) is not None]
    if entries and len(named) == len(entries):
        return [(match[1], match[2]) for match in named]
    own = [match for entry in entries if (match := TARGET.match(entry)) is not None]
    require(len(own) == 1, f"{word}: {item} names no class: write {{_target_: package.module.Class, ...}}.")
    name = HUMP.sub("_", own[0][1].split(".")[-1]).lower()
    return [(f"own_{name}" if name in choices else name, item)]  # the keys of a file of that name are another class's


def top_level(text: str) -> list[str]:
    """What stands between the commas that are in no brackets or quotes; nothing where those don't close."""
    items, start, open_, quote = [], 0, list[str](), ""
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[place - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in PAIRS:
            open_.append(PAIRS[sign])
        elif open_ and sign == open_[-1]:
            open_.pop()
        elif sign == "," and not open_:
            items.append(text[start:place].strip())
            start = place + 1
    return [] if open_ or quote else [item for item in (*items, text[start:].strip()) if item]
