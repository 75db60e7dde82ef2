"""Which names a saved configuration may hold, and where. Decided by the name alone: nothing is imported here.

A saved configuration is data from somebody else until it has passed `findings`: whatever it names would be imported and
called.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lathe.trust import own
from lathe.trust.parts import kinds_of, listed

# Where a part belongs, by key, and its kind; the first that fits. Elsewhere no part may stand.
PLACES = [
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"task", "task"),
        (r"task\..+", "module"),
        (r"model\.net[.\[].+", "net part"),
        (r"model\..+", "module"),
        (r"optimizer(?:\.kind)?", "optimizer"),
        (r"scheduler(?:\.scheduler)?(?:\.schedulers\[\d+\])*", "scheduler"),
        (r"trainer", "trainer"),
        (r"strategy", "strategy"),
        (r"data", "data"),
        (r"data\..+", "data part"),
        (r"callbacks\.[^.\[]+", "callback"),
        (r"callbacks\.[^.\[]+[.\[].+", "module"),
        (r"logger\.[^.\[]+", "logger"),
        (r"compression\.(?!stages$|receipt$)[^.\[]+", "method"),
        (r"compression\.[^.\[]+\.teacher(?:\[\d+\])?\.net(?:[.\[].+)?", "module"),
    )
]
KINDS = {
    "task": "a task, which is a LightningModule",
    "module": "a torch module",
    "net part": "a part of a net",
    "optimizer": "an optimizer",
    "scheduler": "a learning-rate scheduler",
    "trainer": "Lightning's Trainer",
    "strategy": "a strategy",
    "data": "a data module",
    "data part": "a part of a data module",
    "callback": "a callback",
    "method": "a method of compression",
    "logger": "a logger",
}
# Hydra's functions that look a name up: what counts is the name that they are given.
GETTERS = {f"hydra.utils.{name}": name for name in ("get_class", "get_method", "get_object", "get_static_method")}
GETTERS_AT = ("optimizer", "module", "net part", "data part")  # the kinds that may be looked up instead of made
OPTIONS = {"_partial_": (bool,), "_convert_": (str, bool), "_recursive_": (bool,), "_args_": (list,)}
NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
INIT = re.compile(r"model\.init(?:\[\d+\])?")  # a name of a table, or a dotted path to a function
ADDRESS = re.compile(
    r"logger\.[^.\[]+\.(?:tracking_uri|repo)|callbacks\.[^.\[]+\.url"
)  # metrics, keys and messages are sent there
LOCAL = re.compile(r"(?:sqlite|file):.*|env:\w+|[^:]*", re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A `name` at `key` that a saved configuration may not build. `mend` is whether naming it in `trusted` allows it;
    else `why` says what is wrong with it."""

    key: str
    name: str
    mend: bool = True
    why: str = ""


def names_in(config: Any) -> dict[str, str]:
    """Every name in a configuration that is looked up and called, by its key."""
    return {key: name for key, name, _ in _names(config, "") if isinstance(name, str)}


def findings(config: Any, trusted: list[str], typed: dict[str, str]) -> Iterator[Finding]:
    """What in a saved configuration is no part that it may build. `trusted` are packages or names that the user trusts,
    `typed` the names that stand at the same key of the command that reads it."""
    yield from _options(config, "")
    for key, name, how in _names(config, ""):
        if not isinstance(name, str):
            yield Finding(key, repr(name)[:80], False, "which is no name")
        elif how == "address":
            if name not in trusted and typed.get(key) != name:
                yield Finding(key, name)
        else:
            yield from _judged(key, name, how, trusted, typed)


def _judged(key: str, name: str, how: str, trusted: list[str], typed: dict[str, str]) -> Iterator[Finding]:
    kind = kind_at(key.removesuffix(".path") if how == "looked up" else key)
    if kind is None:
        yield Finding(key, name, False, "where no part belongs")
    elif not NAME.fullmatch(name) or "__" in name:
        yield Finding(key, name[:200], False, "which is no name of a part")
    elif how == "getter":
        if kind not in GETTERS_AT:
            yield Finding(key, name, False, f"where {KINDS[kind]} is made, not looked up")
    elif how != "init" and listed(name, kind):
        return
    elif how != "init" and kinds_of(name) and name not in trusted:
        yield Finding(key, name, False, f"where {KINDS[kind]} belongs")
    elif typed.get(key) != name and not is_trusted(name, trusted) and not own.stands_in_src(name):
        yield Finding(key, name)


def is_trusted(name: str, trusted: list[str]) -> bool:
    """Whether `name` is one of `trusted`, or lies in one of them."""
    return any(name == item or name.startswith(f"{item}.") for item in trusted)


def kind_at(key: str) -> str | None:
    """The kind of part that belongs at `key`; None if none does."""
    return next((kind for pattern, kind in PLACES if pattern.fullmatch(key)), None)


def _names(node: Any, key: str) -> Iterator[tuple[str, Any, str]]:
    """(key, name, how it is used) for all names below `node`: part, getter, looked up, init or address."""
    if isinstance(node, dict):
        if "_target_" in node:
            getter = isinstance(node["_target_"], str) and node["_target_"] in GETTERS
            yield key, node["_target_"], "getter" if getter else "part"
            if getter:
                yield _join(key, "path"), node.get("path"), "looked up"
        for child, value in node.items():
            yield from _names(value, _join(key, child))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _names(value, f"{key}[{number}]")
    elif isinstance(node, str):
        if INIT.fullmatch(key) and "." in node:
            yield key, node, "init"
        elif ADDRESS.fullmatch(key) and not LOCAL.fullmatch(node):
            yield key, node, "address"


def _options(node: Any, key: str) -> Iterator[Finding]:
    """Words with which Hydra changes how a node is built, where Lathe writes none; and keys that are no words."""
    if isinstance(node, list):
        for number, value in enumerate(node):
            yield from _options(value, f"{key}[{number}]")
    if not isinstance(node, dict):
        return
    for child, value in node.items():
        full = _join(key, child)
        if not isinstance(child, (str, int)) or isinstance(child, bool) or (not key and not isinstance(child, str)):
            yield Finding(full, repr(child)[:80], False, "which is no key")
        elif isinstance(child, str) and child[:1] == "_" and re.fullmatch(r"_\w*_", child) and child != "_target_":
            fits = "_target_" in node and child in OPTIONS and isinstance(value, OPTIONS[child])
            if not fits or (child == "_args_" and kind_at(key) not in ("module", "net part")):
                yield Finding(full, child, False, "which Lathe never writes there")
        if isinstance(value, (dict, list)):
            yield from _options(value, full)


def _join(key: str, child: Any) -> str:
    return f"{key}.{child}" if key else str(child)
