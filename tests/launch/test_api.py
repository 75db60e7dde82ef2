"""Lathe from Python: training in this process equals the command's, and leaves no side effects."""

import os
import random
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from support.runs import ROOT, SMALL, config, runs, weights
from torch.utils.data import BatchSampler, DataLoader

import lathe
from lathe.config.compose import overrides_of
from lathe.config.resolve import resolve
from lathe.data import ImageDataModule
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.tasks import ClassificationTask

METHODS = ("__init__", "__setattr__", "__delattr__")
SHORT = (*SMALL, "trainer.max_epochs=1", "callbacks.progress_bar=null")


def test_the_package_itself_imports_nothing() -> None:
    code = "import sys, lathe; print(sorted({'torch', 'hydra', 'omegaconf', 'lathe.launch'} & set(sys.modules)), lathe)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[] ")
    assert {"compose", "load", "train"} <= set(dir(lathe))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = lathe.nothing


@pytest.mark.slow
def test_a_script_without_a_guard_ends_with_one_sentence(tmp_path: Path) -> None:
    words = [*SHORT, "trainer.devices=2", "strategy=ddp", f"paths.log_dir={tmp_path}"]
    (tmp_path / "script.py").write_text(f"import lathe\nlathe.train({words})\n")
    done = subprocess.run([sys.executable, tmp_path / "script.py"], capture_output=True, text=True, cwd=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert last.endswith('Guard the call by if __name__ == "__main__":')
    assert done.stderr.count("Traceback") == 1
    assert not runs(tmp_path)


def test_compose_gives_the_commands_configuration_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()  # another project's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel.json"])
    assert resolve(lathe.compose(["model=mlp", "trainer.accelerator=cpu"])) == config(
        "model=mlp", "trainer.accelerator=cpu"
    )
    assert Path.cwd() == tmp_path


CHANGED: dict[str, Any] = {
    "optimizer.lr": 1e-07,
    "tags": ["it's", "a \\'b\\", "ü, [x]", "null"],
    "trainer.max_time": {"minutes": 5},
    "callbacks.progress_bar": None,
    "data.eval_batch_size": "${data.batch_size}",
    "test": False,
}


def test_keys_that_were_changed_are_as_typed() -> None:
    cfg = lathe.compose(["model=mlp", "trainer.accelerator=cpu"])
    for key, value in CHANGED.items():
        OmegaConf.update(cfg, key, value)
    words = overrides_of(cfg)
    assert len(words) == 2 + len(CHANGED)
    again = lathe.compose(words)
    assert OmegaConf.to_container(again) == OmegaConf.to_container(cfg)
    assert overrides_of(again.copy()) == words


def everything() -> dict[str, Any]:
    """Return all process state that a training might change."""
    return {
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "environment": dict(os.environ),
        "folder": Path.cwd(),
        "random": random.getstate(),
        "numpy": [str(part) for part in np.random.get_state()],
        "torch": torch.get_rng_state().tolist(),
        "strict": torch.are_deterministic_algorithms_enabled(),
        "filters": list(warnings.filters),
        "hydra": GlobalHydra.instance().hydra,
        "config": HydraConfig.instance().cfg,
        "group": torch.distributed.is_initialized(),
        "threads": torch.get_num_threads(),
        "loaders": [getattr(kind, name) for kind in (DataLoader, BatchSampler) for name in METHODS],
    }


def test_trainings_in_one_process_leave_it_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after a failed one and one ended by Ctrl-C; each as if it were the only one."""
    words = [*SHORT, "trainer.deterministic=true", "launch.threads=2", f"paths.log_dir={tmp_path}"]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the elastic agent leaves its handler to later tests
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):  # as a notebook that uses Hydra itself
        before = everything()
        first = lathe.train(words)
        assert everything() == before
        assert compose("train").seed == 42

        def fail(self: Any) -> None:
            raise RuntimeError("a bug of the user's")

        def interrupt(self: Any) -> None:
            signal.raise_signal(signal.SIGINT)

        for hook, kind, said in ((fail, RuntimeError, "a bug"), (interrupt, KeyboardInterrupt, "resume=")):
            with monkeypatch.context() as patch:
                patch.setattr(ClassificationTask, "on_validation_epoch_start", hook)
                with pytest.raises(kind, match=said):
                    lathe.train(words)
            assert everything() == before
        with monkeypatch.context() as patch:
            patch.setattr(ImageDataModule, "train_dataloader", fail)
            with pytest.raises(RuntimeError, match="a bug"):
                lathe.train(words)
        assert everything() == before
        with pytest.raises(UserError, match="no such file"):
            lathe.train([*words, f"ckpt_path={tmp_path}/none.ckpt"])
        cfg = lathe.compose(words)
        last = lathe.train(cfg)
        assert everything() == before
    assert first.dir != last.dir
    assert weights(first.dir).keys() == weights(last.dir).keys()
    for name, value in weights(first.dir).items():
        assert torch.equal(value, weights(last.dir)[name])
    assert RunDir(last.dir).typed == words
    assert len(runs(tmp_path)) == 4  # those that had started
    capsys.readouterr()


def test_a_changed_configuration_trains_and_resumes(tmp_path: Path) -> None:
    cfg = lathe.compose([*SHORT, f"paths.log_dir={tmp_path}"])
    cfg.optimizer.lr = 0.025
    run = lathe.train(cfg)
    assert run.config.optimizer.lr == 0.025
    assert RunDir(run.dir).overrides[-1] == "optimizer.lr=0.025"
    longer = lathe.train([f"resume={run.dir}", "trainer.max_epochs=2"])
    assert longer.dir == run.dir
    assert longer.result["epochs"] == 2


@pytest.mark.slow
def test_two_devices_train_as_the_command_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import lathe\n"
        "if __name__ == '__main__':\n"
        f"    words = {[*SHORT, f'paths.log_dir={tmp_path}']!r}\n"
        "    one, two = lathe.train(words), lathe.train([*words, 'trainer.devices=2'])\n"
        "    print(two.result['devices'], abs(two.result['test/loss'] - one.result['test/loss']) < 1e-4)\n"
    )
    done = subprocess.run(
        [sys.executable, "mine.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 True"
