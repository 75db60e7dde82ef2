"""Every case of every suite is a configuration that composes, and what can't be measured is refused in a sentence."""

import re
from typing import Any

import pytest
import torch
from support.runs import ROOT, config

from lathe.benchmark import sides, suites
from lathe.benchmark.cases import PRECISIONS, scaling
from lathe.config.validate import check
from lathe.errors import UserError, refuse


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


@pytest.mark.parametrize(
    ("suite", "changes", "sentence"),
    [
        ("scaling", {"batch_size": 5}, r"batch_size=5 does not divide by each of processes=\[1, 2\]: change either\."),
        ("memory", {"batch_size": 5}, r"batch_size=5 does not divide by processes=2: change either\."),
    ],
)
def test_mistakes_cost_a_sentence(suite: str, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}$"):
        suites.plan(request(suite, **changes))


def test_every_suite_that_a_text_names_is_there() -> None:
    known = {*suites.DEFAULTS, *sides.DEFAULTS, *sides.FORMER, "cli"}  # scripts/benchmark.py runs the last as a script
    texts = [
        ROOT / "README.md",
        *(path for name in ("src/lathe", "docs") for path in (ROOT / name).rglob("*")),
    ]
    named: dict[str, set[str]] = {}
    for path in texts:
        if path.suffix in (".py", ".md", ".yaml"):
            found = re.findall(r"suite=(\w+(?:\|\w+)*)", path.read_text())
            named[path.name] = {suite for words in found for suite in words.split("|")}
    assert named["benchmarks.md"] >= {"scaling", "memory", "gpu", "cli", *sides.DEFAULTS, *sides.FORMER}
    assert {name: missing for name, found in named.items() if (missing := found - known)} == {}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_suite_is_refused_without_one() -> None:
    with pytest.raises(UserError, match=r"^suite=gpu needs an NVIDIA GPU and none is visible here"):
        suites.plan(request("gpu"))


def test_the_gpu_suite_composes_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    cases, full = suites.plan(request("gpu"))
    assert len(cases) == 2 * 4 * 4
    for case in cases[:: len(PRECISIONS)]:
        cfg = config(*suites.overrides_of(case, full))
        refuse(check(cfg))
        assert cfg["trainer"]["accelerator"] == "gpu"
