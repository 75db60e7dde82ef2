"""The keys of configs/serve.yaml."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.serving.options import KEY, check_batch


def test_cores_are_shared_between_workers(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [options(workers=n).threads for n in (1, 3, 16)] == [8, 2, 1]
    assert options(workers=3, threads=7).threads == 7


def test_the_key_of_the_command_comes_before_the_environments(
    options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options().api_key is None
    monkeypatch.setenv(KEY, "from-outside")
    assert options().api_key == "from-outside"
    monkeypatch.setenv(KEY, "")  # of a service whose key was left empty, which must not open it to all
    with pytest.raises(UserError, match=f"^{KEY} is empty"):
        options()
    monkeypatch.setenv(KEY, "from-outside")
    assert options(api_key=123).api_key == "123"
    assert "from-outside" not in repr(options())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_timeout": 31}, "below request_timeout=30"),
        ({"workers": 1024}, "workers=1024: give at most"),
        ({"export": None}, "name one export"),
        ({"hosts": ["http://example.org"]}, "without ports"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(
    options: Callable[..., Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        options(**changes)


def test_a_batch_has_to_fit_into_the_memory(options: Callable[..., Any]) -> None:
    check_batch(options(max_batch_size=100), 2**20)
    with pytest.raises(UserError, match="give at most 1024"):
        check_batch(options(max_batch_size=2000), 2**20)
