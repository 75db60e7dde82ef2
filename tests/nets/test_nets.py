"""Properties of every net and file of configs/model: published sizes, shapes, blocks, plain names."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

from lathe.nets import MLP, Blocks, CifarResNet, DeepMLP, ResNet, ViT, WideResNet, blocks_of

# Parameters for 3 channels and 10 classes. He et al. 2016, table 6, has 0.27 M and 0.85 M for ResNet-20 and -56 (option
# A shortcuts); Zagoruyko and Komodakis 2016 have 36.5 M for WRN-28-10. IMAGES and TOKENS are the shipped nets.
COUNTS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet20_zero_pad": (lambda: CifarResNet(depth=20, shortcut="zero_pad"), 269_722),
    "resnet56_zero_pad": (lambda: CifarResNet(depth=56, shortcut="zero_pad"), 853_018),
    "wrn28_10": (lambda: WideResNet(depth=28, width=10), 36_479_194),
    # (784 + 1) 256 + 2 (256 + 1) 256 + (256 + 1) 10, by hand
    "mlp": (lambda: MLP(channels=1, image_size=28, num_classes=10, width=256, depth=3), 335_114),
}


def vit(channels: int, side: int) -> ViT:
    patch = next(patch for patch in (4, 11) if side % patch == 0)
    return ViT(
        channels=channels, image_size=side, num_classes=7, patch_size=patch, width=12, depth=2, heads=3, dropout=0.1
    )


# One small net of each kind: (net for these channels and image size, number of blocks).
SMALL: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {
    "mlp": (lambda c, s: MLP(channels=c, image_size=s, num_classes=7, width=12, depth=3, dropout=0.1), 2),
    "resnet20": (lambda c, s: CifarResNet(depth=20, width=4, in_channels=c, num_classes=7), 9),
    "resnet20_zero_pad": (
        lambda c, s: CifarResNet(depth=20, width=5, in_channels=c, num_classes=7, shortcut="zero_pad"),
        9,
    ),
    "resnet18": (lambda c, s: ResNet(depth=18, width=4, in_channels=c, num_classes=7), 8),
    "resnet50": (lambda c, s: ResNet(depth=50, width=4, in_channels=c, num_classes=7), 16),
    "wrn16_8": (lambda c, s: WideResNet(depth=16, width=1, in_channels=c, num_classes=7, dropout=0.1), 6),
    "deep_mlp": (lambda c, s: DeepMLP(channels=c, image_size=s, num_classes=7, width=12, depth=3, dropout=0.1), 3),
    "vit": (lambda c, s: vit(c, s), 2),
}


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count_is_the_published_one(name: str) -> None:
    make, count = COUNTS[name]
    with torch.device("meta"):
        assert size(make()) == count


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("channels", "pixels"), [(1, 8), (3, 11)])
def test_logits_have_one_column_per_class_and_every_parameter_a_gradient(name: str, channels: int, pixels: int) -> None:
    net = SMALL[name][0](channels, pixels)
    logits = net(torch.rand(2, channels, pixels, pixels))
    assert logits.shape == (2, 7)
    logits.logsumexp(1).sum().backward()
    assert [key for key, parameter in net.named_parameters() if parameter.grad is None] == []
    net.eval()
    for batch in (0, 1):
        assert net(torch.rand(batch, channels, pixels, pixels)).shape == (batch, 7)


@pytest.mark.parametrize("name", SMALL)
def test_blocks_are_the_repeated_units(name: str) -> None:
    make, count = SMALL[name]
    net = make(3, 16)
    assert isinstance(net.blocks, Blocks)
    assert blocks_of(net) == list(net.blocks)
    assert len(net.blocks) == count
    outside = {key.split(".")[0] for key, _ in net.named_parameters()} - {"blocks"}
    assert outside <= {"stem", "conv", "bn", "embed", "norm", "head"}
    seen: list[nn.Module] = []
    for block in net.blocks:
        block.register_forward_hook(lambda module, _args, _out: seen.append(module))
    x = torch.rand(2, 3, 16, 16)
    out = net.eval()(x)
    assert seen == list(net.blocks)  # each once, in order, as pipelines and activation checkpointing require
    assert torch.equal(net.leave(net.blocks(net.enter(x))), out)


def test_names_are_plain_and_stable() -> None:
    net = CifarResNet(depth=8, width=4)
    block = ["conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight", "bn2.weight", "bn2.bias"]
    shortcut = ["shortcut.conv.weight", "shortcut.bn.weight", "shortcut.bn.bias"]
    assert [name for name, _ in net.named_parameters()] == [
        *["conv.weight", "bn.weight", "bn.bias"],
        *[f"blocks.0.{name}" for name in block],
        *[f"blocks.1.{name}" for name in block + shortcut],
        *[f"blocks.2.{name}" for name in block + shortcut],
        *["head.weight", "head.bias"],
    ]
    mlp = MLP(channels=1, image_size=8, num_classes=3, width=4, depth=2)
    layers = ("stem.linear", "blocks.0.linear", "head")
    assert list(mlp.state_dict()) == [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]


FOLDER = Path(__file__).parents[2] / "configs" / "model"
IMAGES = {  # 3 channels, 32 x 32 pixels, 10 classes
    "airbench": 1_972_792,
    "deep_mlp": 1_850_634,
    "mlp": 920_842,
    "resnet18": 11_173_962,
    "resnet20": 272_474,
    "resnet32": 466_906,
    "resnet32x4": 7_410_730,
    "resnet50": 23_520_842,
    "resnet56": 855_770,
    "resnet8x4": 1_210_410,
    "vit_small": 21_341_578,
    "vit_tiny": 5_362_378,
    "wrn16_8": 10_961_370,
    "wrn40_2": 2_243_546,
}
TOKENS = {  # a vocabulary of 50257, sequences of 1024 tokens
    "gpt2_small": 124_439_808,
    "gpt_nano": 3_432_064,
}
SHIPPED = IMAGES | TOKENS
FACTS = {"channels": 3, "image_size": 32, "num_classes": 10, "vocab_size": 50257, "length": 1024}


@pytest.mark.parametrize("name", SHIPPED)
def test_config_builds_its_net(name: str) -> None:
    cfg = OmegaConf.merge({"data": FACTS}, {"model": OmegaConf.load(FOLDER / f"{name}.yaml")})
    with torch.device("meta"):
        net = instantiate(cfg.model.net)
    assert size(net) == SHIPPED[name]


def test_forward_is_relu_of_affine_maps() -> None:
    net = MLP(channels=2, image_size=3, num_classes=4, width=5, depth=2)
    x = torch.rand(6, 2, 3, 3)
    hidden = x.reshape(6, 18)
    for layer in (net.stem.linear, net.blocks[0].linear):
        hidden = (hidden @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(net(x), hidden @ net.head.weight.T + net.head.bias)


def test_the_deep_stack_is_linear_layer_norm_and_gelu() -> None:
    net = DeepMLP(channels=2, image_size=3, num_classes=4, width=5, depth=2)
    x = torch.rand(6, 2, 3, 3)
    hidden = x.reshape(6, 18)
    for layer in (net.stem, *net.blocks):
        hidden = F.gelu(F.layer_norm(F.linear(hidden, layer.linear.weight, layer.linear.bias), (5,)))
    torch.testing.assert_close(net(x), F.linear(hidden, net.head.weight, net.head.bias))
