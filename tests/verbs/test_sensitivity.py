"""Sensitivity of a finished run's layers on validation data, and training with the suggested choice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import QUIET, config, new_run

from lathe.compression.pruning.sensitivity import round_to_nearest
from lathe.errors import UserError
from lathe.runs import inference
from lathe.training.train import train
from lathe.verbs.sensitivity import sensitivity

NET = (
    *("model=resnet20", "model.net.depth=8", "model.net.width=2", "data=synthetic", "data.image_size=8"),
    *("data.source.train_size=256", "data.source.val_size=128", "data.source.test_size=64", "data.batch_size=64"),
    *(*QUIET, "trainer.max_epochs=1", "trainer.log_every_n_steps=4"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *NET)
    train(cfg)
    return Path(cfg["paths"]["run_dir"])


def ask(run: Path, *asked: str) -> dict[str, Any]:
    """The request that the launch passes to the job."""
    request = config(f"run={run}", "trainer.enable_progress_bar=false", "reestimate=2", *asked, name="sensitivity")
    _, cfg = inference.open_run_net(run)
    cfg["trainer"] |= request["trainer"]
    return {**cfg, "request": request}


def test_figures_are_those_of_the_net_with_one_layer_changed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = sensitivity(ask(run, "layers=[conv,head]", "sparsities=[0.9]", "bits=[2]", "reestimate=0"))
    task, cfg = inference.open_run_net(run)
    batches = list(inference.open_data(cfg).eval_loader("val"))
    assert report["baseline"] == report["reference"] == inference.score(task, task.net, batches)
    with torch.no_grad():
        weight = task.net.head.weight
        weight.copy_(round_to_nearest(weight, 2))
    assert report["layers"]["head"]["bits"][2] == inference.score(task, task.net, batches)
    assert list(report["layers"]) == ["conv", "head"]
    saved = json.loads((run / "sensitivity" / "sensitivity.json").read_text())
    assert saved == json.loads(json.dumps(report))
    assert saved["layers"]["conv"]["shape"] == [2, 1, 3, 3]
    for kind in ("bits", "sparsity"):
        assert (run / "sensitivity" / f"{kind}.svg").read_text().startswith("<svg")
    printed = capsys.readouterr().out
    assert "head" in printed
    assert f"{report['layers']['head']['bits'][2]['loss']:.4g}" in printed


def test_a_budget_chooses_bits_that_qat_takes(run: Path) -> None:
    report = sensitivity(ask(run, "sparsities=[]", "bits=[8,4,2]", "budget=0.2"))
    choice = report["allocation"]
    shapes = [layer["shape"] for layer in report["layers"].values()]
    dense = sum(4 * torch.Size(shape).numel() for shape in shapes)
    cost = sum(
        -(-torch.Size(shape).numel() * int(bits) // 8) + 4 * shape[0]
        for shape, bits in zip(shapes, choice["values"].values(), strict=True)
    )
    assert choice["cost"] == cost <= 0.2 * dense
    assert len(set(choice["values"].values())) > 1
    override = (run / "sensitivity" / "override.txt").read_text().split()
    assert override[1].startswith("'compression.qat.layer_bits={")  # without ++
    cfg = config(*(word.strip("'") for word in override))
    assert cfg["compression"]["qat"]["layer_bits"] == choice["values"]
    same = choice["uniform"]
    assert same is None or same["cost"] <= choice["budget"]


def test_a_budget_chooses_sparsities_and_times(run: Path, tmp_path: Path) -> None:
    names = ["conv", "head"]
    report = sensitivity(
        ask(run, "layers=[conv,head]", "sparsities=[0.5,0.9]", "bits=[]", "allocate=sparsity", "budget=0.5")
    )
    assert set(report["allocation"]["values"]) == set(names)
    assert report["allocation"]["override"] is None
    assert report["allocation"]["cost"] <= report["allocation"]["budget"] == 0.5 * report["allocation"]["dense_bytes"]
    table = {name: {"8": 3.0, "4": 1.0} for name in names}
    (tmp_path / "times.json").write_text(json.dumps(table))
    asked = ("layers=[conv,head]", "sparsities=[]", "bits=[8,4]", "budget=4", f"latency={tmp_path}/times.json")
    report = sensitivity(ask(run, *asked))
    assert report["allocation"]["cost"] <= 4
    assert sorted(report["allocation"]["values"].values()) in ([4, 4], [4, 8])
    table["head"].pop("4")
    (tmp_path / "times.json").write_text(json.dumps(table))
    with pytest.raises(UserError, match="latency has no time for head at bits 4"):
        sensitivity(ask(run, *asked))
