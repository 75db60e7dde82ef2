"""Fixtures of nets, quantized and not, for the tests of export targets; conftest files import them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.quantization import LayerPlan, calibrate, freeze_observers, quantize
from lathe.nets import MLP, CifarResNet

__all__ = ["images", "make_images", "make_mlp", "make_resnet", "quantized"]


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

    def make(net: nn.Module, inputs: Tensor, plan: LayerPlan | None = None, **overrides: LayerPlan) -> nn.Module:
        quantize(net, inputs[:2], plan or LayerPlan(), overrides)
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
