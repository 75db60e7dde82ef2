"""Suites that interleave sides in one process: valid requests, and their result tables."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from support.runs import config

from lathe.benchmark import int8, loaders, sides, trainer, turns
from lathe.benchmark.turns import Suite
from lathe.errors import UserError

MODULES = {"loaders": loaders, "trainer": trainer, "int8": int8}


def request(suite: str, **changes: Any) -> dict[str, Any]:
    return {**config(f"suite={suite}", name="benchmark"), **changes}


def test_keys_at_null_get_the_suites_own_values() -> None:
    assert MODULES.keys() == sides.DEFAULTS.keys()
    full = sides.plan(request("loaders", workers=[0, 3]))
    assert (full["workers"], full["rounds"], full["seconds"], full["accelerator"]) == ([0, 3], 7, 0.3, "cpu")
    full = sides.plan(request("trainer", rounds=2))
    assert (full["rounds"], full["steps"], full["batch_size"], full["threads"]) == (2, 400, 64, 1)
    full = sides.plan(request("int8", batches=[8, 1, 8], overrides=["model=resnet50"]))
    assert (full["batches"], full["warmup"], full["overrides"], full["qat"]) == ([1, 8], 5, ["model=resnet50"], None)


@pytest.mark.parametrize(
    ("suite", "changes", "words"),
    [
        ("trainer", {"seconds": 1.0}, r"seconds=1\.0 has no meaning for suite=trainer"),
        ("int8", {"run": "x", "qat": 2}, "qat=2 is for a run that suite=int8 trains itself"),
    ],
)
def test_keys_without_a_meaning_are_refused(suite: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^{words}"):
        sides.plan(request(suite, **changes))


def test_a_missing_gpu_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"^accelerator=gpu: suite=loaders would use an NVIDIA GPU and none is visible"):
        sides.run(sides.plan(request("loaders", accelerator="gpu")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_turns_rotate_and_a_side_that_fails_has_one() -> None:
    seen = list[str]()

    def side(name: str) -> Any:
        def turn() -> dict[str, Any]:
            seen.append(name)
            if name == "b":
                raise OSError("no compiler\nfor this")
            return {"x": len(seen)}

        return turn

    told = list[str]()
    results = turns.take_turns({name: side(name) for name in "abc"}, 3, told.append)
    assert seen == [*"abc", *"ca", *"ca"]
    assert results["b"] == [{"error": "OSError: no compiler"}]
    assert [len(results[name]) for name in "abc"] == [3, 1, 3]
    assert "b: OSError: no compiler" in told


def written(
    suite: Suite, facts: turns.Facts, results: turns.Results, asked: dict[str, Any], folder: Path
) -> tuple[list[list[str]], str]:
    """Return the rows of the first table as cells, and the whole text; check the files."""
    text = turns.write(folder, facts, results, suite, asked, 61.0, lambda line: None)
    assert (folder / "results.md").read_text() == text
    found = json.loads((folder / "results.json").read_text())
    assert {case["name"]: case["rounds"] for case in found["cases"]} == results
    assert found["request"] == asked
    ElementTree.fromstring((folder / "plot.svg").read_text())
    lines = text.split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines], text


def test_the_fastest_of_the_usual_ones_is_the_base(tmp_path: Path) -> None:
    names = ["images in memory: PIL, 0 workers", "images in memory: PIL, 2 workers"]
    mine, broken = "images in memory: resident, 0 workers", "dataset, table: data=dataset, 0 workers"
    results = {
        names[0]: [{"samples_per_s": v} for v in (100.0, 100.0, 300.0)],
        names[1]: [{"samples_per_s": v} for v in (200.0, 200.0, 100.0)],
        mine: [{"samples_per_s": v} for v in (2000.0, 4000.0, 3000.0)],
        broken: [{"error": "OSError: no"}],
    }
    about = {"kind": "images in memory", "workers": 0, "samples": 6000, "batch_size": 8, "usual": names}
    facts = {name: {**about, "how": name} for name in results}
    facts[broken] |= {"kind": "dataset, table", "usual": ["dataset, table: DataLoader, 0 workers"]}
    rows, text = written(loaders, facts, results, sides.plan(request("loaders", rounds=3)), tmp_path)
    assert [row[4:] for row in rows] == [
        ["100 (100 to 300)", "60.000", "0.500 (0.500 to 3.000)"],
        ["200 (100 to 200)", "30.000", "1.000 (1.000 to 1.000)"],
        ["3,000 (2,000 to 4,000)", "2.000", "20.000 (10.000 to 30.000)"],
        ["OSError: no", "", ""],
    ]
    assert "n = 3 rounds" in text
    bars = {sentence: (measured and measured.values, limit) for sentence, measured, limit in loaders.claims(results)}
    assert bars["images in memory, resident: samples/s over PIL's,"] == ([10.0, 20.0, 30.0], {"at_least": 15.0})
    assert bars["images in memory, resident, uint8: samples/s over PIL's,"] == (None, {"at_least": 40.0})
    assert bars[f"{broken}: samples/s over DataLoader's,"] == (None, {"at_least": 1.0})


def test_steps_are_compared_with_the_hand_written_loop(tmp_path: Path) -> None:
    results = {
        trainer.HAND: [{"us_per_step": v, "bit_equal": True} for v in (100.0, 200.0)],
        trainer.FULL: [
            {"us_per_step": 120.0, "bit_equal": True},
            {"us_per_step": 220.0, "bit_equal": False},
        ],
        trainer.COMPILED: [{"error": "InvalidCxxCompiler: no g++"}],
    }
    facts = {name: {"updates": 40} for name in results}
    rows, _ = written(trainer, facts, results, sides.plan(request("trainer", rounds=2, steps=10)), tmp_path)
    assert [row[3] for row in rows] == ["1.000 (1.000 to 1.000)", "1.150 (1.100 to 1.200)", ""]
    found = [(measured and measured.median, limit) for _, measured, limit in trainer.claims(results)]
    assert found == [
        (pytest.approx(1.15), {"at_most": 1.10}),
        (None, {"at_most": 0.80}),
        (0.0, {"at_least": 1.0}),
        (None, {"at_least": 1.0}),
    ]


def test_integers_are_compared_with_float32(tmp_path: Path) -> None:
    def rounds(size: int, accuracy: float, *times: float) -> list[dict[str, Any]]:
        return [{"latency_ms": time, "bytes": size, "accuracy": accuracy} for time in times]

    results = {
        "float32, batch 1": rounds(4 * 2**20, 0.97, 10.0, 20.0),
        "int8, batch 1": rounds(2**20, 0.96, 4.0, 6.0),
        "int8, qat, batch 1": rounds(2**20, 0.975, 3.0, 6.0),
    }
    shared = {"run": "r", "net": "Net", "metric": "accuracy", "samples": 9}
    facts = {
        name: {"form": name.rpartition(", ")[0], "batch": int(name[-1]), "ranges": "", "bytes": r[0]["bytes"], **shared}
        for name, r in results.items()
    }
    rows, _ = written(int8, facts, results, sides.plan(request("int8", rounds=2)), tmp_path)
    assert rows[1][4:] == ["0.250", "5.00 (4.00 to 6.00)", "0.350 (0.300 to 0.400)", "0.9600", "-0.0100"]
    found = {sentence: (round(measured.median, 4), limit) for sentence, measured, limit in int8.claims(results)}
    assert found == {
        "int8: size over float32's,": (0.25, {"at_most": 0.26}),
        "int8: points of accuracy lost,": (1.0, {"at_most": 0.5}),
        "int8: latency at batch 1 over float32's,": (0.35, {"at_most": 0.33}),
        "int8, qat: size over float32's,": (0.25, {"at_most": 0.26}),
        "int8, qat: points of accuracy lost,": (-0.5, {"at_most": 0.5}),
        "int8, qat: latency at batch 1 over float32's,": (0.3, {"at_most": 0.33}),
    }


def test_nothing_is_written_where_nothing_was_measured(tmp_path: Path) -> None:
    results = {trainer.HAND: [{"error": "MemoryError: no"}]}
    with pytest.raises(UserError, match=r"^suite=trainer: no side could be measured \(MemoryError: no\)\.$"):
        written(trainer, {trainer.HAND: {"updates": 1}}, results, request("trainer"), tmp_path / "out")
    assert not (tmp_path / "out").exists()
