"""Every file of configs/model builds the net that it names, and its sizes can be overridden."""

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lathe.nets.init import apply_init

FOLDER = Path(__file__).parents[2] / "configs" / "model"
COUNTS = {  # 3 channels, 32 x 32 pixels, 10 classes
    "mlp": 920_842,
    "resnet18": 11_173_962,
    "resnet20": 272_474,
    "resnet50": 23_520_842,
    "resnet56": 855_770,
    "wrn16_8": 10_961_370,
    "wrn40_2": 2_243_546,
}


def read(name: str):
    facts = {"data": {"channels": 3, "image_size": 32, "num_classes": 10}}
    return OmegaConf.merge(facts, {"model": OmegaConf.load(FOLDER / f"{name}.yaml")}).model


def test_every_file_is_listed_here() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(COUNTS)


@pytest.mark.parametrize("name", COUNTS)
def test_config_builds_its_net(name: str) -> None:
    config = read(name)
    assert set(config) == {"_target_", "label_smoothing", "init", "net"}
    assert config.init is None
    with torch.device("meta"):
        net = instantiate(config.net)
    assert sum(parameter.numel() for parameter in net.parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", COUNTS)
def test_width_and_init_can_be_overridden(name: str) -> None:
    config = read(name)
    config.net.width = 4 if config.net.width > 8 else 1
    net = instantiate(config.net)
    apply_init(net, OmegaConf.merge(config, {"init": ["orthogonal", "kaiming_normal"]}).init)
    assert net.head.bias.abs().sum() == 0
    small = sum(parameter.numel() for parameter in net.parameters())
    assert small < COUNTS[name] / 3
    assert net.eval()(torch.rand(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize("name", COUNTS)
def test_every_key_has_a_comment(name: str) -> None:
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    assert [line for line in lines if "#" not in line and line != "net:"] == []
