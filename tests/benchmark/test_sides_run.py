"""The suites of sides, each run once at its smallest size."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, config, new_run

from lathe.benchmark import int8, loaders, sides, trainer
from lathe.runs.rundir import RunDir
from lathe.training.train import train


def measured(suite: str, output: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    """Return the cases of results.json by name."""
    request = sides.plan({**config(f"suite={suite}", name="benchmark"), **changes})
    if suite == "int8":
        request["export"] = config(*sides.FILES, name="export")["target"]
    sides.run(request, output, lambda line: None)
    return {case["name"]: case for case in json.loads((output / "results.json").read_text())["cases"]}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the data so that a turn takes no time."""
    for kind in loaders.SIZES:
        monkeypatch.setitem(loaders.SIZES, kind, 120)
        monkeypatch.setitem(loaders.BATCHES, kind, 20)


@pytest.mark.usefixtures("few")
def test_loaders(tmp_path: Path) -> None:
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    found = measured("loaders", tmp_path / "out", rounds=2, seconds=0.001, workers=[0])
    assert (torch.get_num_threads(), torch.equal(torch.get_rng_state(), random)) == (threads, True)
    assert [(case["kind"], case["how"]) for case in found.values()] == [
        *(("images in memory", how) for how in ("PIL", "PIL tuned", "resident, uint8", "resident", "resident, folded")),
        *(("image files", how) for how in ("JPEG, PIL", "data=image_folder", "data=shards")),
        *(
            (f"dataset, {name}", how)
            for name in ("table", "drawing", "encoded")
            for how in ("DataLoader", "data=dataset")
        ),
        *(("tokens", how) for how in ("memory map", "data=tokens")),
    ]
    for case in found.values():
        assert [set(turn) for turn in case["rounds"]] == [{"samples_per_s"}] * 2
        assert min(turn["samples_per_s"] for turn in case["rounds"]) > 0
        assert set(case["usual"]) <= found.keys()
        assert case["batch_size"] == 20
    results = {name: case["rounds"] for name, case in found.items()}
    claims = loaders.claims(results)
    assert len(claims) == 8
    assert all(spread is not None and len(spread.values) == 2 for _, spread, _ in claims)


@pytest.mark.usefixtures("few")
def test_all_sides_of_a_kind_give_batches_of_one_form(tmp_path: Path) -> None:
    forms: dict[str, set[Any]] = {}
    for make, kind in (
        (loaders._in_memory, "images in memory"),
        (loaders._files, "image files"),
        (loaders._datasets, "dataset"),
        (loaders._tokens, "tokens"),
    ):
        for side in make(tmp_path, 120, 20, [0], torch.device("cpu")):
            x, y = next(side.batches)
            assert x.is_contiguous()
            if x.dtype == torch.uint8:
                assert side.how == "resident, uint8"
                continue
            forms.setdefault(kind, set()).add((x.dtype, tuple(x.shape), y.dtype, tuple(y.shape)))
            if kind == "tokens":
                assert torch.equal(x[:, 1:], y[:, :-1])
    labels = (torch.int64, (20,))
    assert forms == {
        "images in memory": {(torch.float32, (20, 3, 32, 32), *labels)},
        "image files": {(torch.float32, (20, 3, 64, 64), *labels)},
        "dataset": {(torch.float32, (20, 3, 32, 32), *labels)},
        "tokens": {(torch.int64, (20, 256), torch.int64, (20, 256))},
    }


def test_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(trainer.SIDES, trainer.COMPILED)  # compiling takes longer than the rest
    found = measured("trainer", tmp_path / "out", rounds=1, steps=12, batch_size=8)
    assert list(found) == list(trainer.SIDES)
    for case in found.values():
        (turn,) = case["rounds"]
        assert turn["us_per_step"] > 0
        assert turn["bit_equal"] is True
        assert case["updates"] == 48
    results = {name: case["rounds"] for name, case in found.items()}
    assert {sentence: measured is None for sentence, measured, _ in trainer.claims(results)} == {
        "Lathe, full features: step over the hand-written loop's,": False,
        "Lathe, compile.scope=step: step over the hand-written loop's,": True,
        "Lathe, full features: weights bit-equal to the hand-written loop's (1 is yes),": False,
        "Lathe, steps_per_call=1: weights bit-equal to the hand-written loop's (1 is yes),": False,
    }


def test_other_weights_are_not_bit_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(batches: trainer.Batches, folder: Path) -> tuple[float, torch.nn.Module]:
        seconds, net = trainer.by_hand(batches)
        with torch.no_grad():
            next(net.parameters())[0] += 1e-6
        return seconds, net

    monkeypatch.setattr(trainer, "SIDES", {trainer.HAND: trainer.by_hand, trainer.FULL: another})
    found = measured("trainer", tmp_path / "out", rounds=1, steps=2, batch_size=8)
    assert [case["rounds"][0]["bit_equal"] for case in found.values()] == [True, False]


@pytest.mark.slow
def test_int8_of_a_finished_run(tmp_path: Path) -> None:
    cfg = new_run(tmp_path / "logs", *SMALL, "trainer.max_epochs=5")
    run = RunDir(cfg["paths"]["run_dir"])
    train(cfg)
    before = sorted(path.name for path in run.path.iterdir())
    found = measured("int8", tmp_path / "out", run=str(run.path), rounds=2, steps=3, warmup=1, batches=[1, 4])
    assert list(found) == [f"{form}, batch {n}" for n in (1, 4) for form in ("float32", "int8")]
    for name, case in found.items():
        assert [turn["latency_ms"] > 0 for turn in case["rounds"]] == [True, True]
        assert {turn["bytes"] for turn in case["rounds"]} == {case["bytes"]}
        assert case["samples"] == 297
        assert case["ranges"] == ("calibrated" if name.startswith("int8") else "")
    assert found["float32, batch 1"]["value"] == pytest.approx(run.result["test/accuracy"])
    assert found["int8, batch 1"]["value"] == pytest.approx(run.result["test/accuracy"], abs=0.05)
    assert found["int8, batch 1"]["bytes"] != found["float32, batch 1"]["bytes"]
    assert sorted(path.name for path in run.path.iterdir()) == before
    assert len(int8.claims({name: case["rounds"] for name, case in found.items()})) == 4
