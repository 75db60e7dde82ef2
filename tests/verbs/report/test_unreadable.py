"""A run that can't be read is told, also where no other is there."""

from collections.abc import Callable
from pathlib import Path

from support.run_directories import write_run

Cli = Callable[..., tuple[int, str]]


def test_a_run_that_cant_be_read_is_told_where_it_is_the_only_one(cli: Cli, tmp_path: Path) -> None:
    made = write_run(tmp_path / "logs", 0, 0.8, ["seed=1"], 1)
    (made / "config.yaml").write_text("")
    code, errors = cli("runs=logs", "formats=[markdown,csv,latex]", script="scripts/report.py")
    assert (code, errors.count("\n")) == (1, 1)
    assert errors.startswith("Error: runs: the only run has no metric: ")
    assert "config.yaml can't be read as a configuration" in errors
