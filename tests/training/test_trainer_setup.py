"""The Trainer of a configuration: its device, strategy and plugins."""

from pathlib import Path

import pytest
import torch
from support.runs import SMALL, new_run

from lathe.strategies import DDP
from lathe.training.train import train
from lathe.training.trainer_setup import make_trainer, world_size


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("accelerator", ["auto", "cpu"])
def test_a_run_prints_the_device_of_auto(accelerator: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(new_run(tmp_path, *SMALL, f"trainer.accelerator={accelerator}", "trainer.max_steps=2"))
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("trainer.accelerator=")]
    assert len(printed) == (1 if accelerator == "auto" else 0)
    assert all(
        line.startswith(f"trainer.accelerator=auto took the CPU: torch {torch.__version__} ") for line in printed
    )


def test_several_processes_get_ddp_and_synchronised_batchnorm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert world_size() == 1  # WORLD_SIZE without LOCAL_WORLD_SIZE is not torchrun's
    cfg = new_run(tmp_path, *SMALL)
    assert not isinstance(make_trainer(cfg, tmp_path, []).strategy, DDP)
    ranks = {"LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}
    for key, value in {**ranks, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    assert world_size() == 2
    cfg["trainer"]["devices"] = 2
    trainer = make_trainer(cfg, tmp_path, [])
    assert isinstance(trainer.strategy, DDP)
    assert type(trainer.strategy._layer_sync).__name__ == "SyncBatchNorm"
    cfg["trainer"]["sync_batchnorm"] = False
    assert make_trainer(cfg, tmp_path, []).strategy._layer_sync is None


def test_one_process_ignores_the_variables_of_a_slurm_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch script with --ntasks=2 may call python without srun."""
    for key in ("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in {"JOB_ID": "5", "JOB_NAME": "x", "NTASKS": "2", "PROCID": "0", "LOCALID": "0"}.items():
        monkeypatch.setenv(f"SLURM_{key}", value)
    trainer = make_trainer(new_run(tmp_path, *SMALL), tmp_path, [])
    assert (trainer.world_size, trainer.global_rank) == (1, 0)
