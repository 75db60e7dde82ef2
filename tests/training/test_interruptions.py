"""Files of earlier runs are kept, damage is noticed, and locks end with their process."""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.commands import in_process
from support.runs import SMALL, column, new_run, rows, weights

import lathe.training.train
from lathe.errors import UserError
from lathe.runs.checkpoints import read_checkpoint
from lathe.runs.rundir import RunDir, point_latest

SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=4", "trainer.log_every_n_steps=2")
Cli = Callable[..., tuple[int, str]]


def trained(folder: Path, *words: str) -> Path:
    cfg = new_run(folder, *SMALL, "test=false", *words)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


def test_a_damaged_block_of_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"state_dict": {"w": torch.arange(4096.0)}, "global_step": 1}, path)
    assert read_checkpoint(path)["global_step"] == 1
    data = torch.arange(4096.0).numpy().tobytes()
    raw = path.read_bytes()
    start = raw.index(data) + len(data) // 2
    path.write_bytes(raw[:start] + bytes(b ^ 1 for b in raw[start : start + 16]) + raw[start + 16 :])
    with pytest.raises(UserError, match=r"last\.ckpt is damaged: its record '.*data/0' has another checksum"):
        read_checkpoint(path)


def test_latest_replaces_only_links_to_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directories = [trained(tmp_path / "logs", *SHORT) for _ in range(2)]
    latest = tmp_path / "logs" / "latest"
    assert latest.resolve() == directories[1]
    for target in (directories[1], tmp_path / "gone"):  # a run, and one that was deleted
        latest.unlink()
        latest.symlink_to(target)
        point_latest(latest.parent, directories[0])
        assert latest.resolve() == directories[0]
    latest.unlink()
    (tmp_path / "deploy").mkdir()
    latest.symlink_to(tmp_path / "deploy")
    capsys.readouterr()
    point_latest(latest.parent, directories[0])
    assert capsys.readouterr().out == f"{latest} is not a link to a run, and stays as it is.\n"
    assert latest.resolve() == tmp_path / "deploy"


def test_a_resume_without_a_checkpoint_starts_again_with_a_message(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = trained(tmp_path / "logs", *SHORT)
    for name in ("result.json", "checkpoints/last.ckpt"):
        (run / name).unlink()
    capfd.readouterr()
    assert in_process("train.py", f"resume={run}") == 0
    message = f"{run} has no checkpoints/last.ckpt to continue from: it starts again at step 0.\n"
    assert capfd.readouterr().out.count(message) == 1


def test_a_forked_process_does_not_hold_the_lock(tmp_path: Path) -> None:
    """Data workers may outlive their run by seconds."""
    run = RunDir(new_run(tmp_path, "model=mlp")["paths"]["run_dir"])
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    with run.locked():
        child.start()
        assert run.busy
    try:
        assert child.is_alive()
        give_up = time.monotonic() + 10  # it may not have begun yet
        while run.busy and time.monotonic() < give_up:
            time.sleep(0.01)
        with run.locked():
            assert run.busy
    finally:
        child.kill()
        child.join()


def test_a_raised_max_steps_continues_with_a_whole_epoch(tmp_path: Path) -> None:
    """1,300 samples in 20 batches of 65: 50 steps end within the third epoch, and the fourth begins with its first."""
    words = ("data.batch_size=65", "trainer.max_epochs=6", "trainer.log_every_n_steps=1")
    cfg = new_run(tmp_path, *SMALL, *words, "test=false", "trainer.max_steps=50")
    assert lathe.training.train.train(cfg)["steps"] == 50
    cfg["trainer"]["max_steps"] = 200
    result = lathe.training.train.train(cfg)
    found = rows(Path(cfg["paths"]["run_dir"]))
    assert [row["step"] for row in found if row["val/loss"]] == ["20", "40", "70", "90", "110"]
    assert (result["steps"], result["epochs"]) == (110, 6)
    assert len(column(Path(cfg["paths"]["run_dir"]), "train/loss")) == 110


def test_optimizer_options_that_ckpt_mode_trainer_replaces_are_warned_about(tmp_path: Path) -> None:
    run = trained(tmp_path / "first", "optimizer=sgd", "optimizer.lr=0.1")
    words = ("optimizer=sgd", f"ckpt_path={run}", "ckpt_mode=trainer", "trainer.max_epochs=3")
    told = r"takes the optimizer as .* has it.*: lr=0\.1 \(here 0\.5\), momentum=0\.9 \(here 0\.5\)\. For this run's"
    with pytest.warns(UserWarning, match=told):
        other = trained(tmp_path / "other", *words, "optimizer.lr=0.5", "optimizer.momentum=0.5")
    same = trained(tmp_path / "same", *words, "optimizer.lr=0.1")
    theirs = weights(same)
    assert all(value.equal(theirs[name]) for name, value in weights(other).items())


STOP = ("callbacks=[default,early_stopping]", "callbacks.early_stopping.stopping_threshold=0.01")


@pytest.mark.filterwarnings("ignore:.*(is not validated|no validation|was not judged)")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("compression=qat", "compression.qat.start=0.75", *STOP),
            r"compression\.qat: training ended at step 20, before rounding began at step 30",
        ),
        (("compression=prune", "trainer.max_epochs=0"), r"no optimizer step was made, so Prune had nothing to do"),
    ],
)
def test_a_component_that_never_acted_is_warned_about(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.warns(UserWarning, match=message):
        trained(tmp_path, "compression.receipt=none", *words)
