"""Plain nets: `forward(x) -> logits`, repeated units in `blocks`. No Lightning, no Hydra, no torch.distributed."""

from lathe.nets.blocks import Blocks, blocks_of
from lathe.nets.mlp import MLP
from lathe.nets.resnet import CifarResNet, ResNet
from lathe.nets.wideresnet import WideResNet

__all__ = ["MLP", "Blocks", "CifarResNet", "ResNet", "WideResNet", "blocks_of"]
