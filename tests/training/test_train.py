"""A run in this process: its result and files, how it resumes, and what it starts from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.runs import SMALL, column, new_run, rows, weights

import lathe.training.train
from lathe.runs.rundir import RunDir
from lathe.training.train import train

EARLY = "callbacks.early_stopping"


def run_of(cfg: dict[str, Any]) -> RunDir:
    return RunDir(cfg["paths"]["run_dir"])


def with_callback(callback: Callback, patch: pytest.MonkeyPatch) -> None:
    """Add a callback to the runs of this process."""
    make = lathe.training.train.make_callbacks
    patch.setattr(lathe.training.train, "make_callbacks", lambda *args: [*make(*args), callback])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finished run of two epochs: its configuration and its result."""
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    return cfg, train(cfg)


def test_the_result_is_in_result_json(done: Any) -> None:
    cfg, result = done
    run = run_of(cfg)
    assert json.loads((run.path / "result.json").read_text()) == result
    assert (result["steps"], result["epochs"]) == (1300 // 64 * 2, 2)  # no batch is partly filled
    assert (result["devices"], result["seed"], result["name"]) == (1, 42, "train")
    assert result["parameters"] == 64 * 16 + 16 + 16 * 10 + 10
    assert result["monitor"] == "val/accuracy"
    best = max(column(run.path, "val/accuracy"))
    assert result["objective"] == result["val/accuracy"] == pytest.approx(best, abs=1e-7)
    assert result["best_step"] in {int(row["step"]) for row in rows(run.path) if row.get("val/accuracy")}
    assert 0 < result["seconds"] < 60
    assert result["samples_per_s"] > 0


def test_metrics_csv_has_every_logged_step_and_one_test(done: Any) -> None:
    cfg, result = done
    lines = rows(run_of(cfg).path)
    assert [int(row["step"]) for row in lines if row.get("train/loss")] == list(range(5, result["steps"] + 1, 5))
    tested = [float(row["test/accuracy"]) for row in lines if row.get("test/accuracy")]
    assert tested == [pytest.approx(result["test/accuracy"], abs=1e-7)]


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ([f"{EARLY}.patience=1", f"{EARLY}.min_delta=0.9"], "stopped by early_stopping"),
        (["trainer.max_steps=30"], "trainer.max_steps=30 reached"),
    ],
)
def test_the_reason_of_an_early_end_and_a_missing_checkpoint_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], end: str
) -> None:
    cfg = new_run(tmp_path, *SMALL, "callbacks=early_stopping", "trainer.max_epochs=8", "test=false", *words)
    with pytest.warns(UserWarning, match=r"^No checkpoint callback.* callbacks=\[default,early_stopping\] keeps one"):
        train(cfg)
    assert f"Run complete: {end} at epoch 2 of 8\n" in capsys.readouterr().out
    assert not (tmp_path / "latest").is_symlink()


@pytest.mark.filterwarnings("error:No checkpoint callback")
def test_a_fast_dev_run_does_not_become_latest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(new_run(tmp_path, *SMALL, "trainer.fast_dev_run=true"))
    assert "Run complete\n" in capsys.readouterr().out
    assert not (tmp_path / "latest").is_symlink()


def test_a_new_run_takes_only_the_weights_of_a_checkpoint(
    done: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, torch.Tensor]] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.global_step == trainer.current_epoch == 0
            started.append({name: value.clone() for name, value in pl_module.net.state_dict().items()})

    with_callback(Start(), monkeypatch)
    source = run_of(done[0])
    for path, name in ((source.path, "best"), (source.last, "last")):
        result = train(new_run(tmp_path, *SMALL, f"ckpt_path={path}", "trainer.max_epochs=1"))
        wanted = weights(source.path, name)
        (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ckpt_path="))
        for words in (f"{name}.ckpt: a new run from these weights", "ckpt_mode=trainer"):
            assert words in line
        assert started[-1].keys() == wanted.keys()
        assert all(torch.equal(started[-1][key], wanted[key]) for key in wanted)
        assert result["epochs"] == 1


def test_ckpt_mode_trainer_takes_everything(done: Any, tmp_path: Path) -> None:
    source = run_of(done[0])
    cfg = new_run(tmp_path, *SMALL, f"ckpt_path={source.path}", "ckpt_mode=trainer", "trainer.max_epochs=3")
    result = train(cfg)
    assert (result["epochs"], result["steps"]) == (3, done[1]["steps"] // 2 * 3)
    pairs = zip(weights(source.path).values(), weights(run_of(cfg).path).values(), strict=True)
    assert not any(torch.equal(before, after) for before, after in pairs)


def test_training_that_fills_pruned_weights_is_warned_about(tmp_path: Path) -> None:
    source = new_run(tmp_path, *SMALL, "compression=prune", "compression.receipt=none")
    train(source)
    begin = (*SMALL, "trainer.max_epochs=1", f"ckpt_path={source['paths']['run_dir']}", "compression.receipt=none")
    with pytest.warns(UserWarning, match=r"0\.(?:79\d*|8) of the weights are pruned to zero"):
        train(new_run(tmp_path, *begin))
    keeps = ("compression=prune", "compression.prune.schedule=one_shot", "compression.prune.start=0")
    cfg = new_run(tmp_path, *begin, *keeps)
    train(cfg)
    before, after = weights(run_of(source).path, "best"), weights(run_of(cfg).path, "best")
    assert all(not bool(after[name][before[name] == 0].any()) for name in before if before[name].dim() > 1)


def test_the_objective_is_chosen_and_the_test_optional(tmp_path: Path) -> None:
    result = train(new_run(tmp_path, *SMALL, "trainer.max_epochs=1", "objective=val/loss", "test=false"))
    assert result["objective"] == result["val/loss"]
    assert not any(name.startswith("test/") for name in result)


def test_a_run_without_checkpoints_has_a_result(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.enable_checkpointing=false", "trainer.max_epochs=1")
    result = train(cfg)
    assert result["objective"] is None
    assert "such as objective=val/" in result["notes"][0]
    assert result["val/accuracy"] > 0
    assert not (run_of(cfg).path / "checkpoints").exists()
