"""The keys of configs/serve.yaml."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.serving.limits import Limits
from lathe.serving.options import KEY


def test_the_limits_of_the_configuration_are_those_of_the_code(options: Callable[..., Any]) -> None:
    assert options().limits == Limits()
    assert options(max_body_bytes=5).limits == Limits(body=5)


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
    monkeypatch.setenv(KEY, "")  # of a service whose key was not filled in: open to everybody is not what was meant
    with pytest.raises(UserError, match=f"^{KEY} is empty"):
        options()
    monkeypatch.setenv(KEY, "from-outside")
    assert options(api_key=123).api_key == "123"
    assert "from-outside" not in repr(options())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers=0: give a whole number from 1"),
        ({"max_batch_size": True}, "max_batch_size=True"),
        ({"port": 70000}, "port=70000: give a number from 0"),
        ({"batch_timeout": -1}, "batch_timeout=-1"),
        ({"batch_timeout": 31}, "below request_timeout=30"),
        ({"body_timeout": 0}, "body_timeout=0: give a number of seconds above 0"),
        ({"threads": 0}, "threads=0"),
        ({"checkpoint": "newest"}, "choose best or last"),
        ({"api_key": "zwölf"}, "characters that a header can't carry"),
        ({"api_key": ""}, "api_key is empty"),
        ({"export": "[onnx,onnx_int8]", "host": ""}, "host=''"),
        ({"export": None}, "name one export"),
    ],
)
def test_mistakes(options: Callable[..., Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        options(**changes)
