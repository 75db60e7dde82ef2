"""Nodes in the list of a group, as in `callbacks=[default,{_target_: mine.Largest}]`.

Hydra's lists hold only names of files, so each node becomes an override that adds a key.
"""

import re
from collections.abc import Sequence
from itertools import count

from lathe.errors import require

NODE = re.compile(r"\{.*\b_target_ *:", re.DOTALL)
_BRACKETS = {"[": "]", "{": "}", "(": ")"}
_TARGET = re.compile(r"_target_ *: *['\"]?([\w.]+)")
_NAMED_NODE = re.compile(r"(\w+) *: *(\{.*\})", re.DOTALL)
_WORD_BREAK = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def expand_nodes(word: str, key: str, value: str, choices: Sequence[str]) -> list[str]:
    """Return the overrides for a group's list: one with the names in it, and one for each node.

    A list without nodes, or with an open bracket or quote, is returned as it is.

    Raises:
        UserError: a node has no class, or a sweep goes over lists with nodes.
    """
    items = split_items(value[1:-1]) if value.startswith("[") and value.endswith("]") else []
    nodes = [item for item in items if item.startswith("{")]
    if not nodes:
        is_sweep = not value.startswith("{") and split_items(value) and not items and re.search(r"[\[,] *\{", value)
        require(not is_sweep, f"{word}: a sweep takes names of files. Write the nodes as configs/{key}/<name>.yaml.")
        return [word]
    names = [item for item in items if item not in nodes]
    added: dict[str, str] = {}
    for item in nodes:
        for name, node in _named(word, item, choices):
            numbered = (f"{name}_{n}" for n in count(2) if f"{name}_{n}" not in choices)
            added[name if name not in added else next(new for new in numbered if new not in added)] = node
    listed = f"{key}=[{','.join(names)}]" if names else f"{key}=none"
    return [listed, *(f"+{key}.{name}={node}" for name, node in added.items())]


def _named(word: str, item: str, choices: Sequence[str]) -> list[tuple[str, str]]:
    """Return names and nodes of a mapping, which is a node or has nodes by name."""
    entries = split_items(item[1:-1])
    named = [found for entry in entries if (found := _NAMED_NODE.fullmatch(entry)) is not None]
    if entries and len(named) == len(entries):
        return [(found[1], found[2]) for found in named]
    targets = [found for entry in entries if (found := _TARGET.match(entry)) is not None]
    require(len(targets) == 1, f"{word}: {item} names no class: write {{_target_: package.module.Class, ...}}.")
    name = _WORD_BREAK.sub("_", targets[0][1].split(".")[-1]).lower()
    return [(f"own_{name}" if name in choices else name, item)]  # that file's keys are those of another class


def split_items(text: str) -> list[str]:
    """Split at the commas outside of brackets and quotes; [] if one of those is not closed."""
    items, start, brackets, quote = [], 0, list[str](), ""
    for place, sign in enumerate(text):
        if quote:
            quote = "" if sign == quote and text[place - 1] != "\\" else quote
        elif sign in "'\"":
            quote = sign
        elif sign in _BRACKETS:
            brackets.append(_BRACKETS[sign])
        elif brackets and sign == brackets[-1]:
            brackets.pop()
        elif sign == "," and not brackets:
            items.append(text[start:place].strip())
            start = place + 1
    return [] if brackets or quote else [item for item in (*items, text[start:].strip()) if item]
