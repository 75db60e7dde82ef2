"""What is before and behind the blocks of timm's nets, so that a pipeline can cut them."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lathe.nets.blocks import blocks_of, run

# What runs one after the other before the blocks, and between them and `forward_head`; the first whose names a net has
# is tried.
ENDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("conv1", "bn1", "act1", "maxpool"), ()),  # resnet and its kin
    (("patch_embed", "_pos_embed", "patch_drop", "norm_pre"), ("norm",)),  # vit, deit
    (("patch_embed",), ("norm",)),  # swin
    (("conv_stem", "bn1"), ("conv_head", "bn2")),  # efficientnet
    (("conv_stem", "bn1"), ()),  # mobilenetv3
    (("stem",), ("norm_pre",)),  # convnext
    (("stem",), ("final_conv",)),  # regnet, byobnet
    (("stem",), ("norm",)),  # mixer, resnetv2
    (("stem",), ()),  # hgnet
)


def add_parts(net: nn.Module, images: Sequence[int]) -> None:
    """Gives a net of timm `enter` and `leave`, for which `forward(x) == leave(blocks(enter(x)))`, and `is_its_parts`,
    which tries on random images of the shape `images` whether that holds; nothing where its parts are not known.
    """
    for before, behind in ENDS:
        if blocks_of(net) and all(callable(getattr(net, name, None)) for name in (*before, *behind, "forward_head")):
            # in the object's own dict: neither modules of the net's nor attributes of its class
            net.__dict__["enter"] = functools.partial(_in_turn, net, before)
            net.__dict__["leave"] = functools.partial(_in_turn, net, (*behind, "forward_head"))
            net.__dict__["is_its_parts"] = functools.partial(_is_its_parts, net, tuple(images))
            return


def _in_turn(net: nn.Module, names: tuple[str, ...], x: Tensor) -> Tensor:
    for name in names:
        x = getattr(net, name)(x)
    return x


def _is_its_parts(net: nn.Module, shape: tuple[int, ...]) -> bool:
    training = net.training
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(net.parameters()))
    net.eval()
    try:
        with torch.no_grad():
            whole = net(x)
            parts = net.leave(run(blocks_of(net), net.enter(x)))  # type: ignore[operator]
            return bool(torch.allclose(whole, parts, rtol=1e-5, atol=1e-6))
    except Exception:  # whatever a net asks of its blocks that a chain does not give them
        return False
    finally:
        net.train(training)
