"""A loaded export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lathe import export
from lathe.data import Normalizer
from lathe.export import manifest
from lathe.export.bundle import open_bundle
from lathe.export.preprocess import Preprocess, Shipped
from lathe.export.torch_runner import prepared

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


def folder_of(folder: Path, in_graph: bool, target: str = "onnx", **changed: Any) -> tuple[Path, nn.Module]:
    """An export without a run, and its net of normalised images."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5)).eval()
    shipped = Shipped(net, Preprocess(MEAN, STD, (4, 4))) if in_graph else net
    folder = folder / target
    folder.mkdir()
    module = export.get(target)
    module.export(
        shipped,
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8 if in_graph else torch.float32),
        folder / f"model{module.suffix}",
    )
    content = {
        "target": target,
        "file": f"model{module.suffix}",
        "classes": None,
        "preprocess": {"in_graph": in_graph, "mean": MEAN, "std": STD, "size": [4, 4]},
        "input": {"dtype": "uint8" if in_graph else "float32", "shape": ["batch", 3, 4, 4]},
        "output": {"shape": ["batch", 5]},
        **changed,
    }
    manifest.write(folder, content, [f"model{module.suffix}"])
    return folder, net


@pytest.mark.parametrize("in_graph", [True, False])
def test_pixels_in_and_logits_out(tmp_path: Path, in_graph: bool) -> None:
    folder, net = folder_of(tmp_path, in_graph)
    bundle = open_bundle(folder, 1)
    x = torch.randint(0, 256, (7, 3, 4, 4), dtype=torch.uint8)
    with torch.no_grad():
        wanted = net(Normalizer(MEAN, STD, 3)(x))
    found = torch.from_numpy(bundle(x.numpy()))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    assert (bundle.folder, bundle.manifest["target"]) == (folder, "onnx")


def test_pixels_are_normalised_to_the_bits_of_training() -> None:
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(2, 3, 16, 16)
    found = prepared({"preprocess": {"in_graph": False, "mean": MEAN, "std": STD}}, x.numpy())
    assert found.dtype == np.float32
    assert np.array_equal(found, Normalizer(MEAN, STD, 3)(x).numpy())
    ids = np.arange(6).reshape(2, 3)
    assert prepared({"preprocess": None}, ids) is ids
    assert prepared({"preprocess": {"in_graph": True}}, ids) is ids
