"""The suites' requests and cases: every case composes, and requests that can't be measured are refused."""

from typing import Any

import pytest
import torch
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
        *(
            (suite, f"accelerator={device}")
            for suite in ("precision", "compile", "parallel")
            for device in ("cpu", "gpu")
        ),
    ],
)
def test_cases_compose_and_have_names_of_their_own(words: tuple[str, ...]) -> None:
    every, full = plan(f"suite={words[0]}", *words[1:], 'overrides=["seed=7"]')
    assert len({case.name for case in every}) == len(every)
    for case in every:
        cfg = config(*cases.overrides_of(case, full))
        refuse(check(cfg))
        assert (cfg["seed"], cfg["trainer"]["accelerator"]) == (7, full["accelerator"])
        assert cfg["trainer"]["devices"] == case.processes
        assert cfg["data"]["batch_size"] % case.processes == 0


def test_weak_batches_grow_and_strong_ones_do_not() -> None:
    every, full = plan("suite=scaling", "processes=[1,2,4]", "batch_size=64", "strategies=[ddp]")
    assert full["rounds"] == 15
    found = [(c.facts["strategy"], c.processes, c.facts["mode"], c.sync, c.facts["batch_size"]) for c in every]
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


def test_the_gpu_suite_composes_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    every, full = plan("suite=gpu")
    assert len(every) == 2 * 4 * 4
    for case in every[::4]:
        cfg = config(*cases.overrides_of(case, full))
        refuse(check(cfg))
        assert cfg["trainer"]["accelerator"] == "gpu"


def test_a_larger_batch_has_a_learning_rate_as_many_times_as_large_after_a_warm_up() -> None:
    every, full = plan("suite=parallel", "accelerator=cpu", "processes=[4]", "batch_size=64")
    made = {case.name: config(*cases.overrides_of(case, full)) for case in every}
    found = {
        name: (c["trainer"]["devices"], c["data"]["batch_size"], c["optimizer"]["lr"], c["scheduler"]["warmup"])
        for name, c in made.items()
    }
    assert found == {
        "single": (1, 64, 0.1, 0),
        "dp": (4, 64, 0.1, 0),
        "ddp": (4, 64, 0.1, 0),
        "ddp_amp": (4, 64, 0.1, 0),
        "ddp_large": (4, 256, 0.1, 0),
        "ddp_scaled": (4, 256, 0.4, 0.2),
    }
    assert {name for name, c in made.items() if c["precision"]["name"] != "32-true"} == {"ddp_amp"}


def test_an_experiment_is_measured_with_its_batch_size_and_a_constant_rate() -> None:
    base = config("experiment=digits_quickstart", "scheduler=constant")
    every, full = plan("suite=scaling", "base=digits_quickstart", base=base)
    weak = [case.facts["batch_size"] for case in every if case.processes == 2 and case.facts["mode"] == "weak"]
    assert weak == [2 * base["data"]["batch_size"]] * 3
    cfg = config(*cases.overrides_of(every[0], full))
    refuse(check(cfg))
    assert cfg["model"] == base["model"]
    every, full = plan("suite=scaling", "base=digits_quickstart", "batch_size=10", base=base)
    assert every[0].facts["batch_size"] == 10
    every, full = plan("suite=parallel", "base=digits_quickstart", "accelerator=cpu", base=base)
    assert every[-1].facts["lr"] == 2 * base["optimizer"]["lr"]
    stepped = config(*cases.base_of({"base": "cifar100_resnet56", "overrides": []}))
    every, full = plan("suite=scaling", "base=cifar100_resnet56", base=stepped)
    cfg = config(*cases.overrides_of(every[0], full))  # without the milestones of its schedule
    refuse(check(cfg))
    assert cfg["scheduler"]["_target_"] == "lathe.optim.constant"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("suite=parallel accelerator=cpu processes=[3]", "batch_size=50 does not divide by processes=3"),
        (
            'suite=precision accelerator=cpu overrides=["precision=64-true"]',
            "overrides=precision=64-true: suite=precision",
        ),
        ("suite=scaling thresholds={8:0.7}", "thresholds.8: suite=scaling does not measure 8"),
        ("suite=memory assert=true", "assert=true has no meaning for suite=memory"),
        ("suite=inference", "suite=inference measures a finished run"),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        plan(*words.split())
