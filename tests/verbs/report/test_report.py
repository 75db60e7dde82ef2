"""scripts/report.py from the command line: output, files and refusals."""

import csv
import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from support.commands import in_process
from support.reports import REQUEST
from support.run_directories import write_run
from support.runs import ROOT, SMALL, new_run

import lathe
from lathe.training.train import train
from lathe.verbs.report import _folder as report_folder
from lathe.verbs.report.assemble import assemble
from lathe.verbs.report.tables import latex, markdown, show

Cli = Callable[..., tuple[int, str]]
TEXTS = "formats=[markdown,csv,latex]"


def two_widths(folder: Path) -> None:
    """Three seeds of two widths, and one run that did not finish."""
    for at, value in enumerate((0.80, 0.82, 0.84, 0.90, 0.91, 0.95)):
        write_run(folder, at, value, [f"model.net.width={4 + at // 3 * 4}"], 1 + at % 3)
    write_run(folder, 9, None, ["model.net.width=8"], 4)


def lines(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_command_prints_tables_and_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    two_widths(tmp_path / "logs")
    assert in_process("scripts/report.py", "runs=logs/train", "baseline=width=4") == 0
    printed = capfd.readouterr().out
    assert "7 runs (6 complete, 1 unfinished) in 2 groups over seeds and folds; intervals of 95 %" in printed
    # 0.90, 0.91, 0.95: mean 0.92, squares 4 + 1 + 9 = 14, std sqrt(7) / 100; t with 2 degrees of freedom is 4.302653
    assert re.search(r"^ *8 +3 +0\.9200 ± 0\.0265 +\[0\.8543, 0\.9857\] +0\.9500 ", printed, re.MULTILINE)
    # Differences 0.10, 0.09, 0.11: mean 0.1, error 0.01 / sqrt(3), t = 17.32 with 2 degrees of freedom, p = 1 - t /
    # sqrt(2 + t^2)
    assert re.search(r" \+0\.1000 +\[0\.0752, 0\.1248\] +0\.0033 ", printed)
    assert "Not in the tables: unfinished: train/2026-11-23_00-00-09_a1b2c3" in printed
    assert re.search(r"width=8:  python train\.py -m model=mlp .* model\.net\.width=8 seed=1,2,3\n", printed)
    first, second = lines(tmp_path / "logs/train/report/groups.csv")
    columns = ("metric", "better", "model.net.width", "n", "mean", "difference", "pairs")
    assert [first[name] for name in columns] == ["test/accuracy", "max", "4", "3", "0.82", "", ""]
    assert float(second["difference"]) == pytest.approx(0.1)
    assert float(second["p"]) == pytest.approx(0.0033, abs=5e-5)
    assert second["command"].endswith(" seed=1,2,3")
    runs = lines(tmp_path / "logs/train/report/runs.csv")
    assert [row["state"] for row in runs] == ["complete"] * 6 + ["unfinished"]
    assert (runs[0]["test/accuracy"], runs[0]["group"]) == ("0.8", "model.net.width=4")
    names = ["groups.csv", "report.html", "report.md", "report.tex", "runs.csv"]
    assert sorted(path.name for path in Path("logs/train/report").iterdir()) == names
    assert "<title>logs/train" in Path("logs/train/report/report.html").read_text()
    # Again, with the report in the folder: it is not taken for a run.
    assert len(assemble({"runs": str(tmp_path / "logs" / "train"), **REQUEST}).runs) == 7


def test_the_words_of_a_row_make_its_runs_again(cli: Cli, tmp_path: Path) -> None:
    """Real runs; then the command of a row, copied as printed."""
    short = [*SMALL, "trainer.max_epochs=1", "trainer.limit_train_batches=5", "callbacks=none"]
    for seed in (1, 2):
        train(new_run(tmp_path / "logs", *short, "model.net.width=8", f"seed={seed}"))
    code, errors = cli("runs=logs/train", "metric=[test/accuracy,test/loss]", TEXTS, script="scripts/report.py")
    assert (code, errors) == (0, "")
    before = [json.loads(path.read_text()) for path in (tmp_path / "logs" / "train").glob("*/result.json")]
    rows = lines(tmp_path / "logs/train/report/groups.csv")
    assert [(row["metric"], row["n"]) for row in rows] == [("test/accuracy", "2"), ("test/loss", "2")]
    for row, best in zip(rows, (max, min), strict=True):
        own = [told[row["metric"]] for told in before]
        assert float(row["mean"]) == pytest.approx(sum(own) / 2)
        assert float(row["best"]) == best(own)
        assert float(row["parameters"]) == 610
    command = rows[1]["command"].split()
    assert command[:3] == ["python", "train.py", "-m"]
    code, errors = cli(*command[2:], "name=again")
    assert code == 0, errors
    again = [json.loads(path.read_text()) for path in (tmp_path / "logs" / "again").glob("*/result.json")]
    assert sorted(told["test/loss"] for told in again) == sorted(told["test/loss"] for told in before)


def test_markdown_and_latex_survive_what_strangers_call_things(tmp_path: Path) -> None:
    """A data folder named with the special characters of both languages, and a terminal's escape sequence."""
    for at, folder in enumerate(("plain", "a_b|c&d%$#{}~^<script>`x`\\input{x}\x1b[31m\nnext")):
        path = write_run(tmp_path, at, 0.8)
        words = json.dumps(f"data.source.folder={folder}")
        (path / "overrides.yaml").write_text(f"- {words}\n")
        text = (path / "config.yaml").read_text()
        (path / "config.yaml").write_text(text.replace("  source:\n", f"  source:\n    folder: {json.dumps(folder)}\n"))
    told = assemble({"runs": str(tmp_path), **REQUEST})
    assert told.factors == ["data.source.folder"]
    page, tex = markdown(told), latex(told)
    console = Console(file=io.StringIO(), width=200)
    show(told, console)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    for text in (page, tex, printed):
        assert "\x1b" not in text
        assert "\nnext" not in text
    (row,) = [line for line in page.splitlines() if line.startswith("| ") and "script" in line]
    assert len(re.findall(r"(?<!\\)\|", row)) == page.count("| ---") + 1
    assert "\\<script\\>" in row
    body = [line for line in tex.splitlines() if "script" in line and not line.lstrip().startswith("%")]
    assert len(body) == 1
    assert r"a\_b|c\&d\%\$\#\{\}\textasciitilde{}\textasciicircum{}\textless{}script\textgreater{}" in body[0]
    assert r"\textbackslash{}input\{x\}" in body[0]


def test_a_mistake_costs_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path) -> None:
    two_widths(tmp_path / "logs")
    before = sorted(tmp_path.rglob("*"))
    for word, sentence in {
        "metric=test/acc": "did you mean test/accuracy?",
        "output=logs/train/2026-11-23_00-00-00_a1b2c3/x": "lies in the run directory ",
    }.items():
        code, errors = cli("runs=logs/train", word, TEXTS, script="scripts/report.py")
        assert (code, errors.count("\n"), sentence in errors) == (1, 1, True)
        assert sorted(tmp_path.rglob("*")) == before


def test_without_a_common_folder_a_report_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert report_folder(None, [str(tmp_path / "a"), str(tmp_path / "b")]) == Path("report")
    (tmp_path / "here" / "logs" / "nets").mkdir(parents=True)
    assert report_folder(None, ["logs/nets"]) == tmp_path / "here" / "logs" / "nets" / "report"


def test_runs_are_rows_of_their_metrics_and_of_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_widths(tmp_path)
    found = lathe.runs_frame(str(tmp_path))
    rows = found.to_dict("records") if hasattr(found, "to_dict") else found
    assert [rows[2][name] for name in ("model.net.width", "seed", "test/accuracy")] == [4, 3, 0.84]
    assert [row["state"] for row in rows] == ["complete"] * 6 + ["unfinished"]
    frames = SimpleNamespace(DataFrame=lambda rows: (len(rows), "a frame"), __spec__=object())
    monkeypatch.setitem(sys.modules, "pandas", frames)  # type: ignore[arg-type]  # a stand-in
    assert lathe.runs_frame(str(tmp_path)) == (7, "a frame")


def test_reports_and_lists_import_no_torch() -> None:
    words = "import sys, lathe.verbs.report as r, lathe.verbs.runs.command; r.report"
    words += "; late = {'torch', 'lightning', 'scipy', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{words}; assert not late, late"], cwd=ROOT, check=True)
