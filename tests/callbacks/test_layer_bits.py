"""Bits by layer can be typed as they are, for every method that takes them."""

import pytest
import torch
from support.runs import config
from torch import nn

from lathe.callbacks.methods.ptq import PTQStatic
from lathe.compression.quantization.layer_plan import LayerPlan
from lathe.runs.instantiate import instantiate

METHODS = ("qat", "ptq_static", "ptq_dynamic", "weight_only")


@pytest.mark.parametrize("name", METHODS)
def test_bits_are_typed_without_a_plus(name: str) -> None:
    node = config(f"compression={name}", f"compression.{name}.layer_bits={{head: 4, blocks.0.*: null}}")["compression"][
        name
    ]
    assert node["layer_bits"] == {"head": 4, "blocks.0.*": None}
    node.pop("kind")
    method = instantiate(node, f"compression.{name}")
    overrides = method.overrides if name == "qat" else method.overrides()
    assert overrides["blocks.0.*"] is None
    assert overrides["head"].weight_bits == 4


def test_names_that_are_numbers() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).eval()

    class Batches:
        def train_dataloader(self) -> list[tuple[torch.Tensor, int]]:
            return [(torch.randn(8, 4), 0)]

    node = config("compression=ptq_static", "compression.ptq_static.layer_bits={0: 4, 1: null}")["compression"][
        "ptq_static"
    ]
    PTQStatic(layer_bits=node["layer_bits"]).finalise(net, Batches())
    plan = net[0].__dict__["plan"]
    assert isinstance(plan, LayerPlan)
    assert plan.weight_bits == 4
    assert type(net[1]) is nn.Linear
