"""target=weights: low-bit weights are restored exactly."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization.net import (
    LayerPlan,
    calibrate,
    freeze_observers,
    integer_weight,
    quantize,
    quantized_layers,
    set_enabled,
)
from lathe.errors import UserError
from lathe.export import get
from lathe.export.targets.weights import pack, restore, unpack
from lathe.nets import GPT

Make = Callable[[], nn.Module]


def rounding(net: nn.Module, inputs: Tensor, plan: LayerPlan) -> nn.Module:
    quantize(net, inputs[:2], plan)
    set_enabled(net, True)
    return net


@pytest.mark.parametrize("bits", range(2, 9))
def test_packing_keeps_every_integer(bits: int) -> None:
    top = 2 ** (bits - 1) - 1
    integers = torch.randint(-top, top + 1, (7, 3, 5), dtype=torch.int8)
    data = pack(integers, bits)
    assert data.numel() == -(-integers.numel() * bits // 8)
    assert torch.equal(unpack(data, [7, 3, 5], bits), integers)


@pytest.mark.parametrize(
    "plan",
    [
        LayerPlan(),
        LayerPlan(weight_bits=3, activation_bits=5),
        LayerPlan(weight_bits=4, activation="none", group_size=9),
        LayerPlan(lsq=True),
        LayerPlan(per_channel=False),
    ],
)
def test_a_quantized_net_comes_back_exactly(make_resnet: Make, images: Tensor, tmp_path: Path, plan: LayerPlan) -> None:
    net, path = rounding(make_resnet(), images, plan), tmp_path / "net.pt"
    get("weights").export(net, images[:1], path)
    content = torch.load(path, weights_only=True)
    weights = sum(layer.weight.numel() for layer in quantized_layers(net).values() if hasattr(layer, "weight"))
    stored = sum(entry["data"].numel() for entry in content["integers"].values())
    assert weights * plan.weight_bits / 8 <= stored < weights * plan.weight_bits / 8 + len(content["integers"])
    assert not any(name in content["state"] for name in content["integers"])

    fresh = restore(make_resnet(), path)
    with torch.no_grad():
        assert torch.equal(fresh(images), net(images))
    for name, layer in quantized_layers(net).items():
        if hasattr(layer, "weight"):
            assert torch.equal(integer_weight(layer)[0], integer_weight(fresh.get_submodule(name))[0])


def test_another_net_and_a_torn_file_are_refused(
    make_resnet: Make, make_mlp: Make, images: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "net.pt"
    get("weights").export(make_resnet(), images, path)
    with pytest.raises(UserError, match="does not fit MLP"):
        restore(make_mlp(), path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="can't be read as weights"):
        restore(make_resnet(), path)


@pytest.mark.parametrize("excluded", ["head", "embed.token"])
@pytest.mark.parametrize("fixed", [True, False])
def test_one_of_two_tied_layers_stays_in_float(tmp_path: Path, excluded: str, fixed: bool) -> None:
    """A weight that one layer reads as integers and another as floats is stored as floats."""

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(vocab_size=64, max_length=8, width=16, depth=1, heads=2).eval()

    net, ids, path = make(0), torch.randint(0, 64, (4, 8)), tmp_path / "net.pt"
    quantize(net, ids, LayerPlan(weight_bits=4), {excluded: None})
    calibrate(net, [ids])
    if fixed:
        freeze_observers(net)
    get("weights").export(net, ids, path)
    content = torch.load(path, weights_only=True)
    assert "embed.token.weight" in content["state"]
    assert "blocks.0.up.weight" in content["integers"]
    with torch.no_grad():
        assert torch.equal(restore(make(1), path)(ids), net(ids))
