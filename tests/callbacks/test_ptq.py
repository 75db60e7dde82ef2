"""Post-training quantization at the end of a run: its inputs, messages and results."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from support.ranks import on_ranks
from support.runs import SMALL, new_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lathe.compression.quantization.callback import PTQStatic, WeightOnly
from lathe.compression.quantization.net import integer_weight, quantized_layers
from lathe.errors import UserError
from lathe.nets import MLP, CifarResNet
from lathe.runs import inference
from lathe.runs.rundir import RunDir
from lathe.training import train as run


class Batches(LightningDataModule):
    """Four training batches of 8 random images, and labels."""

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.rand(32, 1, 8, 8, generator=generator), torch.zeros(32)), 8)


def resnet() -> nn.Module:
    torch.manual_seed(0)
    return CifarResNet(depth=8, width=4, in_channels=1)


def test_static_acts_and_reports() -> None:
    net, method = resnet(), PTQStatic(batches=2, equalize=True)
    assert method.report() == {}
    assert method.finalise(net, Batches()) is True
    assert method.report() == {"ptq_static/layers": 13.0, "ptq_static/pairs": 3.0, "ptq_static/corrected": 10.0}
    first = net.get_submodule("conv.input_quantizer")
    assert float(first.maximum) == float(torch.cat([x for x, _ in islice(Batches().train_dataloader(), 2)]).max())


def test_a_quantized_net_is_refused() -> None:
    net = MLP(channels=1, image_size=8, num_classes=3, width=8, depth=1)
    PTQStatic(batches=1).finalise(net, Batches())
    with pytest.raises(UserError, match=r"^the net is quantized already"):
        WeightOnly().finalise(net, Batches())


def test_a_pattern_that_matches_nothing_is_refused_before_training(tmp_path: Path) -> None:
    words = ("compression=ptq_static", "compression.ptq_static.exclude=[heads]", "compression.receipt=none")
    cfg = new_run(tmp_path, *SMALL, *words)
    with pytest.raises(UserError, match=r"^compression\.ptq_static: the pattern 'heads' matches no.*did you mean head"):
        run.train(cfg)
    assert not RunDir(cfg["paths"]["run_dir"]).begun


@pytest.fixture
def finished(tmp_path: Path, request: pytest.FixtureRequest) -> RunDir:
    cfg = new_run(tmp_path, *SMALL, "compression.receipt=none", f"compression={request.param}")
    run.train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


@pytest.mark.parametrize("finished", ["ptq_static", "ptq_dynamic", "weight_only"], indirect=True)
def test_a_run_ends_with_a_quantized_net(finished: RunDir) -> None:
    """best.ckpt, and the metrics in result.json, are those of the integers."""
    task, cfg = inference.open_run_net(finished.path)
    name = next(name for name in cfg["compression"] if name not in ("stages", "receipt"))
    assert finished.result[f"{name}/layers"] == 2
    assert list(quantized_layers(task.net)) == ["stem.linear", "head"]
    data = inference.open_data(cfg)
    for split in ("val", "test"):
        measured = inference.score(task, task.net, data.eval_loader(split))
        assert finished.result[f"{split}/accuracy"] == pytest.approx(measured["accuracy"], abs=1e-6)
        assert finished.result[f"{split}/loss"] == pytest.approx(measured["loss"], rel=1e-4)
    last = torch.load(finished.last, weights_only=True)
    assert not any("quantizer" in key for key in last["state_dict"])  # training would resume from the float net


def test_masks_of_training_are_integer_zeros(tmp_path: Path) -> None:
    overrides = ("compression=[prune,ptq_static]", "compression.prune.sparsity=0.5", "compression.receipt=none")
    cfg = new_run(tmp_path, *SMALL, *overrides, "trainer.max_epochs=4")
    result = run.train(cfg)
    assert result["prune/sparsity"] == pytest.approx(0.5, abs=0.01)
    layer = inference.open_run_net(cfg["paths"]["run_dir"])[0].net.get_submodule("stem.linear")
    integers, _ = integer_weight(layer)
    assert float((integers == 0).float().mean()) >= 0.5
    assert not integers[layer.weight == 0].any()


def trained(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    return run.train(cfg)


@pytest.mark.slow
def test_two_processes_leave_one_quantized_net(tmp_path: Path) -> None:
    """Rank 0 quantizes the best weights; all ranks test the result."""
    overrides = ("compression=ptq_static", "strategy=ddp", "compression.receipt=none")
    cfg = new_run(tmp_path, *SMALL, *overrides, "trainer.devices=2")
    results = on_ranks(trained, cfg)
    assert results[0]["test/accuracy"] == results[1]["test/accuracy"]
    task, cfg = inference.open_run_net(cfg["paths"]["run_dir"])
    measured = inference.score(task, task.net, inference.open_data(cfg).eval_loader("test"))
    assert results[0]["test/accuracy"] == pytest.approx(measured["accuracy"], abs=1e-6)
