"""A weight that one layer reads as integers and another in float ships as floats, from which both are right."""

from pathlib import Path

import pytest
import torch
from torch import nn

from lathe.compression.quantization.net import LayerPlan, calibrate, freeze_observers, quantize
from lathe.export import get
from lathe.export.targets.weights import restore
from lathe.nets import GPT


@pytest.mark.parametrize("excluded", ["head", "embed.token"])
@pytest.mark.parametrize("fixed", [True, False])
def test_one_of_two_tied_layers_stays_in_float(tmp_path: Path, excluded: str, fixed: bool) -> None:
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
