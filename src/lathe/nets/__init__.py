"""Plain nets: `forward(images) -> logits`, repeated units in `blocks`. No Lightning, no Hydra."""

from lathe.nets.mlp import MLP
from lathe.nets.resnet import CifarResNet, ResNet
from lathe.nets.wideresnet import WideResNet

__all__ = ["MLP", "CifarResNet", "ResNet", "WideResNet"]
