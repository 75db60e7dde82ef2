"""The table at the end of a run."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.runs import config, new_run

from lathe.config.composed import differences
from lathe.launch.error_reporting import report_errors
from lathe.runs.rundir import RunDir, create
from lathe.training.summary import print_next, print_summary, proposals

TRAINED = {"parameters": 1234567, "seconds": 12.345, "samples_per_s": 43210.9}
RESULT = {"test/accuracy": 0.98765, "test/loss": 0.05, "val/accuracy": 0.5, **TRAINED}


def shown(result: dict[str, Any], cfg: dict[str, Any], best: bool = True) -> list[str]:
    """What is printed after the run of `cfg`, which kept its best checkpoint or not."""
    run = RunDir(cfg["paths"]["run_dir"])
    if best:
        run.best.parent.mkdir()
        run.best.touch()
    console = Console(record=True, width=120, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_summary(result, run, console)
        print_next(run, proposals(run, cfg), console)
        return console.export_text().splitlines()


def commands(lines: list[str]) -> list[list[str]]:
    """The proposed commands, as a shell reads them."""
    return [shlex.split(line) for line in lines if line.strip().startswith("python ")]


def cells(lines: list[str]) -> dict[str, str]:
    rows = [[cell.strip() for cell in line.strip("│ ").split("│")] for line in lines if line.startswith("│")]
    return {row[0]: row[1] for row in rows}


def test_it_holds_test_figures_and_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = new_run(tmp_path / "logs", "model=mlp")
    lines = shown(RESULT, cfg)
    assert cells(lines) == {
        "test/accuracy": "0.9877",
        "test/loss": "0.0500",
        "parameters": "1,234,567",
        "samples/s": "43,211",
        "seconds": "12.3",
    }
    assert f"Run directory: {Path(cfg['paths']['run_dir']).relative_to(tmp_path)}" in lines


def test_it_says_what_the_run_took(tmp_path: Path) -> None:
    costs = {"epoch_s": 12.345, "peak_gpu_bytes": 3 * 2**30, "peak_resident_bytes": 2**29, "energy_gpu_j": 9000.0}
    ranks = {"rank_ms_min": 10.04, "rank_ms_max": 31.0, "slowest_rank": "node3:5", "energy_cpu_j": None}
    table = cells(shown(RESULT | costs | ranks, new_run(tmp_path, "model=mlp")))
    assert {name: table[name] for name in list(table)[4:-1]} == {
        "seconds per epoch (median)": "12.35",
        "peak memory, GPU": "3.00 GiB",
        "peak memory, resident": "0.50 GiB",
        "own ms of a process": "10.0 to 31.0, slowest node3:5",
        "energy, GPU": "2.5 Wh",
    }


@pytest.mark.parametrize(("compression", "target"), [("qat", "onnx_int8"), ("prune", "onnx"), ("none", None)])
def test_a_compressed_run_may_be_exported_next(compression: str, target: str | None, tmp_path: Path) -> None:
    proposed = commands(shown(RESULT, new_run(tmp_path, "model=mlp", f"compression={compression}")))
    exports = [words[-1] for words in proposed if words[1] == "scripts/export.py"]
    assert exports == ([f"target={target}"] if target else [])


@pytest.mark.parametrize("monitor", ["val/accuracy", "val_f1", "f1"])
def test_what_best_was_chosen_by_is_shown(monitor: str, tmp_path: Path) -> None:
    result = {"test/accuracy": 0.9, "test/loss": 0.1, monitor: 0.25, "val/other": 0.5, "monitor": monitor, **TRAINED}
    table = cells(shown(result, new_run(tmp_path, "model=mlp")))
    assert table[monitor] == "0.2500"
    assert "val/other" not in table


def test_validation_stands_in_where_nothing_was_tested(tmp_path: Path) -> None:
    table = cells(shown({"val/accuracy": 0.5, "parameters": 1, "seconds": 0.0}, new_run(tmp_path, "model=mlp")))
    assert list(table) == ["val/accuracy", "parameters", "seconds"]
    assert table["val/accuracy"] == "0.5000"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    result = {
        **RESULT,
        "test/loss": None,
        "best": "the last weights, no validation ran",
        "notes": ["objective is null: [why]"],
    }
    lines = shown(result, new_run(tmp_path, "model=mlp"))
    assert cells(lines)["test/loss"] == "not finite"
    assert cells(lines)["best"] == "the last weights, no validation ran"
    assert "objective is null: [why]" in lines


def test_the_next_commands_are_about_this_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each composes, and differs from the run in what it says alone."""
    monkeypatch.chdir(tmp_path)
    own = (
        "data=cifar10",
        "model=vit_tiny",
        "callbacks=[default,ema]",
        "optimizer.lr=0.1",  # typed again below, which counts
        "name='a, b'",
        "optimizer=adamw",
        "optimizer.lr=0.004",
        "seed=3",
    )
    cfg = new_run(tmp_path / "my logs", *own, "+optimizer.amsgrad=true", "resume=null", "launch.id=null")
    evaluation, slower, seeds, report = commands(shown(RESULT, cfg))
    assert evaluation[:2] == ["python", "scripts/evaluate.py"]
    request = config(*evaluation[2:], name="evaluate")
    assert (tmp_path / request["run"]).samefile(cfg["paths"]["run_dir"])
    assert request["split"] == "val"
    assert slower[:2] == ["python", "train.py"]
    assert not {word.split("=")[0] for word in slower[2:]} & {"resume", "launch.id"}
    assert differences(cfg, config(*slower[2:]), ("paths", "sweep")) == ["optimizer.lr: 0.004 -> 0.002"]
    assert seeds[:3] == ["python", "train.py", "-m"]
    assert seeds[-1] == "seed=1,2,3"
    assert [word for word in seeds if word.startswith("optimizer.lr")] == ["optimizer.lr=0.004"]
    assert differences(cfg, config(*seeds[3:-1], "seed=2"), ("paths", "data", "sweep")) == ["seed: 3 -> 2"]
    assert report[1] == "scripts/report.py"
    assert (tmp_path / config(*report[2:], name="report")["runs"]).samefile(Path(cfg["paths"]["run_dir"]).parent)


def test_pages_and_files_of_loggers_have_the_command_that_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = new_run(tmp_path / "logs", "model=mlp")
    run = Path(cfg["paths"]["run_dir"])
    at = run.relative_to(tmp_path)
    files = ("samples/val.html", "tensorboard/events.out.tfevents.1", "wandb/offline-run-1-a/run-a.wandb")
    for name in files:
        (run / name).parent.mkdir(parents=True)
        (run / name).touch()
    lines = shown(RESULT, cfg)
    assert f"Samples page: {at}/samples/val.html" in lines
    assert lines[-2:] == [f"  tensorboard --logdir {at}", f"  wandb sync {at}/wandb/offline-run-1-a"]


def test_the_next_commands_have_the_folder_of_further_choices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "my own"
    (own / "experiment").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", ["train.py", "--config-dir", str(own), "seed=1"])
    for name, value in {"LATHE_CONFIG_DIR": "", "HYDRA_FULL_ERROR": "0", "LATHE_FULL_ERROR": "0"}.items():
        monkeypatch.setenv(name, value)  # and is put back
    report_errors(lambda: None)()
    _, slower, seeds, _ = commands(shown(RESULT, new_run(tmp_path, "model=mlp")))
    assert slower[:4] == ["python", "train.py", "--config-dir", str(own)]
    assert seeds[:5] == ["python", "train.py", "--config-dir", str(own), "-m"]


def test_the_next_commands_start_where_this_run_started(tmp_path: Path) -> None:
    """logs/latest is another run by now."""
    start = tmp_path / "start"
    start.mkdir()
    words = ["model=mlp", "ckpt_path=logs/latest"]
    cfg = config(*words, f"paths.log_dir={tmp_path}")
    cfg["ckpt_path"] = str(start)
    create(tmp_path, cfg, words)
    assert all(f"ckpt_path={start}" in command for command in commands(shown(RESULT, cfg))[1:3])


def test_without_a_checkpoint_nothing_is_evaluated(tmp_path: Path) -> None:
    found = commands(shown(RESULT, new_run(tmp_path, "model=mlp"), best=False))
    assert [command[1] for command in found] == ["train.py", "train.py", "scripts/report.py"]


def test_a_metric_of_several_loaders_stands_once(tmp_path: Path) -> None:
    names = ("test_loss/dataloader_idx_0", "test_loss/dataloader_idx_1", "own/figure")
    lines = shown(dict.fromkeys(names, 0.5) | {"val_loss/dataloader_idx_0": 0.25} | TRAINED, new_run(tmp_path))
    told = [line.strip("│ ").split("│")[0].strip() for line in lines if line.startswith("│")]
    assert told[:4] == [*names, "parameters"]
