"""A stranger's words in files that a spreadsheet opens: shown, and computed nowhere."""

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.hostile_runs import put
from support.reports import REQUEST as USUAL
from support.run_directories import write_run, write_sweep
from support.run_folders import Cli

from lathe.runs.cells import cell, csv_text
from lathe.verbs.report.make import report

REQUEST = {**USUAL, "by": ["model.net._target_", "optimizer.lr"], "formats": ["csv"]}
FORMULAS = [
    "=cmd|' /C calc'!A0",
    "@SUM(1)",
    "\t=1",
    "\r=1+1",
    "+1+1",
    "-1+cmd",
    " =1",
    "\n=1",
    "\uff1d1",
    "x;=cmd|' /C calc'!A0",
    "=\u202e1",
    "+-1",
    "-",
]
FORMULA = re.compile(r"(?:^|;)\s*[=+\-@\uff1d\uff0b\uff0d\uff20]")


def is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def strange_runs(log_dir: Path, formula: str) -> None:
    """Two runs and a failed job, which have `formula` wherever a run directory has words or names of a stranger's."""
    for number in (0, 1):
        path = write_run(log_dir, number, 0.5 - number, seed=-3, **{formula: -0.25, "tags": [formula]})
        config = yaml.safe_load((path / "config.yaml").read_text())
        for key in ("model.net._target_", "data.fold", f"model.net.{formula.replace('.', '')}", "optimizer.lr"):
            config = put(config, key, formula if key != "optimizer.lr" else -0.5 - number)
        config["tags"] = [formula]
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        (path / "overrides.yaml").write_text(yaml.safe_dump([formula, f"+x={formula}"]))
    write_run(log_dir, 2, 0.5)
    write_sweep(log_dir, [{"state": "failed", "overrides": [formula], "sentence": formula}])


@pytest.mark.parametrize("formula", FORMULAS, ids=ascii)
def test_no_cell_of_any_table_is_a_formula(cli: Cli, tmp_path: Path, formula: str) -> None:
    strange_runs(tmp_path / "logs", formula)
    report({**REQUEST, "runs": "logs", "output": "out"})
    columns = ["model.net._target_", "optimizer.lr", "data.fold", "objective"]
    for name, words in (("usual.csv", []), ("asked.csv", [f"columns=[{','.join(columns)}]"])):
        assert cli(*words, f"output={name}", script="scripts/runs.py") == (0, "")
    for path in (*(tmp_path / "out").iterdir(), tmp_path / "usual.csv", tmp_path / "asked.csv"):
        text = path.read_text()
        assert text.replace("\n", "").isprintable()
        cells = [one for row in csv.reader(io.StringIO(text)) for one in row]
        assert [one for one in cells if FORMULA.search(one) and not is_number(one)] == [], path.name
        assert any(formula.strip()[-3:] in one or "\\u202e" in one for one in cells), path.name
    with open(tmp_path / "asked.csv", newline="") as file:
        asked = list(csv.DictReader(file))
    assert [row["optimizer.lr"] for row in asked if row["seed"] == "-3"] == ["-0.5", "-1.5"]
    assert {row["tags"] for row in asked if row["seed"] == "-3"} == {cell(formula)}
    with open(tmp_path / "out" / "groups.csv", newline="") as file:
        assert {row["mean"] for row in csv.DictReader(file)} >= {"0.5", "-0.5"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("-1", "-1"),
        ("+.5e-3", "+.5e-3"),
        (-1.5, "-1.5"),
        (True, "True"),
        (None, ""),
        ("a-b", "a-b"),
        ("5 % of ä", "5 % of ä"),
        ("-inf", "'-inf"),
        ("-1_0", "'-1_0"),
        ("\u0661+", "\u0661+"),
        ({"=": 1}, "{'=': 1}"),
        (["-x"], "['-x']"),
        ("\u202egpj", "\\u202egpj"),
        ("one\ntwo", "one\\ntwo"),
        ("a;-b", "a;'-b"),
        ("'=1", "'=1"),
    ],
    ids=ascii,
)
def test_words_are_shown_and_numbers_stay_numbers(value: Any, shown: str) -> None:
    assert list(csv.reader(io.StringIO(csv_text([shown], [[value, "end"]])))) == [[str(cell(shown))], [shown, "end"]]


def test_results_with_infinite_numbers_are_written_as_numbers(cli: Cli, tmp_path: Path) -> None:
    path = write_run(tmp_path / "logs", 0, 0.5) / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"test/loss": float("-inf")}))
    assert cli("columns=[test/loss]", "output=list.csv", script="scripts/runs.py") == (0, "")
    with open(tmp_path / "list.csv", newline="") as file:
        assert [row["test/loss"] for row in csv.DictReader(file)] == ["-inf"]
