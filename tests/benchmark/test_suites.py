"""Every case of every suite is a configuration that composes."""

from typing import Any

import pytest
import torch
from support.runs import config

from lathe.benchmark import suites
from lathe.benchmark.cases import PRECISIONS, scaling
from lathe.config.validate import check
from lathe.errors import refuse


def request(suite: str, **changes: Any) -> dict[str, Any]:
    return {**config(f"suite={suite}", name="benchmark"), **changes}


@pytest.mark.parametrize("suite", ["scaling", "memory"])
def test_cases_compose_and_have_names_of_their_own(suite: str) -> None:
    cases, full = suites.plan(request(suite, overrides=["seed=7"]))
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        cfg = config(*suites.overrides_of(case, full))
        refuse(check(cfg))
        assert cfg["seed"] == 7
        assert cfg["trainer"]["devices"] == case.processes
        assert cfg["data"]["batch_size"] % case.processes == 0


def test_weak_batches_grow_and_strong_ones_do_not() -> None:
    cases, full = suites.plan(request("scaling", processes=[1, 2, 4], batch_size=64, strategies=["ddp"]))
    assert full["rounds"] == 15
    found = [(c.facts["strategy"], c.processes, c.facts["mode"], c.sync, c.facts["batch_size"]) for c in cases]
    assert found == [
        ("auto", 1, "weak", True, 64),
        ("ddp", 1, "weak", True, 64),
        ("ddp", 2, "weak", True, 128),
        ("ddp", 2, "weak", False, 128),
        ("ddp", 2, "strong", True, 64),
        ("ddp", 4, "weak", True, 256),
        ("ddp", 4, "weak", False, 256),
        ("ddp", 4, "strong", True, 64),
    ]


def test_each_round_begins_with_another_case_and_has_all() -> None:
    cases = scaling({"processes": [2], "batch_size": 4, "strategies": ["ddp"]})
    rounds = [suites.order(cases, number) for number in range(len(cases) + 1)]
    assert [turns[0] for turns in rounds] == [*cases, cases[0]]
    assert all(len(turns) == len(cases) and set(map(id, turns)) == set(map(id, cases)) for turns in rounds)


def test_the_gpu_suite_composes_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases, full = suites.plan(request("gpu"))
    assert len(cases) == 2 * 4 * 4
    for case in cases[:: len(PRECISIONS)]:
        cfg = config(*suites.overrides_of(case, full))
        refuse(check(cfg))
        assert cfg["trainer"]["accelerator"] == "gpu"
