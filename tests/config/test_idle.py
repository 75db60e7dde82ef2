"""A key that another one's value leaves unread is refused, where it was typed."""

from collections.abc import Callable

import pytest

from lathe.config.idle import READ_WITH

Cli = Callable[..., tuple[int, str]]
CASES = [(group, *pair) for group, pairs in READ_WITH.items() for pair in pairs]


@pytest.mark.parametrize(("group", "key", "other", "value"), CASES)
def test_it_is_refused(group: str, key: str, other: str, value: str, cli: Cli) -> None:
    method = group.partition(".")[2]
    typed = "[2,2]" if key == "block" else "60" if key == "percentile" else "1" if key == "norm" else "3"
    away = {"schedule": "cubic", "criterion": "taylor", "granularity": "unstructured", "observer": "minmax"}[other]
    code, said = cli(f"compression={method}", f"{group}.{other}={away}", f"{group}.{key}={typed}")
    assert (code, said.count("\n")) == (1, 1)
    assert said.startswith(f"Error: {group}.{key}={typed} has no effect: it is read with {group}.{other}={value} alone")
