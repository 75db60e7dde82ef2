"""Quantized nets and archives for several tests of exports."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.torchserve_archives import PIXELS, Context, archived, shipped
from torch import Tensor, nn

from lathe.compression.quantization.net import LayerPlan, calibrate, freeze_observers, quantize
from lathe.legacy import torchserve_handler as handler
from lathe.nets import MLP, CifarResNet


def shaken(net: nn.Module) -> nn.Module:
    """Return the net in eval mode with trained-looking BatchNorms, some with negative weights for folding."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 0.7, 0.5)
            nn.init.normal_(module.bias, 0, 0.1)
            nn.init.normal_(module.running_mean, 0, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return net.eval()


@pytest.fixture(scope="session")
def quantized() -> Callable[..., nn.Module]:
    """Quantize a net in place, with ranges calibrated on inputs."""

    def make(net: nn.Module, inputs: Tensor, plan: LayerPlan | None = None) -> nn.Module:
        quantize(net, inputs[:2], plan or LayerPlan())
        calibrate(net, [inputs])
        freeze_observers(net)
        return net

    return make


@pytest.fixture(scope="session")
def make_images() -> Callable[[], Tensor]:
    return lambda: torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def images(make_images: Callable[[], Tensor]) -> Tensor:
    return make_images()


@pytest.fixture(scope="session")
def make_resnet() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return shaken(CifarResNet(depth=8, width=8))

    return make


@pytest.fixture(scope="session")
def make_mlp() -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return MLP(channels=3, image_size=16, num_classes=10, width=32, depth=2).eval()

    return make


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, dict[str, Any]]]]:
    """Send a batch of (body, content type) to the handler of an archive; return statuses and answers."""
    monkeypatch.setattr(handler, "model", None)

    def send(folder: Path, *requests: tuple[Any, str]) -> list[tuple[int, dict[str, Any]]]:
        context = Context(folder, *(kind for _, kind in requests))
        if handler.model is None:
            assert handler.handle(None, context) is None
        found = handler.handle([{"body": body} for body, _ in requests], context)
        assert found is not None
        assert set(context.answered.values()) == {"application/json"}
        return [(context.statuses[index], json.loads(answer)) for index, answer in enumerate(found)]

    return send


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an archive of `shipped()`, with the .mar next to it."""
    path = tmp_path_factory.mktemp("archive") / "m.mar"
    return archived(path, shipped(), torch.zeros(2, 1, 8, 8, dtype=torch.uint8), facts=PIXELS, top_k=3, max_pixels=1000)
