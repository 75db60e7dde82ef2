"""Every file of configs/model builds the net in its name."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn

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
COUNTS = IMAGES | TOKENS
FACTS = {"channels": 3, "image_size": 32, "num_classes": 10, "vocab_size": 50257, "length": 1024}


def read(name: str, **facts: int):
    return OmegaConf.merge({"data": FACTS | facts}, {"model": OmegaConf.load(FOLDER / f"{name}.yaml")}).model


def size(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())


@pytest.mark.parametrize("name", COUNTS)
def test_config_builds_its_net(name: str) -> None:
    config = read(name)
    with torch.device("meta"):
        net = instantiate(config.net)
    assert size(net) == COUNTS[name]
