"""Search for the largest batch that fits into memory, and the learning rate that follows."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import check, run
from support.runs import QUIET, SMALL

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
def test_memory_bounds_it(tmp_path: Path) -> None:
    """Activations grow with the batch; a process above the limit is ended, and a smaller batch is tried."""
    words = ["model=resnet20", "data=synthetic", "data.source.train_size=20000", *QUIET, "find.memory=0.9"]
    done = check(run(*words, "find.start=64", "find.steps=2", cwd=tmp_path, script="scripts/batch_find.py"))
    result = json.loads((tmp_path / "logs" / "batch_find" / "train" / "batch_find.json").read_text())
    assert result["bound"] == "memory"
    peaks = {item["size"]: item["peak"] for item in result["tries"] if item["fits"]}
    assert max(peaks.values()) <= 0.9e9
    assert peaks[result["batch_size"]] > 0.7e9
    assert all(item["peak"] > 0.9e9 for item in result["tries"] if not item["fits"])
    assert all(item["seconds"] > 0 for item in result["tries"] if item["fits"])
    assert f"The largest that fits is data.batch_size={result['batch_size']}; what bounds it is memory." in done.stdout
    assert not list(tmp_path.rglob("config.yaml"))


@pytest.mark.parametrize(
    ("words", "sentence"), [([], "find.memory: "), (["find.memory=0.01"], "find.start=8: not even this batch fits")]
)
def test_without_room_for_a_batch_nothing_is_left(words: list[str], sentence: str, cli: Cli) -> None:
    code, error = cli(*SMALL, *words, script="scripts/batch_find.py")
    assert (code, error.startswith(f"Error: {sentence}")) == (1, True), error
    assert not list(Path("logs").glob("*/*"))
