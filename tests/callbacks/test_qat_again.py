"""Quantization-aware training that starts from a net which is quantized already, by training or after it."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from support.qat_fit import STEPS, Data, Saves, fit, without_decay
from support.strategy_fit import NETS, batches
from torch import nn

from lathe.callbacks.methods.qat import QAT
from lathe.compression.quantization.net import integer_weight, quantizers
from lathe.compression.quantization.ptq import quantize_static
from lathe.errors import UserError
from lathe.tasks import ClassificationTask
from lathe.trainer import Trainer


def train(net: nn.Module, **options: Any) -> dict[int, tuple[bool, bool, bool]]:
    """Ten more steps; what the quantizers were like after each."""
    saves = Saves(None, 0)
    qat = QAT(**{"start": 0.3, "freeze_observers": 0.7, "freeze_batchnorm": 0.8, **options})
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[qat, saves],
        num_sanity_val_steps=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PossibleUserWarning)
        trainer.fit(ClassificationTask(net.train(), without_decay), datamodule=Data("resnet", STEPS, (0, 1)))
    return saves.seen


@pytest.mark.parametrize("source", ["ptq_static", "qat"])
def test_ranges_are_observed_again(source: str) -> None:
    if source == "qat":
        net = fit("resnet")["task"].net
    else:
        torch.manual_seed(0)
        net = NETS["resnet"]()
        quantize_static(net, [batches("resnet", 1)[0][0]])
    assert not any(q.is_observing for q in quantizers(net) if not q.symmetric)
    before = [q.updates.item() for q in quantizers(net) if not q.symmetric]
    assert train(net) == {step: (step >= 3, step < 7, step < 8) for step in range(1, 11)}
    assert [q.updates.item() for q in quantizers(net) if not q.symmetric] == [count + 7 for count in before]
    for layer in (net.conv, net.head):  # scales of weights follow them again
        weight = layer.weight.detach().flatten(1)
        torch.testing.assert_close(integer_weight(layer)[1], weight.abs().amax(1) / 127)


def test_learned_scales_are_learned_further() -> None:
    net = fit("resnet", options={"lsq": True})["task"].net
    for q in quantizers(net):
        q.scale.mul_(1.5)  # as an average may differ from what the growth says
    before = [q.scale.clone() for q in quantizers(net)]
    seen = train(net, lsq=True, start=0.0)
    assert seen[1] == (True, False, True)
    ratios = torch.cat([q.scale / was for q, was in zip(quantizers(net), before, strict=True)])
    assert ((ratios - 1).abs() < 0.2).all()
    assert (ratios != 1).any()


def test_other_layers_than_the_checkpoints_are_refused(tmp_path: Path) -> None:
    fit("mlp", save=tmp_path / "a.ckpt", options={"exclude": ["head"]})
    fit("mlp", resume=tmp_path / "a.ckpt", options={"exclude": ["head"]})
    with pytest.raises(UserError, match="with other bits than these or other layers left in float"):
        fit("mlp", resume=tmp_path / "a.ckpt")


def test_what_stays_in_float_is_told() -> None:
    torch.manual_seed(0)
    net = NETS["resnet"]()
    net.blocks[0].conv1 = type("Own", (nn.Conv2d,), {})(4, 4, 3, padding=1, bias=False)
    share = net.blocks[0].conv1.weight.numel() / sum(p.numel() for p in net.parameters() if p.dim() > 1)
    assert share < 0.05
    train(copy.deepcopy(net))  # as little as that needs no words
    net.blocks[2].conv2 = type("Own", (nn.Conv2d,), {})(16, 16, 3, padding=1, bias=False)
    with pytest.warns(
        UserWarning,
        match=r"^compression\.qat leaves 5\d\.\d% of the weights in float, such as blocks\.2\.conv2\.weight",
    ):
        train(net)
