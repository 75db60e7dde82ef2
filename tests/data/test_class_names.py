"""Names of classes, for whoever reads answers."""

from typing import Any

import pytest

from lathe.data.checks import check_class_names
from lathe.errors import UserError


def test_names_are_kept_in_their_order() -> None:
    assert check_class_names(["b", "a"], 2) == ["b", "a"]
    assert check_class_names(None, 2) is None


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["a"], r"^data\.class_names has 1 names for data\.num_classes=2: give one for each class\.$"),
        (["a", "a"], r"^data\.class_names has a twice: give each class a name of its own\.$"),
        (
            "ab",
            r"^data\.class_names=ab is no list of words: give one for each class, in quotes where it is a number\.$",
        ),
        ([1, 2], r"^data\.class_names=\[1, 2\] is no list of words"),
        (["a", ""], r"is no list of words"),
        ([], r"^data\.class_names has 0 names"),
    ],
)
def test_names_that_cannot_be(names: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_class_names(names, 2)
