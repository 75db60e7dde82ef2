"""What Lightning promises a LightningModule, a data module and a callback holds in a run of Lathe."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import column, new_run

from lathe.verbs.train import train

QUICK = (
    "model=lightning",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "trainer.max_epochs=2",
    "trainer.log_every_n_steps=5",
    "callbacks.throughput=null",
)


def run(folder: Path, module: str, data: str, *words: str) -> dict[str, Any]:
    net = f"model.net={{_target_: support.own_contracts.{module}, features: 16, classes: 2, width: 4}}"
    cfg = new_run(folder, *QUICK, net, *words)
    cfg["data"] = {"_target_": f"support.own_contracts.{data}"}
    return cfg


def directory(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


@pytest.mark.parametrize("monitor", ["named_0", "named_1", "val_loss/dataloader_idx_1", "rounds", None])
def test_a_metric_of_each_loader_may_be_the_monitor(tmp_path: Path, monitor: str | None) -> None:
    words = f"callbacks.checkpoint.monitor={'null' if monitor is None else monitor}"
    cfg = run(tmp_path, "Several", "TwoTables", words, "callbacks.checkpoint.mode=min", "objective=named_0")
    result = train(cfg)
    found = {name: column(directory(cfg), name) for name in ("named_0", "named_1", "val_loss/dataloader_idx_1")}
    assert all(len(values) == 2 for values in found.values())
    best = -1 if monitor is None else found.get(monitor, [0, 1]).index(min(found.get(monitor, [0, 1])))
    for name, values in found.items():
        assert result[name] == values[best], name
    assert result["objective"] == result["named_0"]
    assert result["best_step"] == (6 if monitor == "rounds" else 12)
    assert {f"test_loss/dataloader_idx_{loader}" for loader in (0, 1)} <= result.keys()
