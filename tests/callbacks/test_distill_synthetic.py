"""The recipe synthetic_kd: a student that can't reach its ceiling alone, and that a teacher takes more than half of the
way to its own.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import new_run

import lathe.training.train

QUIET = (
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "callbacks.throughput=null",
    "compression.receipt=none",
    "trainer.check_val_every_n_epoch=2",
)


def accuracy(folder: Path, *overrides: str) -> tuple[str, float]:
    cfg: dict[str, Any] = new_run(folder, *QUIET, *overrides)
    lathe.training.train.train(cfg)
    run_dir = cfg["paths"]["run_dir"]
    return run_dir, float(json.loads(Path(run_dir, "result.json").read_text())["test/accuracy"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is no better than its student")  # on 1024 samples they may come out equal
@pytest.mark.filterwarnings("ignore:The number of training batches")
def test_a_teacher_closes_more_than_half_of_the_gap(tmp_path: Path) -> None:
    teacher, ceiling = accuracy(tmp_path, "experiment=synthetic_kd_teacher")
    _, alone = accuracy(tmp_path, "experiment=synthetic_kd", "seed=1", "compression.distill=null")
    _, taught = accuracy(tmp_path, "experiment=synthetic_kd", "seed=1", f"compression.distill.teacher={teacher}")
    assert ceiling <= 0.51 + 3 * 0.008, "nothing beats the noise of the labels"
    assert alone < ceiling - 0.03, "the task is easy"
    assert taught - alone > 0.5 * (ceiling - alone)
