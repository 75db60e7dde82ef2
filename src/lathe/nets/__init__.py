"""Plain nets: `forward(x) -> logits`, repeated units in `blocks`. No Lightning, no Hydra, no torch.distributed."""

from lathe.nets.airbench import Airbench
from lathe.nets.blocks import Blocks, blocks_of
from lathe.nets.deep_mlp import DeepMLP
from lathe.nets.gpt import GPT
from lathe.nets.mlp import MLP
from lathe.nets.resnet import CifarResNet, ResNet
from lathe.nets.timm_nets import timm_net
from lathe.nets.vit import ViT
from lathe.nets.wideresnet import WideResNet

__all__ = [
    "GPT",
    "MLP",
    "Airbench",
    "Blocks",
    "CifarResNet",
    "DeepMLP",
    "ResNet",
    "ViT",
    "WideResNet",
    "blocks_of",
    "timm_net",
]
