"""The jobs of a sweep, their devices, and their values: parsed alike in all keys of sweep and from Python."""

import io
import json
import math
import shlex
import time
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console
from support.runs import ROOT

from lathe.config.override_parsing import as_typed
from lathe.errors import UserError
from lathe.launch.sweep import sweeper
from lathe.launch.sweep.job_sources import entry_of, planned, repeats_of, word
from lathe.launch.sweep.sweep_dir import Job
from lathe.launch.sweep.sweeper import Listed, ProgressTable, slots_of

LOADER = ConfigLoaderImpl(create_config_search_path(str(ROOT / "configs")))


def plan(*words: str, params: dict[str, Any] | None = None, **options: Any) -> list[list[str]]:
    return planned(list(words), {"axes": None, "runs": None, "remove": None, **options}, params or {}, LOADER)


def test_every_combination_of_what_is_typed() -> None:
    """Axes come first, and what is typed wins."""
    words = ("model=mlp,resnet20", "seed=range(1,3)", "test=false")
    assert plan(*words) == [[f"model={m}", f"seed={n}", "test=false"] for m in ("mlp", "resnet20") for n in (1, 2)]
    assert plan("seed=7", axes={"seed": [1, 2], "data.fold": [0, 1]}) == [
        ["seed=7", "data.fold=0"],
        ["seed=7", "data.fold=1"],
    ]
    assert plan(params={"seed": "1,2"}) == [["seed=1"], ["seed=2"]]
    assert plan(axes={"name": ["a b", "c"]}) == [["name='a b'"], ["name='c'"]]


def test_a_list_of_commands_with_seeds() -> None:
    runs = ["model=mlp", "model=resnet20 '+x=a b'"]
    assert plan("seed=1,2", runs=runs) == [
        ["seed=1", "model=mlp"],
        ["seed=2", "model=mlp"],
        ["seed=1", "model=resnet20", "+x=a b"],
        ["seed=2", "model=resnet20", "+x=a b"],
    ]


def test_an_ablation_leaves_out_one_word_at_a_time() -> None:
    found = Listed(plan("model=mlp", "test=false", "seed=1,2", remove=["test=false", "model=mlp"]), dict)
    assert found.labels == [
        "model=mlp test=false seed=1",
        "model=mlp test=false seed=2",
        "model=mlp seed=1",
        "model=mlp seed=2",
        "test=false seed=1",
        "test=false seed=2",
    ]


def test_each_job_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper, "_gpus", lambda: ["4", "5", "6", "7", "9"])
    gpus = {"accelerator": "auto", "devices": 2}
    assert [slot["CUDA_VISIBLE_DEVICES"] for slot in slots_of("auto", gpus)] == ["4,5", "6,7"]
    assert len(slots_of(1, gpus)) == 1
    assert len(slots_of("auto", {"accelerator": "gpu", "devices": "auto"})) == 5
    with pytest.raises(UserError, match=r"^sweep.jobs=3: 5 GPUs in groups of trainer.devices=2 hold 2 jobs at a time"):
        slots_of(3, gpus)


def test_the_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cpu = {"accelerator": "cpu", "devices": 2}
    assert slots_of(2, cpu) == [{"OMP_NUM_THREADS": "2"}] * 2
    assert slots_of("auto", cpu) == [{}]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # set by the user
    assert slots_of(4, cpu) == [{}] * 4


def test_the_table_ends_with_how_every_job_has_ended(tmp_path: Path) -> None:
    screen = ProgressTable(tmp_path, 2, 4, 0, ["val/loss"], ["min"])
    screen.console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    runs = [tmp_path / name for name in ("a", "b")]
    jobs = [
        Job(0, [], "lr=0.1 seed=1", state="complete", run_dir=str(runs[0]), objective=0.5, seconds=61),
        Job(1, [], "lr=0.1 seed=2", state="running"),
        Job(2, []),
        Job(3, [], "seed=3", state="complete", run_dir=str(runs[1]), objective=0.25, seconds=61),
    ]
    with screen:
        screen.update(jobs, {1: time.monotonic()}, force=True)
        jobs[1].state, jobs[1].sentence = "failed", "no luck"
        screen.ended(jobs[1])
        screen.update(jobs, {}, force=True)
    shown = screen.console.file.getvalue()  # type: ignore[attr-defined]
    first, last = shown[: shown.index("Error")], shown[shown.rindex("┏") :]
    assert "running" in first
    assert "1 running, 2 complete, 0 pruned, 0 failed of 4; about 1 min 01 s left" in first
    assert "Error: job 1 (lr=0.1 seed=2): no luck" in shown
    assert [line.replace("│", " ").split()[:-3] for line in last.splitlines() if line.startswith("│")] == [
        ["0", "lr=0.1", "seed=1", "complete", "0.5", "1"],
        ["1", "lr=0.1", "seed=2"],
        ["3", "seed=3", "complete", "0.25", "*", "1"],
    ]
    assert "0 running, 2 complete, 0 pruned, 1 failed of 4" in last


KEY = "name"
VALUES: list[Any] = [
    *(0, -3, 0.1, 1e-5, 1e16, -0.0, math.inf, True, False, None),
    *("resnet20", "a b", "1", "1e-3", "true", "null", "None", "it's", 'a "quote"', "a=b,c", "[x]", "{x: 1}", "stem.*"),
    *("", " x ", "back\\slash", "ends\\", "é", "$HOME", "#1", "a:b", "*"),
    *(["stem.*"], ["bias", "a b"], [1, 2.5, None, True], [[1, 2], [3]], []),
    *({"a": 1}, {"a": ["b", {"c": None}]}, {}),
]


def read(words: list[str]) -> Any:
    """Return the value that Hydra gives the key of the only override."""
    (item,) = OverridesParser.create(config_loader=LOADER).parse_overrides(words)
    return item.value()


def same(a: Any, b: Any) -> bool:
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_the_same_by_every_door(value: Any) -> None:
    override = f"{KEY}={as_typed(value)}"
    assert same(read([override]), value)
    assert same(read(plan(runs=[[override]])[0]), value)
    assert same(read(plan(runs=[shlex.quote(override)])[0]), value)
    assert same([read(job) for job in plan(axes={KEY: [value, 7]})], [value, 7])
    assert same([read(repeat) for repeat in repeats_of({KEY: [value, 7]}, [], [])], [value, 7])
    if value != math.inf:
        entry = entry_of(KEY, [value, 7])
        stored = json.loads(json.dumps(entry.choices))  # a study stores them as JSON
        assert same([read([word(KEY, drawn, entry)]) for drawn in stored], [value, 7])
