"""Annotations become schemas; values that do not fit are refused in one sentence."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count, Name, NonNegativeInt, Positive, Share, ShareBelowOne, StepOrShare
from lathe.config.validation import schema_of
from lathe.config.values import NODE, is_valid, problem

JUNK: dict[str, Any] = {
    "none": None,
    "yes": True,
    "zero": 0,
    "one": 1,
    "minus": -1,
    "huge": 10**30,
    "half": 0.5,
    "whole float": 1.0,
    "nan": math.nan,
    "inf": math.inf,
    "word": "abc",
    "empty": "",
    "blank": " ",
    "nul": "a\0",
    "line": "a\nb",
    "quoted number": "1e-3",
    "list": [],
    "ones": [1, 1],
    "group": {"a": 1},
    "node": {"_target_": "builtins.print"},
    "surrogate": "\udcff",
    "long": "x" * 5000,
}
TAKEN = {
    "Count or -1": (Count | Literal[-1], {"one", "minus"}),
    "float": (float, {"zero", "one", "minus", "half", "whole float"}),
    "a step or a share": (StepOrShare, {"zero", "one", "half"}),
    "False": (Literal[False], set()),
    "Name or None": (Name | None, {"word", "quoted number", "none"}),
    "a sequence of counts": (Sequence[Count], {"list", "ones"}),
    "a group of counts": (dict[str, Count], {"group"}),
    "a function or None": (Callable[[Any], Any] | None, {"node", "none"}),
    "a number or a tensor": (float | Tensor, {"zero", "one", "minus", "half", "whole float"}),
    "anything": (Any, set(JUNK)),
    "several": (
        Count | Literal["abc"] | Annotated[list[Count], Field(min_length=1)] | None,
        {"one", "word", "ones", "none"},
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_an_annotation_takes_these_values_and_no_others(name: str) -> None:
    annotation, taken = TAKEN[name]
    schema = schema_of(annotation)
    assert {kind for kind, value in JUNK.items() if is_valid(value, schema)} == taken
    for kind, value in JUNK.items():
        sentence = problem("a.b", value, schema)
        assert (sentence is None) == (kind in taken)
        assert sentence is None or ("\n" not in sentence and "\0" not in sentence and len(sentence) < 400)


def test_a_nullable_number_is_one_flat_schema() -> None:
    assert schema_of(Count | None) == {"type": ["integer", "null"], "minimum": 1}
    assert schema_of(nn.Module) == NODE


@pytest.mark.parametrize(
    ("annotation", "value", "sentence"),
    [
        (Count | None, 0, "k=0: expected a whole number from 1 or null."),
        (Positive, "fast", "k=fast: expected a number above 0."),
        (ShareBelowOne, math.nan, "k=nan: expected a number from 0 and below 1."),
        (NonNegativeInt, 10**30, "k=about 1e30: expected a whole number from 0."),
        (Literal["cpu", "gpu"], "gpus", "k=gpus: expected cpu or gpu; did you mean gpu?"),
        (
            Annotated[list[Share], Field(min_length=2, max_length=2)],
            [0.9],
            "k=[0.9]: expected a list of 2 items (each a number from 0 to 1).",
        ),
        (list[Count], [1, "a"], "k=[1, 'a']: expected a list (each a whole number from 1)."),
        (bool | Literal["warn"], 1, "k=1: expected true or false or warn."),
    ],
)
def test_the_sentence_has_key_value_and_what_is_expected(annotation: Any, value: Any, sentence: str) -> None:
    assert problem("k", value, schema_of(annotation)) == sentence
