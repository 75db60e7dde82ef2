"""The small versions of the recipes run to the end, and do what their names say."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import QUIET, SMALL, new_run

from lathe.training.train import train

pytestmark = pytest.mark.law5


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = new_run(tmp_path_factory.mktemp("teacher"), *SMALL)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


def result(folder: Path, *overrides: str) -> dict[str, Any]:
    return train(new_run(folder, *QUIET, "compression.receipt=none", "trainer.max_epochs=3", *overrides))


@pytest.mark.slow
def test_channels_of_a_resnet(tmp_path: Path) -> None:
    found = result(tmp_path, "experiment=digits_channels")
    assert found["prune_channels/macs_share"] < 0.6
    assert found["test/accuracy"] > 0.85


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is no better than its student.*")  # a teacher of two epochs is not
def test_half_of_the_weights_in_integers_with_a_teacher(tmp_path: Path, teacher: Path) -> None:
    found = result(tmp_path, "experiment=digits_small", f"compression.distill.teacher={teacher}")
    assert found["prune/sparsity"] == pytest.approx(0.5, abs=0.001)
    assert found["qat/bits"] < 10
    assert found["test/accuracy"] > 0.8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is no better than its student.*")  # the moving average of four epochs
def test_heads_and_hidden_units_of_a_transformer(tmp_path: Path) -> None:
    found = result(tmp_path, "experiment=digits_vit_small", "trainer.max_epochs=4")
    assert found["prune_channels/macs_share"] == pytest.approx(0.5, abs=0.05)
    assert found["test/accuracy"] > 0.5
