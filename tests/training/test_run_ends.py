"""Every way in which a run can end: a tested checkpoint, strict JSON in result.json, or a message before training."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.runs import SMALL, column, new_run, rows, weights

from lathe.errors import Stopped, UserError
from lathe.launch.error_reporting import explain_error
from lathe.runs import rundir
from lathe.runs.inference import open_data, open_run_net, score
from lathe.runs.run_discovery import RESULT_TIMES
from lathe.tasks import ClassificationTask
from lathe.training.train import train

LAST, FIRST = "the last weights, no validation ran", "the initial weights, nothing was trained"
SHORT = (*SMALL, "trainer.limit_train_batches=6", "trainer.max_epochs=2", "compression.receipt=none")
# overrides, optimizer steps, `best` if the monitor has not chosen it, True if there is an objective
WAYS = {
    "to its end": ((), 12, None, True),
    "no validation": (("trainer.limit_val_batches=0",), 12, LAST, False),
    "max_steps within the first epoch": (("trainer.max_steps=4",), 4, LAST, False),
    "max_steps=0": (("trainer.max_steps=0",), 0, FIRST, False),
    "an objective of the test": (("objective=test/loss", "trainer.limit_val_batches=0"), 12, LAST, True),
    "stopped early": (
        ("callbacks=[default,early_stopping]", "callbacks.early_stopping.stopping_threshold=0.0"),
        6,
        None,
        True,
    ),
    # what it makes is validated
    "quantized after, never validated": (("compression=ptq_dynamic", "trainer.max_steps=4"), 4, LAST, True),
}


def run_of(cfg: dict[str, Any]) -> rundir.RunDir:
    return rundir.RunDir(cfg["paths"]["run_dir"])


def strict(path: Path) -> dict[str, Any]:
    """Read JSON, which has neither NaN nor Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{path} has {word}")

    return dict(json.loads(path.read_text(), parse_constant=refuse))


@pytest.mark.filterwarnings("ignore:compression. no optimizer step was made")
@pytest.mark.parametrize("way", WAYS)
def test_a_run_ends_with_its_result_and_is_completed_without_training(tmp_path: Path, way: str) -> None:
    overrides, steps, best, objective = WAYS[way]
    cfg = new_run(tmp_path, *SHORT, *overrides)
    result = train(cfg)
    run = run_of(cfg)
    assert strict(run.path / "result.json") == result
    assert (result["steps"], result.get("best")) == (steps, best)
    assert (result["objective"] is not None) == objective
    assert bool(result.get("notes")) == (not objective)  # a line says why
    assert ("test/accuracy" in result) == cfg["test"]
    assert result["best_step"] == torch.load(run.best, weights_only=True)["global_step"]
    assert best is None or result["best_step"] == steps
    open_run_net(run.path)  # the directory is enough
    if steps:
        newest, chosen = weights(run.path), weights(run.path, "best")
        assert (
            result["best_step"] < steps
            or way.startswith("quant")
            or all(torch.equal(newest[k], chosen[k]) for k in newest)
        )

    (run.path / "result.json").unlink()  # killed after training
    logged = [row["step"] for row in rows(run.path)]
    again = train(cfg)
    measured = {name for name in result | again if RESULT_TIMES.fullmatch(name)}
    assert measured >= {"seconds", "epoch_s", "peak_resident_bytes"}
    assert again["epoch_s"] == result["epoch_s"]  # of the steps that an earlier process made
    for name in ("samples_per_s", "step_ms", "data_wait"):
        assert (again[name] is None) == (result[name] is None)
        assert again[name] is None or again[name] == pytest.approx(result[name], rel=0.5, abs=1e-3)
    assert {k: v for k, v in again.items() if k not in measured} == {
        k: v for k, v in result.items() if k not in measured
    }
    assert [row["step"] for row in rows(run.path)] == logged
    assert strict(run.path / "result.json") == again


def test_a_lost_best_checkpoint_is_replaced_by_the_last(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT)
    result = train(cfg)
    (run_of(cfg).path / "result.json").unlink()
    run_of(cfg).best.unlink()
    again = train(cfg)
    assert again["best"] == "the last weights, best.ckpt was not there"
    assert again["best_step"] == result["steps"] == 12


def test_a_run_that_stopped_early_continues_with_a_later_end(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT, *WAYS["stopped early"][0])
    assert train(cfg)["steps"] == 6
    cfg["trainer"]["max_epochs"] = 3
    assert train(cfg)["steps"] == 12  # one more epoch, and the threshold is passed again


def test_lightning_does_not_replace_callbacks_that_are_left_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    on = ("trainer.enable_progress_bar=true", "trainer.enable_model_summary=true")
    off = [f"callbacks.{name}=null" for name in ("checkpoint", "model_summary", "progress_bar")]
    cfg = new_run(tmp_path, *SHORT, *on, *off)
    assert train(cfg)["steps"] == 12
    out = capfd.readouterr().out
    assert list(run_of(cfg).path.rglob("*.ckpt")) == []
    for word in ("epoch 1/2", "1,210 parameters", "Modules in train mode", "Epoch 1/1"):
        assert word not in out


def test_a_validation_of_earlier_weights_is_noted(tmp_path: Path) -> None:
    words = ("callbacks.checkpoint.monitor=null", "trainer.val_check_interval=4")
    result = train(new_run(tmp_path, *SHORT, *words, "objective=test/accuracy"))
    assert "val/accuracy" not in result
    assert result["notes"][0].startswith("The last validation was at step 10 of 12, of other weights than the last")


def test_metrics_that_are_not_finite_are_null_with_a_note(tmp_path: Path) -> None:
    cfg = new_run(
        tmp_path, *SHORT, "optimizer.lr=1e30", "callbacks.nan_guard=null", "callbacks.checkpoint.monitor=val/loss"
    )
    result = train(cfg)
    assert strict(run_of(cfg).path / "result.json") == result
    assert result["objective"] is result["test/loss"] is result["val/loss"] is None
    assert result["notes"] == [
        "objective is null: there is no val/loss, it is not finite; a sweeper that optimises gets no number",
        "Not finite, and null in result.json: test/loss, val/loss.",
    ]
    with pytest.raises(
        UserError, match=r"best\.ckpt holds weights that are not finite, .* first: take another checkpoint"
    ):
        open_run_net(run_of(cfg).path)


@contextmanager
def default_signal() -> Iterator[None]:
    """Restore the default handler, which torch's elastic agent replaces in other tests."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_signal_during_the_test_stops_a_run_that_is_then_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = train(new_run(tmp_path / "a", *SHORT))
    cfg = new_run(tmp_path / "b", *SHORT)
    real = ClassificationTask.test_step
    with monkeypatch.context() as patch, default_signal():
        patch.setattr(
            ClassificationTask, "test_step", lambda *args: (os.kill(os.getpid(), signal.SIGTERM), real(*args))[1]
        )
        with pytest.raises(Stopped, match="SIGTERM"):
            train(cfg)
    assert not run_of(cfg).complete
    result = train(cfg)
    assert (result["steps"], result["test/loss"], result["objective"]) == (
        whole["steps"],
        whole["test/loss"],
        whole["objective"],
    )


def train_on_two(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    return train(cfg)


@pytest.mark.slow
def test_a_run_on_two_ranks_is_completed_without_training(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT, "trainer.devices=2", "strategy=fsdp", "trainer.max_steps=4")
    result, _ = on_ranks(train_on_two, cfg)
    assert (result["best"], result["objective"], result["devices"]) == (LAST, None, 2)
    task, _ = open_run_net(run_of(cfg).path)
    tested = score(task, task.net, open_data(cfg).eval_loader("test"))
    assert result["test/loss"] == pytest.approx(tested["loss"], rel=1e-5)
    (run_of(cfg).path / "result.json").unlink()
    again, _ = on_ranks(train_on_two, cfg)
    assert (again["test/loss"], again["steps"], again["best"]) == (result["test/loss"], result["steps"], LAST)


def test_weights_of_ckpt_path_are_tested_without_training(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT)
    trained = train(cfg)
    result = train(new_run(tmp_path, *SHORT, "trainer.max_epochs=0", f"ckpt_path={cfg['paths']['run_dir']}"))
    assert result["test/loss"] == trained["test/loss"]
    assert (result["steps"], result["best"]) == (0, "the weights of ckpt_path, nothing was trained")


STOP = "callbacks=[default,early_stopping]"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("objective=val/acc",), r"^objective=val/acc: .*; did you mean val/accuracy\?"),
        (("objective=test/accuracy", "test=false"), r"^objective=test/accuracy needs the test"),
        (("callbacks.checkpoint.monitor=test/loss",), r"^callbacks\.checkpoint\.monitor=test/loss: the test split"),
        ((STOP, "trainer.limit_val_batches=0"), r"^callbacks\.early_stopping\.monitor=val/accuracy is looked at after"),
        (("trainer.limit_train_batches=0",), r"cannot plan a run of .* steps: .*trainer\.limit_train_batches above 0"),
        (("model=resnet20", "model.net.num_classes=7"), r"^data\.num_classes=10, but the net returns 7 logits"),
    ],
)
def test_a_mistake_is_reported_before_training(tmp_path: Path, overrides: tuple[str, ...], message: str) -> None:
    own_net = any(word.startswith("model=") for word in overrides)
    cfg = new_run(tmp_path, *(word for word in SHORT if not (own_net and "model.net" in word)), *overrides)
    with pytest.raises(Exception, match=message) as caught:
        train(cfg)
    assert explain_error(caught.value) is not None
    assert not run_of(cfg).begun


def test_a_checkpoint_of_another_net_names_the_first_weight(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT, "trainer.max_epochs=1")
    train(cfg)
    other = new_run(tmp_path, *SHORT, f"ckpt_path={run_of(cfg).last}", "model.net.width=8")
    with pytest.raises(UserError, match=r"^ckpt_path=.* does not fit this net: \S+ is \[16, .* there and \[8, .* here"):
        train(other)
    cfg["trainer"]["max_epochs"] = 2
    cfg["model"]["net"]["width"] = 32
    with pytest.raises(UserError, match=r"last\.ckpt does not fit this run: .*size mismatch for \S+: .*\[16, .*\[32, "):
        train(cfg)


def test_the_best_epoch_may_be_that_of_the_least_training_loss(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SHORT, "callbacks.checkpoint.monitor=train/loss", "optimizer.lr=0.3")
    result = train(cfg)
    losses = column(run_of(cfg).path, "train/loss_epoch")
    assert result["objective"] == pytest.approx(min(losses), rel=1e-6)
    assert result["best_step"] == 6 * (losses.index(min(losses)) + 1)
