"""Law 1: Hydra composes once, in the parent; every rank gets that configuration; one run has one directory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import check, environment, start
from support.runs import ROOT, SMALL, runs

# A resolver with a new value in every process that composes, like a random sampler or a clock.
DRAW = """
import os, random
from omegaconf import OmegaConf
OmegaConf.register_new_resolver("draw", lambda: random.SystemRandom().random() * 0.1)
"""
# Records the configuration of each rank.
WITNESS = """
from lightning.pytorch.callbacks import Callback
class Witness(Callback):
    def __init__(self, folder): self.folder = folder
    def on_train_end(self, trainer, task):
        rates = [group["initial_lr"] for group in trainer.optimizers[0].param_groups]
        with open(f"{self.folder}/{trainer.default_root_dir.rsplit('/', 1)[1]}-{trainer.global_rank}", "w") as file:
            file.write(repr(rates))
"""


def _project(folder: Path) -> Path:
    """Create a copy of train.py with the resolver, and the witness module."""
    (folder / "witness.py").write_text(WITNESS)
    (folder / "seen").mkdir()
    text = (ROOT / "train.py").read_text().replace('config_path="configs"', f'config_path="{ROOT / "configs"}"')
    script = folder / "train.py"
    script.write_text(DRAW + text)
    return script


def _train(
    script: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,), fork_ranks: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run the script with the witness's folder on the path; its ranks are new processes, or forked."""
    folder = script.parent
    words = [
        *(*launcher, str(script), *arguments, *SMALL, "trainer.max_epochs=1", "trainer.devices=2"),
        *("optimizer.lr=${draw:}", "+callbacks.witness._target_=witness.Witness"),
        f"+callbacks.witness.folder={folder / 'seen'}",
    ]
    process = start(words, folder, environment(), fork_ranks=fork_ranks)
    out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(words, process.wait(), out, err)


def _seen(folder: Path) -> dict[str, list[str]]:
    """Return the values of each run's ranks, by the run's name."""
    table: dict[str, list[str]] = {}
    for path in sorted((folder / "seen").iterdir()):
        table.setdefault(path.name.rsplit("-", 1)[0], []).append(path.read_text())
    return table


def test_ranks_share_one_draw_and_one_directory(tmp_path: Path) -> None:
    check(_train(_project(tmp_path), fork_ranks=True))
    (directory,) = runs(tmp_path / "logs")
    (ranks,) = _seen(tmp_path).values()
    assert len(ranks) == 2
    assert ranks[0] == ranks[1]
    assert (tmp_path / "logs" / "latest").resolve() == directory.resolve()
    assert json.loads((directory / "result.json").read_text())["devices"] == 2


@pytest.mark.slow
def test_a_sweep_leaves_one_directory_per_job_and_ranks_agree(tmp_path: Path) -> None:
    check(_train(_project(tmp_path), "-m", "seed=1,2", fork_ranks=True))
    assert len(runs(tmp_path / "logs")) == 2
    seen = _seen(tmp_path)
    assert [len(set(ranks)) for ranks in seen.values()] == [1, 1]  # the ranks of a run agree
    assert len({ranks[0] for ranks in seen.values()}) == 2  # each job has a new value
    assert sorted(json.loads((path / "result.json").read_text())["seed"] for path in runs(tmp_path / "logs")) == [1, 2]


@pytest.mark.slow
def test_torchrun_ranks_take_rank_0s_draw(tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    check(_train(_project(tmp_path), launcher=launcher))
    (ranks,) = _seen(tmp_path).values()
    assert len(ranks) == 2
    assert ranks[0] == ranks[1]
    assert len(runs(tmp_path / "logs")) == 1
