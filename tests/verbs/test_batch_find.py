"""Search for the largest batch that fits into memory, and the learning rate that follows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import check, run
from support.runs import SMALL

from lathe.verbs.batch_find import search

Cli = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    ("largest", "start", "most", "expected"),
    [
        (1000, 8, 2**20, [8, 16, 32, 64, 128, 256, 512, 1024, 768, 896, 960, 992]),
        (64, 8, 64, [8, 16, 32, 64]),
        (100, 8, 80, [8, 16, 32, 64, 80]),
        (3, 1, 2**20, [1, 2, 4, 3]),
        (7, 8, 2**20, [8]),
    ],
)
def test_sizes_double_and_then_halve_what_is_left(largest: int, start: int, most: int, expected: list[int]) -> None:
    tries = search(lambda size: {"fits": size <= largest}, start, most)
    assert [one["size"] for one in tries] == expected
    fit = [one["size"] for one in tries if one["fits"]]
    assert not fit or largest - max(fit) <= max(1, largest // 16) or max(fit) == most


@pytest.mark.slow
def test_data_bound_it_and_no_run_is_left(tmp_path: Path) -> None:
    """In real processes, with 1,300 training images."""
    words = ["find.memory=16", "find.start=700", "trainer.max_epochs=1"]
    done = check(run(*SMALL, *words, cwd=tmp_path, script="scripts/batch_find.py"))
    told = json.loads((tmp_path / "logs" / "batch_find" / "train" / "batch_find.json").read_text())
    assert [(one["size"], one["fits"]) for one in told["tries"]] == [
        (700, True),
        (1400, False),
        (1050, True),
        (1225, True),
        (1312, False),
        (1268, True),
    ]
    assert (told["batch_size"], told["bound"]) == (1268, "the 1300 training samples")
    assert told["lr"] == pytest.approx(0.1 * 1268 / 64, rel=1e-2)
    assert all(one["seconds"] > 0 and one["peak"] > 10**8 for one in told["tries"] if one["fits"])
    assert "The largest that fits is data.batch_size=1268; what bounds it is the 1300 training samples." in done.stdout
    assert not list(tmp_path.rglob("config.yaml"))


@pytest.mark.slow
def test_memory_bounds_it(tmp_path: Path) -> None:
    """Activations grow with the batch; a process above the limit is ended, and a smaller batch is tried."""
    words = ["model=resnet20", "data=synthetic", "data.source.train_size=20000", "trainer.accelerator=cpu"]
    words += ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "find.memory=0.9"]
    check(run(*words, "find.start=16", "find.steps=2", cwd=tmp_path, script="scripts/batch_find.py"))
    told = json.loads((tmp_path / "logs" / "batch_find" / "train" / "batch_find.json").read_text())
    assert told["bound"] == "memory"
    peaks = {one["size"]: one["peak"] for one in told["tries"] if one["fits"]}
    assert max(peaks.values()) <= 0.9e9
    assert peaks[told["batch_size"]] > 0.7e9
    assert all(one["peak"] > 0.9e9 for one in told["tries"] if not one["fits"])


@pytest.mark.parametrize(
    ("words", "sentence"), [([], "find.memory: "), (["find.memory=0.01"], "find.start=8: not even this batch fits")]
)
def test_without_room_for_a_batch_nothing_is_left(words: list[str], sentence: str, cli: Cli) -> None:
    code, error = cli(*SMALL, *words, script="scripts/batch_find.py")
    assert (code, error.startswith(f"Error: {sentence}")) == (1, True), error
    assert not list(Path("logs").glob("*/*"))
