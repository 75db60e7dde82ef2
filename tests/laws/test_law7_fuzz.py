"""Law 7 by chance: command lines that are wrong by type, range, choice, combination, encoding and structure, over every
key there is.

Each ends in one sentence, before a directory or a training step; what is accepted changes the configuration and is what
the schema says that the key takes. `LATHE_FUZZ_SEED=clock` draws others each time, `LATHE_FUZZ_SEED=<the printed
number>` the same ones again.
"""

from pathlib import Path

import pytest
from support.fuzz_draws import MLP, QUICK, draws, seed
from support.fuzz_runs import Warm, fault
from support.runs import SMALL, new_run

import lathe.training.train


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run for the other verbs."""
    cfg = new_run(tmp_path_factory.mktemp("trained") / "logs", *SMALL)
    lathe.training.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.fixture
def warm(tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Warm:
    return Warm(tmp_path, trained, monkeypatch, capfd)


def faults(warm: Warm, seed: int, count: int, groups: int | None = None) -> list[str]:
    """A line for each command line whose answer is wrong."""
    found = []
    for draw in draws(seed, count, groups):
        wrong = fault(draw, warm)
        if wrong is not None:
            found.append(f"{draw}\n    {wrong}")
    return found


# Each was accepted without a meaning, ended in a traceback or left a directory: the key that the sentence has to begin
# with.
NAMED = {
    "trainer.deterministic=maybe": "trainer.deterministic=maybe: expected true or false, warn or null",
    "optimizer=adamw +optimizer.amsgrad=maybe": "optimizer.amsgrad=maybe: expected true or false",
    "optimizer.momentum=1.5": "optimizer.momentum=1.5: expected a number from 0 and below 1",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val=-1: expected a number from 0 or null",
    "trainer.min_epochs=2": "trainer.min_epochs=2 is above trainer.max_epochs=1",
    "trainer.max_steps=5 trainer.min_steps=6": "trainer.min_steps=6 is above trainer.max_steps=5",
    "callbacks=[default,ema] callbacks.ema.start_step=1000": (
        "callbacks.ema.start_step=1000 is above the run's 20 optimizer steps"
    ),
    "callbacks=[default,early_stopping] callbacks.early_stopping.patience=-1": (
        "callbacks.early_stopping.patience=-1: expected"
    ),
    "ckpt_mode=trainer": "ckpt_mode=trainer says what is taken from ckpt_path, which is null",
    "trainer.max_time=5": "trainer.max_time=5: expected a time limit as DD:HH:MM:SS",
    "trainer.val_check_interval=0": "trainer.val_check_interval=0: expected a whole number from 1",
    "trainer.val_check_interval=10000": "Lightning refuses this run: trainer.val_check_interval (10000) must be",
    "trainer.overfit_batches=0.0001": (
        "Lightning refuses this run: You requested to check 0.0001 of the `train_dataloader` but 0.0001 * 20 < 1. "
        "Please increase the trainer.overfit_batches argument"
    ),
    "trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch=0: expected a whole number from 1",
    "trainer.benchmark=yess": "trainer.benchmark=yess: expected true or false",
    "optimizer=adamw optimizer.betas=[0.9]": "optimizer.betas=[0.9]: expected a list of 2 items",
    "data.source.split_seed=-1": "data.source.split_seed=-1: expected a whole number from 0",
    "callbacks.lr_monitor.logging_interval=hourly": (
        "callbacks.lr_monitor.logging_interval=hourly: expected step, epoch or null"
    ),
    "callbacks=[default,early_stopping] callbacks.early_stopping.mode=up": (
        "callbacks.early_stopping.mode=up: expected auto, min or max"
    ),
    "callbacks=[default,early_stopping] callbacks.early_stopping.stopping_threshold=abc": (
        "callbacks.early_stopping.stopping_threshold=abc"
    ),
    "callbacks.model_summary.max_depth=-5 trainer.enable_model_summary=true": (
        "callbacks.model_summary.max_depth=-5: expected"
    ),
    "trainer.max_epochs=-2": "trainer.max_epochs=-2: expected a whole number from -1 or null",
    "trainer.limit_train_batches=1.5": (
        "trainer.limit_train_batches=1.5: expected a whole number from 0, a number from 0 to 1"
    ),
    "trainer.fast_dev_run=-1": "trainer.fast_dev_run=-1: expected true or false or a whole number from 0",
    "trainer.profiler=nosuch": "trainer.profiler=nosuch: expected simple, advanced, pytorch or null",
    "trainer.gradient_clip_algorithm=norn": (
        "trainer.gradient_clip_algorithm=norn: expected norm, value or null, got a word; did you"
    ),
    "callbacks=[default,ema] strategy=pipeline trainer.devices=2": (
        "callbacks.ema can't average a net that strategy Pipeline cuts"
    ),
    "data.num_workers=100000": "data.num_workers=100000 ",
    "trainer.devices=[0,0]": "trainer.devices=[0, 0] names a device twice",
    "+foo=1": "foo: unknown key, and nothing reads it",
    "+callbacks.ema.decay=0.9": "callbacks.ema sets options of a callback that the run does not have",
}


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=[pytest.mark.slow] * (": expected" in NAMED[line] and "deterministic" not in line))
        for line in NAMED
    ],
)
def test_what_was_found_before(warm: Warm, line: str) -> None:
    found = warm("train.py", *QUICK, *MLP, *line.split())
    assert (found.code, found.left) == (1, [])
    (sentence,) = [text for text in found.errors.splitlines() if text.strip()]
    assert sentence.startswith(f"Error: {NAMED[line]}")


def test_a_directory_goes_with_whatever_ends_a_run_before_its_first_step(
    warm: Warm, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(cfg: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lathe.training.train, "make_loggers", lambda *_: 1 / 0)
    found = warm("train.py", *QUICK, *MLP)
    assert (found.code, found.left) == (1, [])
    assert "ZeroDivisionError" in found.errors
    monkeypatch.setattr(lathe.training.train, "train", interrupted)
    found = warm("train.py", *QUICK, *MLP)
    assert (found.code, found.left) == (130, [])
    assert list(warm.folder.rglob("config.yaml")) == []


@pytest.mark.parametrize("script", ["scripts/serve.py", "scripts/predict.py"])
def test_what_a_script_fills_in_is_not_typed(warm: Warm, script: str) -> None:
    more = ("input=x", "output=y") if "predict" in script else ()
    found = warm(script, "run=RUN", *more, "export=onnx")
    assert (found.code, found.errors) == (1, "Error: export=onnx is set by target. Use target=onnx.\n")


@pytest.mark.slow
def test_a_second_command_has_a_database_of_its_own(warm: Warm) -> None:
    for _ in range(2):
        found = warm("train.py", *QUICK, *MLP, "logger=mlflow")
        assert (found.accepted, found.code) == (True, 0), found.errors


def test_a_few_command_lines_by_chance(warm: Warm) -> None:
    number = seed()
    print(f"LATHE_FUZZ_SEED={number}")
    found = faults(warm, number, 40, groups=6)
    assert found == [], f"LATHE_FUZZ_SEED={number}\n" + "\n".join(found)


@pytest.mark.slow
def test_every_key_by_chance(warm: Warm) -> None:
    number = seed()
    print(f"LATHE_FUZZ_SEED={number}")
    found = faults(warm, number, 600)
    assert found == [], f"LATHE_FUZZ_SEED={number}\n" + "\n".join(found)
