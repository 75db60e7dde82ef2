"""The keys of configs/serve.yaml."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.runs import ROOT

from lathe.config.schema import problems
from lathe.errors import UserError
from lathe.serving.limits import Limits
from lathe.serving.options import KEY, Options, check_batch


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


STRANGE = [
    "abc",
    "",
    -1,
    0,
    1.5,
    True,
    None,
    [1],
    {"a": 1},
    math.nan,
    math.inf,
    -math.inf,
    10**400,
    "1",
    [],
    ["a b"],
    "ü",
    "a\nb",
]
NUMBERS = {"port": [0], "batch_timeout": [0, 1.5]}
TAKEN = {
    **{name: [1.5] for name in Options.__dataclass_fields__ if name.endswith("_timeout")},
    **NUMBERS,
    "threads": [None],
    "batch_size": [None],
    "hosts": [[]],
    "host": ["abc", "1"],
    "api_key": ["abc", "1", None, -1, 0],
    "export": ["abc", "1", "ü"],
}
ELSEWHERE = ("defaults", "run", "trainer", "paths")  # read by the launch


@pytest.mark.parametrize(
    "name", [name for name in OmegaConf.load(ROOT / "configs/serve.yaml") if name not in ELSEWHERE]
)
def test_every_key_takes_what_it_can_be_alone(options: Callable[..., Any], name: str) -> None:
    for value in STRANGE:
        taken = any(type(value) is type(one) and value == one for one in TAKEN.get(name, []))
        if taken:
            options(**{name: value})
            continue
        with pytest.raises(UserError) as caught:
            options(**{name: value})
        word = "(target|export)" if name == "export" else name
        assert re.match(rf"{word}\b[^\n]+\.$", str(caught.value)), (value, str(caught.value))
    given = dict(OmegaConf.to_container(OmegaConf.load(ROOT / "configs/serve.yaml")), export="onnx")
    del given[name]
    assert dict(problems(given, "serve"))[name] == f"{name} is missing: leave ~{name} out."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "workers=0: expected a whole number from 1"),
        ({"max_batch_size": True}, "max_batch_size=true"),
        ({"port": 70000}, "port=70000: expected a whole number from 0 to 65535"),
        ({"batch_timeout": -1}, "batch_timeout=-1"),
        ({"batch_timeout": 31}, "below request_timeout=30"),
        ({"body_timeout": 0}, "body_timeout=0: expected a number above 0"),
        ({"threads": 0}, "threads=0"),
        ({"checkpoint": "newest"}, "expected best, last or"),
        ({"api_key": "zwölf"}, "characters that a header can't carry"),
        ({"api_key": ""}, "api_key='': expected a word"),
        ({"host": "a b"}, "host='a b'"),
        ({"export": None}, "name one export"),
        ({"workers": 1024}, "workers=1024: give at most"),
        ({"trainer": {"devices": 2}}, "trainer.devices=2: expected 1, got another number"),
        ({"trainer": {"accelerator": "tpu"}}, "trainer.accelerator=tpu"),
        ({"strategy": {"_target_": "lathe.strategies.FSDP"}}, "strategy is for training"),
        ({"hosts": ["example.org:80"]}, "without ports"),
        ({"hosts": ["http://example.org"]}, "without ports"),
        ({"hosts": "example.org"}, "hosts=example.org: expected a list"),
    ],
)
def test_mistakes(options: Callable[..., Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        options(**changes)


def test_a_batch_has_to_fit_into_the_memory(options: Callable[..., Any]) -> None:
    check_batch(options(max_batch_size=100), 2**20)
    with pytest.raises(
        UserError, match=r"^max_batch_size=2000 inputs of 1048576 bytes are above 1 GiB: give at most 1024\.$"
    ):
        check_batch(options(max_batch_size=2000), 2**20)
