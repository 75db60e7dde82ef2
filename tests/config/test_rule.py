"""One rule against every kind of value."""

import math
from typing import Any

import pytest

from lathe.config.schema.rule import (
    Rule,
    anything,
    count,
    flag,
    group,
    items,
    node,
    number,
    only,
    path,
    share,
    text,
    whole,
    word,
)

JUNK: dict[str, Any] = {
    "none": None,
    "yes": True,
    "zero": 0,
    "one": 1,
    "minus": -1,
    "huge": 10**30,
    "half": 0.5,
    "nan": math.nan,
    "inf": math.inf,
    "word": "abc",
    "empty": "",
    "blank": " ",
    "nul": "a\0",
    "line": "a\nb",
    "number in quotes": "1e-3",
    "list": [],
    "ones": [1, 1],
    "group": {"a": 1},
    "node": {"_target_": "builtins.print"},
    "surrogate": "\udcff",
    "long": "x" * 5000,
}
TAKEN = {
    "whole(0)": (whole(0), {"zero", "one"}),
    "whole(1, also=[-1])": (whole(1, also=[-1]), {"one", "minus"}),
    "number()": (number(), {"zero", "one", "minus", "half"}),
    "number(above=0, high=0.5)": (number(above=0, high=0.5), {"half"}),
    "share": (share, {"zero", "one", "half"}),
    "flag": (flag, {"yes"}),
    "only[False]": (only[False], set()),
    "word": (word("abc"), {"word"}),
    "text": (text(), {"word", "number in quotes"}),
    "path or null": (path | None, {"word", "number in quotes", "none"}),
    "items of count": (items(count), {"list", "ones"}),
    "items of count, none twice": (items(count).once(), {"list"}),
    "two items": (items(count, 2, 2), {"ones"}),
    "group": (group(count), {"group"}),
    "group of these keys": (Rule("group", item=count, words=("b",)), set()),
    "node": (node, {"node"}),
    "anything": (anything, set(JUNK)),
    "several": (whole(1) | "abc" | items(count, 1) | None, {"one", "word", "ones", "none"}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_rule_takes_what_it_says_and_nothing_else(name: str) -> None:
    rule, taken = TAKEN[name]
    assert {kind for kind, value in JUNK.items() if rule.fits(value)} == taken
    for kind, value in JUNK.items():
        sentence = rule.sentence("a.b", value)
        assert (sentence is None) == (kind in taken)
        assert sentence is None or ("\n" not in sentence and "\0" not in sentence and len(sentence) < 400)


@pytest.mark.parametrize(
    ("rule", "value", "sentence"),
    [
        (whole(1) | None, 0, "k=0: expected a whole number from 1 or null, got one out of this range."),
        (number(above=0), "fast", "k=fast: expected a number above 0, got a word."),
        (number(0, below=1), math.nan, "k=nan: expected a number from 0 and below 1, got nan."),
        (whole(0), 10**30, "k=about 1e30: expected a whole number from 0, got one out of this range."),
        (word("cpu", "gpu"), "gpus", "k=gpus: expected cpu or gpu, got a word; did you mean gpu?"),
        (
            word("cpu", "gpu"),
            "",
            "k='': expected cpu or gpu, got an empty word, or one with characters that can't be printed.",
        ),
        (
            items(share, 2, 2),
            [0.9],
            "k=[0.9]: expected a list of 2 items (each a number from 0 to 1), got a list of 1.",
        ),
        (items(count), [1, "a"], "k=[1, 'a']: expected a list (each a whole number from 1), got a list with a in it."),
        (
            items(word("csv", "html")).once(),
            ["csv", "html", "csv"],
            "k=['csv', 'html', 'csv']: expected a list (each csv or html), none twice, got a list with csv twice.",
        ),
        (flag | "warn", 1, "k=1: expected true or false or warn, got a whole number."),
        (text("a name", r"[a-z]+"), "A", "k=A: expected a name, got a word."),
        (flag, None, "k=null: expected true or false, got null."),
    ],
)
def test_the_sentence_names_key_value_and_what_is_expected(rule: Rule, value: Any, sentence: str) -> None:
    assert rule.sentence("k", value) == sentence
