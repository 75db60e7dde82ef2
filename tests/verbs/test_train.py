"""A run in this process: what it leaves, what it continues, what it starts from, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.runs import SMALL, column, new_run, rows, weights

import lathe.training.train
from lathe.runs import rundir
from lathe.strategies import DDP
from lathe.training.train import make_callbacks, train
from lathe.training.trainer_setup import make_trainer, world_size


def test_zeros_that_training_would_fill_again_are_told(tmp_path: Path) -> None:
    source = new_run(tmp_path, *SMALL, "compression=prune", "compression.receipt=none")
    train(source)
    begin = (*SMALL, "trainer.max_epochs=1", f"ckpt_path={source['paths']['run_dir']}", "compression.receipt=none")
    with pytest.warns(
        UserWarning, match=r"0\.(?:79\d*|8) of the weights are pruned to zero, and this training fills them again"
    ):
        train(new_run(tmp_path, *begin))
    keeps = ("compression=prune", "compression.prune.schedule=one_shot", "compression.prune.start=0")
    cfg = new_run(tmp_path, *begin, *keeps)
    train(cfg)
    before, after = weights(Path(source["paths"]["run_dir"]), "best"), weights(run_of(cfg).path, "best")
    assert all(not bool(after[name][before[name] == 0].any()) for name in before if before[name].dim() > 1)


EARLY = "callbacks.early_stopping"


def run_of(cfg: dict[str, Any]) -> rundir.RunDir:
    return rundir.RunDir(cfg["paths"]["run_dir"])


class Crash(Callback):
    """Ends the run with an exception before a batch is trained."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step:
            raise RuntimeError("crash")


def crashed(cfg: dict[str, Any], step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = lathe.training.train.make_callbacks
    with monkeypatch.context() as patch:
        patch.setattr(lathe.training.train, "make_callbacks", lambda *args: [*real(*args), Crash(step)])
        with pytest.raises(RuntimeError, match="crash"):
            train(cfg)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    """A finished run of two epochs: its configuration and its result."""
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL)
    return cfg, train(cfg)


def test_the_result_is_what_is_on_disk(done: Any) -> None:
    cfg, result = done
    run = run_of(cfg)
    assert run.complete
    assert json.loads((run.path / "result.json").read_text()) == result
    steps = 1300 // 64 * 2  # what does not fill a batch waits for the next epoch
    assert (result["steps"], result["epochs"], result["devices"], result["seed"], result["name"]) == (
        steps,
        2,
        1,
        42,
        "train",
    )
    assert result["parameters"] == 64 * 16 + 16 + 16 * 10 + 10
    assert result["monitor"] == "val/accuracy"
    assert (
        result["objective"] == result["val/accuracy"] == pytest.approx(max(column(run.path, "val/accuracy")), abs=1e-7)
    )
    assert result["best_step"] in {int(row["step"]) for row in rows(run.path) if row.get("val/accuracy")}
    assert 0 < result["seconds"] < 60
    assert result["samples_per_s"] > 0


def test_the_best_checkpoint_was_tested_once(done: Any) -> None:
    cfg, result = done
    tested = [row for row in rows(run_of(cfg).path) if row.get("test/accuracy")]
    assert len(tested) == 1
    assert float(tested[0]["test/accuracy"]) == pytest.approx(result["test/accuracy"], abs=1e-7)


def test_latest_points_to_the_run(done: Any) -> None:
    cfg, _ = done
    assert (Path(cfg["paths"]["log_dir"]) / "latest").resolve() == run_of(cfg).path.resolve()


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ([f"{EARLY}.patience=1", f"{EARLY}.min_delta=0.9"], "stopped by early_stopping"),
        (["trainer.max_steps=30"], "trainer.max_steps=30 reached"),
    ],
)
def test_a_run_says_why_it_ended_and_that_it_keeps_no_checkpoint(
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


def test_metrics_have_a_line_every_few_steps(done: Any) -> None:
    cfg, result = done
    logged = [int(row["step"]) for row in rows(run_of(cfg).path) if row.get("train/loss")]
    assert logged == list(range(5, result["steps"] + 1, 5))


def test_training_again_gives_the_same_bits(done: Any, tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL)
    train(cfg)
    one, other = weights(run_of(done[0]).path), weights(run_of(cfg).path)
    assert all(torch.equal(one[name], other[name]) for name in one)
    seed = new_run(tmp_path, *SMALL, "seed=43")
    train(seed)
    other = weights(run_of(seed).path)
    assert not any(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("loader", ["resident", "workers"])
@pytest.mark.parametrize("step", [3, 15, 20, 21, 33])
def test_a_crashed_run_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loader: str, step: int
) -> None:
    options = (*SMALL, f"data.loader={loader}", "model.net.dropout=0.3", "callbacks.checkpoint.every_n_train_steps=7")
    whole = new_run(tmp_path / "a", *options)
    train(whole)
    cfg = new_run(tmp_path / "b", *options)
    crashed(cfg, step, monkeypatch)
    assert not run_of(cfg).complete
    train(cfg)
    one, other = weights(run_of(whole).path), weights(run_of(cfg).path)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert column(run_of(cfg).path, "train/loss") == column(run_of(whole).path, "train/loss")
    assert column(run_of(cfg).path, "val/loss") == column(run_of(whole).path, "val/loss")


def test_weights_alone_are_taken_from_a_checkpoint(
    done: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[dict[str, torch.Tensor]] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.global_step == trainer.current_epoch == 0
            started.append({name: value.clone() for name, value in pl_module.net.state_dict().items()})

    real = lathe.training.train.make_callbacks
    monkeypatch.setattr(lathe.training.train, "make_callbacks", lambda *args: [*real(*args), Start()])
    source = run_of(done[0])
    for path, name in ((source.path, "best"), (source.last, "last")):
        result = train(new_run(tmp_path, *SMALL, f"ckpt_path={path}", "trainer.max_epochs=1"))
        wanted = weights(source.path, name)
        told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ckpt_path=")]
        assert len(told) == 1
        for words in (
            f"{name}.ckpt: a new run from these weights alone (of step ",
            f"resume={source.path} goes on",
            "ckpt_mode=trainer",
        ):
            assert words in told[0]
        assert started[-1].keys() == wanted.keys()
        assert all(torch.equal(started[-1][key], wanted[key]) for key in wanted)
        assert result["epochs"] == 1


def test_everything_is_taken_from_a_checkpoint(done: Any, tmp_path: Path) -> None:
    source = run_of(done[0])
    cfg = new_run(tmp_path, *SMALL, f"ckpt_path={source.path}", "ckpt_mode=trainer", "trainer.max_epochs=3")
    result = train(cfg)
    assert (result["epochs"], result["steps"]) == (3, done[1]["steps"] // 2 * 3)
    assert not any(
        torch.equal(a, b)
        for a, b in zip(weights(source.path).values(), weights(run_of(cfg).path).values(), strict=True)
    )


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (("ckpt_path=nowhere.ckpt",), r"^ckpt_path=.*nowhere\.ckpt: there is no such file"),
        (("ckpt_path={last}", "model.net.width=8"), r"^ckpt_path=.* does not fit this net: .* there and .* here"),
        (("+trainer.devicess=2",), r"^trainer.*devicess"),
        (("callbacks.checkpoint.mode=maximum",), r"^callbacks\.checkpoint\.mode=maximum: expected"),
        (("precision.name=17-true",), r"^precision\.name='17-true'"),
        (("compile=default", "compile.mode=fast"), r"^compile\.mode=fast: expected"),
        (("trainer.gradient_clip_algorithm=nrom",), r"trainer.*nrom|gradient_clip_algorithm"),
        (("trainer.max_time=soon",), r"soon"),
    ],
)
def test_mistakes_are_told_before_training_begins(
    done: Any, tmp_path: Path, overrides: tuple[str, ...], sentence: str
) -> None:
    cfg = new_run(tmp_path, *SMALL, *(item.format(last=run_of(done[0]).last) for item in overrides))
    with pytest.raises(Exception, match=sentence) as caught:
        train(cfg)
    from lathe.launch.error_reporting import explain_error

    assert explain_error(caught.value) is not None
    assert not run_of(cfg).begun


def test_a_chosen_objective_is_returned(tmp_path: Path) -> None:
    result = train(new_run(tmp_path, *SMALL, "objective=val/loss", "trainer.max_epochs=1"))
    assert result["objective"] == result["val/loss"]


def test_without_a_test_nothing_is_tested(tmp_path: Path) -> None:
    result = train(new_run(tmp_path, *SMALL, "test=false", "trainer.max_epochs=1"))
    assert not [name for name in result if name.startswith("test/")]


def test_without_checkpoints_a_run_still_ends(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.enable_checkpointing=false", "trainer.max_epochs=1")
    result = train(cfg)
    assert result["objective"] is None
    assert result["val/accuracy"] > 0
    assert not (run_of(cfg).path / "checkpoints").exists()


def test_sync_batchnorm_and_ddp_come_with_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert world_size() == 1  # WORLD_SIZE alone may be anybody's
    cfg = new_run(tmp_path, *SMALL)
    assert not isinstance(make_trainer(cfg, tmp_path, []).strategy, DDP)
    for key, value in {
        "LOCAL_WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "TORCHELASTIC_RUN_ID": "x",
        "GROUP_RANK": "0",
    }.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert world_size() == 2
    cfg["trainer"]["devices"] = 2
    trainer = make_trainer(cfg, tmp_path, [])
    assert isinstance(trainer.strategy, DDP)
    assert type(trainer.strategy._layer_sync).__name__ == "SyncBatchNorm"
    cfg["trainer"]["sync_batchnorm"] = False
    assert make_trainer(cfg, tmp_path, []).strategy._layer_sync is None


def test_one_process_takes_no_notice_of_what_slurm_left_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batch script with --ntasks=2 does that calls python without srun."""
    for key in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {"JOB_ID": "5", "JOB_NAME": "x", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    trainer = make_trainer(new_run(tmp_path, *SMALL), tmp_path, [])
    assert (trainer.world_size, trainer.global_rank) == (1, 0)


def test_callbacks_that_are_switched_off_are_left_out(tmp_path: Path) -> None:
    from lathe.runs.build import make_task

    cfg = new_run(tmp_path, *SMALL, "trainer.fast_dev_run=true", "callbacks.nan_guard=null")
    kinds = {type(callback).__name__ for callback in make_callbacks(cfg, make_task(cfg))}
    assert "ExactResume" in kinds
    assert not kinds & {"Checkpoint", "Progress", "NanGuard"}
    assert not [kind for kind in kinds if "Summary" in kind]
    cfg = new_run(tmp_path, "model=mlp")
    kinds = {type(callback).__name__ for callback in make_callbacks(cfg, make_task(cfg))}
    assert kinds == {node["_target_"].rpartition(".")[2] for node in cfg["callbacks"].values()} | {"ExactResume"}
    assert kinds >= {"Checkpoint", "Progress", "NanGuard", "Preemption", "Throughput"}


def test_several_loggers_at_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = new_run(tmp_path, *SMALL, "logger=tensorboard", "trainer.max_epochs=1")
    train(cfg)
    events = EventAccumulator(str(run_of(cfg).path / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    lines = [(int(row["step"]), float(row["train/loss"])) for row in rows(run_of(cfg).path) if row.get("train/loss")]
    assert [step for step, _ in points] == [step for step, _ in lines]
    assert [value for _, value in points] == pytest.approx([value for _, value in lines], rel=1e-6)


@pytest.mark.parametrize(
    ("words", "way"),
    [
        (("trainer.fast_dev_run=2",), "trainer.fast_dev_run=2 leaves callbacks.checkpoint out, "),
        (("callbacks.checkpoint.monitor=val/loss", "trainer.enable_checkpointing=false"), "objective=val/loss names "),
    ],
)
def test_a_metric_whose_callback_is_left_out_is_named(tmp_path: Path, words: tuple[str, ...], way: str) -> None:
    result = train(new_run(tmp_path, *SMALL, *words))
    assert result["objective"] is None
    assert way in result["notes"][0]
    assert train(new_run(tmp_path, *SMALL, *words, "objective=val/loss"))["objective"] > 0
