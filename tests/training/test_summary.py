"""The table at the end of a run, and the commands to try next."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.runs import config, new_run

from lathe.config.resolve import differences
from lathe.launch.error_reporting import report_errors
from lathe.runs.rundir import RunDir
from lathe.training.final_evaluation import print_next, print_summary, proposals

TRAINED = {"parameters": 1234567, "seconds": 12.345, "samples_per_s": 43210.9}
RESULT = {"test/accuracy": 0.98765, "test/loss": 0.05, "val/accuracy": 0.5, **TRAINED}


def printed(result: dict[str, Any], cfg: dict[str, Any]) -> list[str]:
    """The lines after the run of `cfg`."""
    run = RunDir(cfg["paths"]["run_dir"])
    run.best.parent.mkdir()
    run.best.touch()
    console = Console(record=True, width=120, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_summary(result, run, console)
        print_next(run, proposals(run, cfg, result), console)
        return console.export_text().splitlines()


def commands(lines: list[str]) -> list[list[str]]:
    """The proposed commands, as a shell reads them."""
    return [shlex.split(line) for line in lines if line.strip().startswith("python ")]


def cells(lines: list[str]) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if line.startswith("│")]
    return {row[0]: row[1] for row in rows}


def test_the_table_has_test_metrics_the_monitor_and_notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = new_run(tmp_path / "logs", "model=mlp")
    best = {"best": "the last weights, no validation ran", "notes": ["objective is null: [why]"]}
    lines = printed({**RESULT, **best, "test/loss": None, "val_f1": 0.25, "monitor": "val_f1"}, cfg)
    assert cells(lines) == {
        "test/accuracy": "0.9877",
        "test/loss": "not finite",
        "val_f1": "0.2500",
        "best": "the last weights, no validation ran",
        "parameters": "1,234,567",
        "samples/s": "43,211",
        "seconds": "12.3",
    }
    assert f"Run directory: {Path(cfg['paths']['run_dir']).relative_to(tmp_path)}" in lines
    assert "objective is null: [why]" in lines


@pytest.mark.parametrize(("compression", "target"), [("qat", "onnx_int8"), ("prune", "onnx"), ("none", None)])
def test_a_compressed_run_can_be_exported_next(compression: str, target: str | None, tmp_path: Path) -> None:
    proposed = commands(printed(RESULT, new_run(tmp_path, "model=mlp", f"compression={compression}")))
    exports = [words[-1] for words in proposed if words[1] == "scripts/export.py"]
    assert exports == ([f"target={target}"] if target else [])


def test_the_next_commands_repeat_the_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = (
        *("data=cifar10", "model=vit_tiny", "callbacks=[default,ema]", "optimizer.lr=0.1", "name='a, b'"),
        *("optimizer=adamw", "optimizer.lr=0.004", "seed=3"),  # the later lr counts
    )
    cfg = new_run(tmp_path / "my logs", *own, "+optimizer.amsgrad=true", "resume=null", "launch.id=null")
    evaluation, slower, seeds, report = commands(printed(RESULT, cfg))
    request = config(*evaluation[2:], name="evaluate")
    assert evaluation[:2] == ["python", "scripts/evaluate.py"]
    assert (tmp_path / request["run"]).samefile(cfg["paths"]["run_dir"])
    assert request["split"] == "val"
    assert slower[:2] == ["python", "train.py"]
    assert differences(cfg, config(*slower[2:]), ("paths", "sweep")) == ["optimizer.lr: 0.004 -> 0.002"]
    assert (seeds[:3], seeds[-1]) == (["python", "train.py", "-m"], "seed=1,2,3")
    assert differences(cfg, config(*seeds[3:-1], "seed=2"), ("paths", "data", "sweep")) == ["seed: 3 -> 2"]
    assert report[1] == "scripts/report.py"
    assert (tmp_path / config(*report[2:], name="report")["runs"]).samefile(Path(cfg["paths"]["run_dir"]).parent)


def test_the_next_commands_have_the_config_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "my own"
    (own / "experiment").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(own), "seed=1"])
    for name, value in {"LATHE_CONFIG_DIR": "", "HYDRA_FULL_ERROR": "0", "LATHE_FULL_ERROR": "0"}.items():
        monkeypatch.setenv(name, value)  # restored afterwards
    report_errors(lambda: None)()
    _, slower, seeds, _ = commands(printed(RESULT, new_run(tmp_path, "model=mlp")))
    assert slower[:4] == ["python", "train.py", "--config-dir", str(own)]
    assert seeds[:5] == ["python", "train.py", "--config-dir", str(own), "-m"]
