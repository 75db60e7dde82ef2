"""Suites precision, compile, parallel and scaling of an experiment: cases, and a small run of each."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.choices import names
from support.runs import ROOT, config

from lathe.benchmark import suites, training
from lathe.benchmark.crew import run
from lathe.config.validate import check
from lathe.errors import UserError, refuse


def plan(*words: str, composed: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
    return suites.plan(config(*words, name="benchmark"), composed)


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("suite", ["precision", "compile", "parallel"])
def test_cases_compose(suite: str, device: str) -> None:
    cases, full = plan(f"suite={suite}", f"accelerator={device}", 'overrides=["seed=7"]')
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        cfg = config(*suites.overrides_of(case, full))
        refuse(check(cfg))
        assert (cfg["seed"], cfg["trainer"]["accelerator"]) == (7, device)
        assert cfg["trainer"]["devices"] == case.processes
        assert cfg["trainer"]["max_steps"] == full["warmup"] + full["steps"] + 1


def test_every_precision_and_every_way_to_compile_has_a_row() -> None:
    cases, full = plan("suite=precision", "accelerator=cpu", "batch_size=20")
    files = set(names("precision")) - {"auto"}  # a choice of one of them
    assert cases[0].name == "32-true"
    assert {case.name for case in cases} == files
    assert "data.batch_size=20" in suites.overrides_of(cases[3], full)
    cases, full = plan("suite=compile", "accelerator=cpu")
    made = {case.name: config(*suites.overrides_of(case, full))["compile"] for case in cases}
    assert not made.pop("none")["enabled"]
    assert {name: (c["mode"], c["regional"], c["scope"]) for name, c in made.items()} == {
        "default": ("default", False, "net"),
        "reduce-overhead": ("reduce-overhead", False, "net"),
        "max-autotune": ("max-autotune", False, "net"),
        "regional": ("default", True, "net"),
        "step": ("default", "auto", "step"),
    }


def test_a_larger_batch_has_a_learning_rate_as_many_times_as_large_after_a_warm_up() -> None:
    cases, full = plan("suite=parallel", "accelerator=cpu", "processes=[4]", "batch_size=64")
    made = {case.name: config(*suites.overrides_of(case, full)) for case in cases}
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


def test_an_experiment_is_the_base_with_its_own_batch_and_learning_rate() -> None:
    base = config(*suites.base_of({"base": "digits_small", "overrides": []}))
    cases, full = plan("suite=scaling", "base=digits_small", composed=base)
    assert [case.facts["batch_size"] for case in cases if case.processes == 2 and case.facts["mode"] == "weak"] == [
        2 * base["data"]["batch_size"]
    ] * 3
    cfg = config(*suites.overrides_of(cases[0], full))
    refuse(check(cfg))
    assert cfg["model"] == base["model"]
    cases, full = plan("suite=scaling", "base=digits_small", "batch_size=10", composed=base)
    assert cases[0].facts["batch_size"] == 10
    cases, full = plan("suite=parallel", "base=digits_quickstart", "accelerator=cpu", composed=base)
    assert cases[-1].facts["lr"] == 2 * base["optimizer"]["lr"]
    stepped = config(*suites.base_of({"base": "cifar100_resnet56", "overrides": []}))
    cases, full = plan("suite=scaling", "base=cifar100_resnet56", composed=stepped)
    cfg = config(*suites.overrides_of(cases[0], full))  # without the milestones of its schedule
    refuse(check(cfg))
    assert cfg["scheduler"]["_target_"] == "lathe.optim.constant"


def test_strategies_that_cut_the_net_are_set_against_one_process_of_none() -> None:
    cases, full = plan("suite=scaling", "strategies=[pipeline,3d]")
    assert [case.name for case in cases] == [
        "auto, 1, weak",
        "pipeline, 2, weak",
        "pipeline, 2, strong",
        "3d, 2, weak",
        "3d, 2, strong",
    ]
    for case in cases:
        refuse(check(config(*suites.overrides_of(case, full))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("suite=parallel", "accelerator=cpu", "processes=[3]"), "batch_size=50 does not divide by processes=3"),
        (
            ("suite=precision", "accelerator=cpu", 'overrides=["precision=64-true"]'),
            "overrides=precision=64-true: suite=precision sets precision itself",
        ),
    ],
)
def test_requests_that_cannot_be_measured_are_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        plan(*words)


def test_the_device_is_a_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    full = plan("suite=parallel")[1]
    assert full["own"] == ("experiment=cifar10_resnet50_amp",)
    assert training.processes_of(full) == 4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert plan("suite=precision")[1]["accelerator"] == "cpu"


TINY = ["model=mlp", "model.net.width=8", "data=synthetic", "data.source.train_size=64", "data.source.val_size=16"]


def measured(monkeypatch: pytest.MonkeyPatch, suite: str, keep: tuple[str, ...], *words: str) -> dict[str, Any]:
    """Return the workers' measurements of some rows of a suite, with a tiny net."""
    sizes = training.SIZES[suite]["cpu"]
    monkeypatch.setitem(sizes, "own", (*TINY, "optimizer=sgd"))
    cases, full = plan(f"suite={suite}", "accelerator=cpu", "batch_size=16", "rounds=1", "warmup=2", "steps=3", *words)
    cases = [case for case in cases if case.name in keep]
    composed = {case.name: config(*suites.overrides_of(case, full)) for case in cases}
    return run(cases, composed, full, lambda line: None)


@pytest.mark.slow
def test_precision_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(monkeypatch, "precision", ("32-true", "64-true"), "epochs=2")
    (single,), (double,) = results["32-true"], results["64-true"]
    assert single["updates"] == double["updates"] == 2 * 4
    assert single["metric"] == "val/accuracy"
    assert 0 <= single["reached"] <= 1
    assert 1.3 < double["peak"] / single["peak"] < 2.1
    assert single["epoch_s"] == pytest.approx(4 * single["step_ms"] / 1e3)


@pytest.mark.slow
def test_parallel_is_measured_and_strategies_that_cannot_run_report_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(monkeypatch, "parallel", ("single", "dp", "ddp", "ddp_scaled"), "epochs=2")
    assert results["dp"][0]["error"].startswith("strategy=dp drives several GPUs from one process and none is visible")
    assert results["ddp"][0]["updates"] == results["single"][0]["updates"] == 8
    assert results["ddp_scaled"][0]["updates"] == 4
    assert results["ddp"][0]["reached"] == pytest.approx(results["single"][0]["reached"], abs=0.07)
    assert results["ddp"][0]["peak"] < results["single"][0]["peak"] * 1.2


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    results = measured(monkeypatch, "compile", ("none", "default"))
    (none,), (default,) = results["none"], results["default"]
    assert default["breaks"] == default["anew"] == 0
    assert default["peak"] > 2**26
    assert none["cold_s"] < default["cold_s"]


@pytest.mark.slow
def test_a_missed_threshold_is_the_exit_code(tmp_path: Path) -> None:
    words = ["suite=scaling", "experiment=digits_quickstart", "strategies=[ddp]", "rounds=1", "warmup=1", "steps=3"]
    more = ["assert=true", "thresholds={2: 50}", f"output={tmp_path / 'out'}"]
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), *words, *more]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert said.startswith("Error: missed: expected ddp, 2, weak: efficiency at least 50.00, got 0.")
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    first = {case["name"]: case["rounds"][0] for case in written["cases"]}
    assert first["auto, 1, weak"]["peak"] > 0
    assert "threshold" in (tmp_path / "out" / "results.md").read_text()
