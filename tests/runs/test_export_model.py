"""The net of a run as it is exported."""

from pathlib import Path

import pytest
import torch
from support.exports import CNN, made
from support.runs import SMALL, config

from lathe.compression.quantization.net import describe
from lathe.errors import UserError
from lathe.export.inputs import Shipped
from lathe.runs.export_model import class_names, open_export_model
from lathe.runs.inference import open_run_net
from lathe.runs.rundir import RunDir


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return made(tmp_path_factory.mktemp("logs"), *SMALL)


def test_pixels_give_the_batches_and_the_logits_of_the_run(run: RunDir) -> None:
    ready = open_export_model(run.path)
    assert isinstance(ready.net, Shipped)
    for split in ("train", "val", "test"):
        for x, _ in ready.data.eval_loader(split):
            pixels = ready.inputs_of(x)
            assert pixels.dtype == torch.uint8
            assert torch.equal(ready.net.preprocess(pixels), x)
            with torch.no_grad():
                assert torch.equal(ready.net(pixels), ready.trained(x))
    assert (ready.inner is ready.trained, ready.other_size, ready.takes_any_size) == (True, None, False)
    without = open_export_model(run.path, preprocess=False)
    assert without.net is without.trained
    assert without.facts["preprocess"]["in_graph"] is False
    assert not ready.net.training
    assert torch.equal(ready.example, torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_images_of_another_size(run: RunDir) -> None:
    ready = open_export_model(run.path, input_size=[5, 20])
    assert (ready.other_size, ready.facts["input"]["shape"], tuple(ready.example.shape)) == (
        (5, 20),
        ["batch", 1, 5, 20],
        (2, 1, 5, 20),
    )
    free = open_export_model(run.path, input_size="any")
    assert (free.other_size, free.takes_any_size) == (None, True)
    assert free.facts["input"]["shape"] == ["batch", 1, "height", "width"]
    assert open_export_model(run.path, input_size=[8, 8]).other_size is None


def test_integers_are_calibrated_or_removed(run: RunDir, tmp_path: Path) -> None:
    before = open_run_net(run.path)[0].net.state_dict()
    ready = open_export_model(run.path, integers=True)
    assert describe(ready.inner)
    assert not describe(ready.trained)
    assert all(torch.equal(value, before[name]) for name, value in ready.trained.state_dict().items())
    assert (ready.facts["integers"], ready.facts["calibrated"], ready.activation_bits) == (True, True, 8)
    again = open_export_model(run.path, integers=True)
    x = ready.inputs_of(next(iter(ready.data.eval_loader("test")))[0])
    with torch.no_grad():
        assert torch.equal(ready.net(x), again.net(x))  # calibrated on the same batches
    quantized = made(tmp_path, *SMALL, "compression=qat")
    as_trained, floats = open_export_model(quantized.path), open_export_model(quantized.path, integers=False)
    assert (as_trained.facts["integers"], as_trained.facts["calibrated"], as_trained.activation_bits) == (
        True,
        False,
        8,
    )
    assert open_export_model(quantized.path, integers=True).inner is not None
    assert (floats.facts["integers"], floats.activation_bits, bool(describe(floats.trained))) == (False, None, True)
    assert not describe(floats.inner)


def test_a_run_with_fewer_channels(tmp_path: Path) -> None:
    run = made(
        tmp_path, *CNN, "trainer.max_epochs=1", "compression=prune_channels", "compression.prune_channels.share=0.7"
    )
    ready = open_export_model(run.path)
    assert sum(p.numel() for p in ready.inner.parameters()) == run.result["parameters"]


def test_class_names() -> None:
    ten = config("data=cifar10")
    assert (class_names(ten) or [])[:2] == ["airplane", "automobile"]
    assert class_names(config("data=synthetic_tokens", "model=gpt_nano")) is None
    ten["data"]["class_names"] = ["a", "b"]
    with pytest.raises(UserError, match=r"^data\.class_names has 2 names for data\.num_classes=10"):
        class_names(ten)


def test_a_missing_run_checkpoint_or_size_is_refused(tmp_path: Path, run: RunDir) -> None:
    with pytest.raises(UserError, match=r"^run="):
        open_export_model(tmp_path)
    with pytest.raises(UserError, match=r"has no checkpoint 'first'"):
        open_export_model(run.path, checkpoint="first")
    with pytest.raises(UserError, match=r"^target\.input_size=\[0\]"):
        open_export_model(run.path, input_size=[0])
