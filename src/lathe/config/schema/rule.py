"""What one argument takes, and the sentence for a value that it does not.

A rule is plain data: the tables beside this file are made of rules, the launch checks a composed configuration against
them, and the fuzz of law 7 draws from them. Rules are put together by `|`, as types are: `whole(1) | None`, `whole(1) |
"auto" | items(whole(0))`.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lathe.errors import did_you_mean

LARGEST = 2**63 - 1  # what a tensor's size and a checkpoint's counter can hold
LONGEST = 4096  # characters of a word or a path
_LOOKS_LIKE_ANOTHER = re.compile(
    r"[-+\d.].*|[\[{].*|null|~|true|false", re.IGNORECASE
)  # a word that needs its quotes to be one


def shown(value: Any) -> str:
    """A value on one line as a user would type it, cut where it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"{'-' if value < 0 else ''}about 1e{int(math.log10(abs(value)))}"
    bare = isinstance(value, str) and _plain(value) and not _LOOKS_LIKE_ANOTHER.fullmatch(value)
    text = value if bare else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def kind_of(value: Any) -> str:
    """What a value is, in a user's words."""
    names = {
        dict: "a group of keys",
        list: "a list",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a word",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


@dataclass(frozen=True)
class Rule:
    """One kind of values with its bounds, or any of several `others` beside it.

    `low` and `high` may be taken, `above` and `below` not. `least` and `most` count a list's items, each of which
    follows `item`, as the values of a group do, and which are `different` where one twice would mean nothing. `words`
    are the only ones taken, where there are any, `also` is a whole number outside the bounds that has a meaning of its
    own, and `form` a regular expression in `saying`'s words. `noun` is what a number is a number of.
    """

    kind: str
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    also: tuple[int, ...] = ()
    words: tuple[str, ...] = ()
    form: str = ""
    saying: str = ""
    noun: str = ""
    item: "Rule | None" = None
    least: int = 0
    most: int | None = None
    different: bool = False
    others: "tuple[Rule, ...]" = ()

    def __or__(self, other: "Rule | str | None") -> "Rule":
        rule = other if isinstance(other, Rule) else Rule("null") if other is None else word(other)
        return replace(self, others=(*self.others, rule))

    def of(self, noun: str) -> "Rule":
        """The same for numbers of something, such as "optimizer steps"."""
        return replace(self, noun=noun)

    def once(self) -> "Rule":
        """The same for a list in which nothing may stand twice."""
        return replace(self, different=True)

    def kinds(self) -> "Iterator[Rule]":
        """The rules of which a value has to follow one."""
        yield replace(self, others=()) if self.others else self
        for other in self.others:
            yield from other.kinds()

    def fits(self, value: Any) -> bool:
        """Whether the argument takes this value."""
        return any(_fits(rule, value) for rule in self.kinds())

    def expected(self) -> str:
        """What it takes, in a user's words."""
        found: list[str] = []
        for rule in self.kinds():
            found += [name or "''" for name in rule.words] if rule.kind == "word" else [_words(rule)]
        found = list(dict.fromkeys(found))
        return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} or {found[-1]}"

    def sentence(self, key: str, value: Any) -> str | None:
        """What is wrong with `value` at `key`, or None if nothing is."""
        if self.fits(value):
            return None
        return f"{key}={shown(value)}: expected {self.expected()}, got {self._got(value)}"

    def _got(self, value: Any) -> str:
        words = [name for rule in self.kinds() if rule.kind == "word" for name in rule.words]
        hint = did_you_mean(value, words, "") if isinstance(value, str) else ""
        end = f"; {hint}" if hint else "."
        if isinstance(value, float) and not math.isfinite(value):
            return f"{value}{end}"
        if any(rule.kind in KINDS.get(type(value), ()) for rule in self.kinds()) and not isinstance(value, str):
            inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
            wrong = next(
                (item for item in inside for rule in self.kinds() if rule.item and not rule.item.fits(item)), ...
            )
            if isinstance(value, (list, Mapping)) and wrong is not ...:
                return f"{'a list' if isinstance(value, list) else 'a group'} with {shown(wrong)} in it{end}"
            if isinstance(value, list):
                twice = next((item for item in value if value.count(item) > 1), ...)
                return f"a list of {len(value)}{end}" if twice is ... else f"a list with {shown(twice)} twice{end}"
            if isinstance(value, bool):
                return f"{shown(value)}{end}"
            return f"{'another number' if all(map(_one, self.kinds())) else 'one out of this range'}{end}"
        if isinstance(value, str) and not _plain(value):
            return f"an empty word, or one with characters that can't be printed{end}"
        return kind_of(value) + end


KINDS = {int: ("whole", "number"), float: ("number",), bool: ("flag",), list: ("list",), dict: ("group",)}


def _within(rule: Rule, value: float) -> bool:
    return (
        (rule.low is None or value >= rule.low)
        and (rule.high is None or value <= rule.high)
        and (rule.above is None or value > rule.above)
        and (rule.below is None or value < rule.below)
    )


def _plain(value: str) -> bool:
    return bool(value.strip()) and value == value.strip() and value.isprintable() and len(value) <= LONGEST


def _fits(rule: Rule, value: Any) -> bool:
    if rule.kind == "any":
        return True
    if rule.kind == "null":
        return value is None
    if rule.kind == "string":
        return isinstance(value, str) and value != ""
    if rule.kind == "flag":
        return isinstance(value, bool) and (not rule.words or str(value).lower() in rule.words)
    if rule.kind in ("whole", "number"):
        if isinstance(value, bool) or not isinstance(value, int if rule.kind == "whole" else (int, float)):
            return False
        if abs(value) > LARGEST and (isinstance(value, int) or not math.isfinite(value)):
            return False
        return value == value and (value in rule.also or _within(rule, value))
    if rule.kind in ("word", "text"):
        if (
            not isinstance(value, str)
            or not (value in rule.words or not rule.words)
            or not (_plain(value) or value in rule.words)
        ):
            return False
        return not rule.form or re.fullmatch(rule.form, value) is not None
    if rule.kind == "list":
        fit = isinstance(value, list) and rule.least <= len(value) and (rule.most is None or len(value) <= rule.most)
        if not fit or (rule.different and any(value.count(item) > 1 for item in value)):
            return False
        return rule.item is None or all(rule.item.fits(item) for item in value)
    if not isinstance(value, Mapping):
        return False
    if rule.kind == "node":
        return isinstance(value.get("_target_"), str)
    return "_target_" not in value and all(
        isinstance(k, (str, int)) and (not rule.words or k in rule.words) and (rule.item is None or rule.item.fits(v))
        for k, v in value.items()
    )


def _one(rule: Rule) -> bool:
    """Whether a single number follows it."""
    return rule.kind == "whole" and rule.low is not None and rule.low == rule.high and not (rule.also or rule.noun)


def _span(rule: Rule) -> str:
    low = (
        f" from {rule.low:.17g}"
        if rule.low is not None
        else f" above {rule.above:.17g}"
        if rule.above is not None
        else ""
    )
    high = (
        f" to {rule.high:.17g}"
        if rule.high is not None
        else f" and below {rule.below:.17g}"
        if rule.below is not None
        else ""
    )
    return low + high + "".join(f" or {number}" for number in rule.also)


def _words(rule: Rule) -> str:
    if rule.saying:
        return rule.saying
    each = f" (each {rule.item.expected()})" if rule.item is not None and rule.item.kind != "any" else ""
    each = f"{each}, none twice" if rule.different else each
    if rule.kind == "list":
        size = (
            f" of {rule.least} items"
            if rule.least == rule.most
            else f" of {rule.least} or more items"
            if rule.least
            else ""
        )
        return f"a list{size}{each}"
    names = {
        "whole": f"{rule.low}"
        if _one(rule)
        else f"{f'a number of {rule.noun}' if rule.noun else 'a whole number'}{_span(rule)}",
        "number": f"a number{f' of {rule.noun}' if rule.noun else ''}{_span(rule)}",
        "flag": "true or false",
        "null": "null",
        "text": "a word",
        "group": f"a group of keys{each}",
        "node": "a group with a _target_",
        "any": "anything",
    }
    return " or ".join(rule.words) if rule.kind == "flag" and rule.words else names[rule.kind]


def whole(low: int | None = None, high: int | None = None, also: Iterable[int] = ()) -> Rule:
    """A whole number."""
    return Rule("whole", low=low, high=high, also=tuple(also))


def number(
    low: float | None = None, high: float | None = None, *, above: float | None = None, below: float | None = None
) -> Rule:
    """A finite number, whole or not."""
    return Rule("number", low=low, high=high, above=above, below=below)


def word(*words: str) -> Rule:
    """One of these words."""
    return Rule("word", words=words)


def text(saying: str = "a word", form: str = "") -> Rule:
    """A word that is not empty and can be printed, in the regular expression `form` if there is one."""
    return Rule("text", saying=saying, form=form)


def items(item: Rule | None = None, least: int = 0, most: int | None = None) -> Rule:
    """A list."""
    return Rule("list", item=item, least=least, most=most)


def group(item: Rule | None = None) -> Rule:
    """Keys of the user's own, each of whose values follows `item`."""
    return Rule("group", item=item)


def null(meaning: str) -> Rule:
    """Null, and what it stands for."""
    return Rule("null", saying=f"null for {meaning}")


flag, node, anything, none = Rule("flag"), Rule("node"), Rule("any"), Rule("null")
only = {value: Rule("flag", words=(str(value).lower(),)) for value in (True, False)}  # a switch that stays where it is
path = text("a path")
count, share = whole(1), number(0, 1)
steps, batches = count.of("optimizer steps"), count.of("batches")
