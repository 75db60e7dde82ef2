"""The suites' requests and cases: every case composes, and requests that can't be measured are refused."""

from typing import Any

import pytest
from suites import cases
from support.runs import config

from lathe.config.validate import check
from lathe.errors import UserError, refuse


def request(*words: str) -> dict[str, Any]:
    return config(*words, name="benchmark")


def plan(*words: str, base: dict[str, Any] | None = None) -> tuple[list[cases.Case], dict[str, Any]]:
    return cases.plan(request(*words), base)


@pytest.mark.parametrize(
    "words",
    [
        ("scaling",),
        ("scaling", "strategies=[pipeline,3d]"),
        ("memory",),
        ("precision", "accelerator=gpu"),
        ("compile", "accelerator=cpu"),
        ("parallel", "accelerator=gpu"),
    ],
)
def test_cases_compose_and_have_names_of_their_own(words: tuple[str, ...]) -> None:
    every, full = plan(f"suite={words[0]}", *words[1:], 'overrides=["seed=7"]')
    assert len({case.name for case in every}) == len(every)
    for case in every[::3]:
        cfg = config(*cases.overrides_of(case, full))
        refuse(check(cfg))
        assert (cfg["seed"], cfg["trainer"]["accelerator"]) == (7, full["accelerator"])
        assert cfg["trainer"]["devices"] == case.processes
        assert cfg["data"]["batch_size"] % case.processes == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("suite=parallel accelerator=cpu processes=[3]", "batch_size=50 does not divide by processes=3"),
        ("suite=memory assert=true", "assert=true has no meaning for suite=memory"),
        ("suite=inference", "suite=inference measures a finished run"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        plan(*words.split())
