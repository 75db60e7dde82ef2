"""scripts/runs.py: all mistakes are reported at once, and no key is ignored."""

from pathlib import Path

import pytest
from support.run_folders import Cli

from lathe.verbs.runs.command import PARTS


def test_several_mistakes_are_told_at_once(logs: Path, cli: Cli) -> None:
    code, error = cli("sort=foo", "where=[seed=1,nope=3]", "columns=[zzz]", script="scripts/runs.py")
    assert code == 1
    assert [line.split(": ")[1] for line in error.splitlines()] == ["where=nope=3", "columns=[zzz]", "sort=foo"]


@pytest.mark.parametrize("words", [(), ("compare=[a,b]",), ("tag=[x]", "runs=x"), ("archive=x",), ("delete=failed",)])
def test_a_key_that_is_not_used_is_refused(logs: Path, cli: Cli, words: tuple[str, ...]) -> None:
    """Every key that applies to some commands, with each of the others."""
    asked = words[0].partition("=")[0] if words else "the list"
    odd = {"where": "[seed=1]", "since": "3d", "sort": "name", "limit": "1", "columns": "[seed]", "points": "3"}
    odd |= {"output": "x.json", "runs": "logs", "yes": "true"}
    assert set(odd) == set(PARTS)
    typed = [key for key, (_, takes) in PARTS.items() if asked not in takes]
    code, error = cli(*words, *(f"{key}={odd[key]}" for key in typed), script="scripts/runs.py")
    lines = error.splitlines()
    assert (code, [line.removeprefix("Error: ").split("=")[0] for line in lines]) == (1, typed)
    assert all(f", and {asked} does not use it: " in line for line in lines)
    assert not Path("x.json").exists()


@pytest.mark.parametrize("name", ["rows.csv", "rows.json"])
def test_an_output_that_is_a_link_is_written_where_it_leads(logs: Path, cli: Cli, name: str) -> None:
    Path(f"kept-{name}").touch()
    Path(name).symlink_to(f"kept-{name}")
    assert cli(f"output={name}", script="scripts/runs.py") == (0, "")
    assert Path(name).is_symlink()
    assert "digits" in Path(f"kept-{name}").read_text()
    Path("lost.csv").symlink_to("nowhere/rows.csv")
    code, error = cli("output=lost.csv", script="scripts/runs.py")
    assert (code, error) == (1, "Error: output=lost.csv: its folder does not exist.\n")
