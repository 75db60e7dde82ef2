"""Nets of timm by name, for the data's channels, classes and size, with timm's names and blocks."""

import re
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from support.runs import config
from torch import Tensor, nn

from lathe.config.validate import check
from lathe.errors import ArgumentError, UserError
from lathe.nets import blocks_of, recompute, timm_net
from lathe.optim.build import layer_numbers
from lathe.runs.build import make_net

pytestmark = pytest.mark.usefixtures("timm")

# name: (side of an image, blocks, whether each block's input is the output of the one before)
FAMILIES: dict[str, tuple[int, int, bool]] = {
    "resnet10t": (32, 4, True),
    "convnext_atto": (32, 15, True),
    "vit_tiny_patch16_224": (32, 12, True),
    "swin_tiny_patch4_window7_224": (56, 15, True),
    "efficientnet_b0": (32, 7, True),
    "regnetx_002": (32, 13, True),
    "densenet121": (32, 7, True),
    "repvgg_a0": (32, 21, True),
    "tiny_vit_5m_224": (64, 15, False),  # flattens between a stage's downsampling and its blocks
    "dla46x_c": (32, 0, True),
}


QUICK = ("resnet10t", "convnext_atto", "vit_tiny_patch16_224", "dla46x_c")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAMILIES])
def test_a_net_is_timms_own_and_its_blocks_run_in_order(timm: Any, name: str) -> None:
    side, count, chained = FAMILIES[name]
    torch.manual_seed(0)
    net = timm_net(name, in_channels=1, num_classes=5, image_size=side).eval()
    assert net.training is False
    blocks = blocks_of(net)
    assert len(blocks) == count
    calls: list[tuple[int, tuple[Any, ...], Any]] = []
    for number, block in enumerate(blocks):
        block.register_forward_hook(lambda module, args, out, number=number: calls.append((number, args, out)))
    x = torch.randn(2, 1, side, side)
    with torch.no_grad():
        logits = net(x)
    assert logits.shape == (2, 5)
    assert [number for number, _, _ in calls] == list(range(count))
    links = [after[1][0] is before[2] for before, after in pairwise(calls)]
    assert all(links) == chained
    torch.manual_seed(0)
    options = {"img_size": side} if timm.get_pretrained_cfg(name).fixed_input_size else {}
    own = timm.create_model(name, in_chans=1, num_classes=5, **options).eval()
    assert list(own.state_dict()) == list(net.state_dict())
    with torch.no_grad():
        assert torch.equal(own(x), logits)
    if count:
        numbers = layer_numbers(net)
        inside = [number for key, number in numbers.items() if 0 < number <= count]
        assert inside == sorted(inside)
        assert next(iter(numbers.values())) == 0
        assert list(numbers.values())[-1] == count + 1


def test_a_configuration_builds_one_and_follows_the_data(timm: Any) -> None:
    cfg = config("model=timm", "model.name=vit_tiny_patch16_224", "model.net.patch_size=2", "model.net.drop_rate=0.5")
    assert check(cfg, "train") == []
    net = make_net(cfg["model"])
    assert type(net) is timm.models.VisionTransformer
    assert (net.patch_embed.proj.in_channels, net.head.out_features, len(net.pos_embed[0])) == (1, 10, 17)
    assert net.head_drop.p == 0.5
    assert make_net(config("model=timm", "model.name=resnet50.a1_in1k")["model"]).pretrained_cfg["tag"] == "a1_in1k"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "resnet10"}, "name=resnet10: timm has no such net; did you mean resnet101?"),
        ({"name": "convnext_atto", "image_size": 8}, "name=convnext_atto is no net for images of 3 x 8 x 8"),
        ({"name": "resnet10t", "patch_size": 4}, "resnet10t is no net .*unexpected keyword argument 'patch_size'"),
    ],
)
def test_unknown_nets_and_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        timm_net(**{"image_size": 32, **options})


def test_a_torchvision_for_another_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "timm":
                raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("lathe.nets.timm_nets.uninstalled", lambda *_: None)
    monkeypatch.delitem(sys.modules, "timm")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(
        UserError, match=re.escape(f"install the torchvision that was made for torch {torch.__version__}")
    ):
        timm_net("resnet10t")


def step(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(5)
    for _ in range(2):
        loss = net(x).logsumexp(-1).sum()
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"loss": loss.detach(), **gradients, **dict(net.named_buffers())}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "efficientnet_b0"])
def test_recomputing_changes_no_value(name: str) -> None:
    found = []
    for how in ("none", "blocks"):
        torch.manual_seed(0)
        net = timm_net(name, in_channels=1, num_classes=3, image_size=32, drop_path_rate=0.3)
        recompute.apply(net, how)
        calls: list[nn.Module] = []
        inner = next(m for m in blocks_of(net)[0].modules() if isinstance(m, nn.Conv2d | nn.LayerNorm))
        inner.register_forward_pre_hook(lambda layer, _, calls=calls: calls.append(layer))
        found.append((step(net, torch.randn(4, 1, 32, 32)), len(calls)))
    (plain, once), (again, twice) = found
    assert twice == 2 * once
    assert [key for key in plain if not torch.equal(plain[key], again[key])] == []
