"""Nets of timm (Wightman 2019, "PyTorch Image Models"), with timm's parameter names for exchange."""

import functools
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count, Name, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError, did_you_mean, uninstalled
from lathe.nets.blocks import blocks_of, run


def import_timm(name: str) -> Any:
    """Return the package for the net `name`; raise ArgumentError if it is missing or does not suit torch."""
    lacking = uninstalled("timm", "timm")
    if lacking:
        raise ArgumentError(f"name={name}: {lacking}")
    try:
        import timm
    except Exception as error:  # a torchvision built for another torch fails in many ways
        raise ArgumentError(
            f"name={name}: timm can't be imported ({' '.join(str(error).split()):.200}): install the torchvision that "
            f"was made for torch {torch.__version__}, from the index that torch came from."
        ) from None
    return timm


@validated
def timm_net(
    name: Annotated[str, Field(pattern=r"^[\w.]+$", description="a name that timm lists")],
    *,
    in_channels: Count = 3,
    num_classes: Count = 10,
    image_size: Count | None = None,
    patch_size: Count | None = None,
    drop_rate: ShareBelowOne | None = None,
    drop_path_rate: ShareBelowOne | None = None,
    global_pool: Name | None = None,
) -> nn.Module:
    """Return timm's net `name`, with new weights; options that are None have timm's defaults.

    A tag after the name (`resnet50.a1_in1k`) selects pretrained weights. `forward` takes `[batch, in_channels,
    image_size, image_size]` and returns logits `[batch, num_classes]`. Nets with sizes that depend on the image's
    (transformers, mixers) are built for `image_size`; each net is tried on such an image, on the meta device. `blocks`
    lists the repeated units in order, if timm's net has none.

    Raises ArgumentError if timm does not list the name, the net lacks an option or does not fit the images, and as
    `import_timm`.
    """
    timm = import_timm(name)
    if not timm.is_model(name):
        hint = did_you_mean(name, timm.list_models(), "timm.list_models() lists them.")
        raise ArgumentError(f"name={name}: timm has no such net; {hint}")
    options: dict[str, Any] = {
        "patch_size": patch_size,
        "drop_rate": drop_rate,
        "drop_path_rate": drop_path_rate,
        "global_pool": global_pool,
    }
    arch, _, tag = name.partition(".")
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{arch}.*")]
    if tag and tag not in tags:
        raise ArgumentError(f"name={name}: timm has no weights {tag} of {arch}; {did_you_mean(tag, tags)}")
    facts = timm.get_pretrained_cfg(name)
    fixed = image_size is not None and facts is not None and facts.fixed_input_size
    if fixed:
        options["img_size"] = image_size
    try:
        net: nn.Module = timm.create_model(name, in_chans=in_channels, num_classes=num_classes, **options)
    except TypeError as error:
        surplus = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if surplus and surplus.group(1) in options:
            raise ArgumentError(f"{surplus.group(1)}: {name} takes no such option: leave it null.") from None
        raise
    except (AssertionError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise _unfit(name, in_channels, image_size, error) from None  # the message contains the cause
    if fixed and image_size is not None:
        _divides(net, name, image_size)
    named = find_blocks(net)
    if named and not hasattr(net, "blocks"):
        net.__dict__["blocks"] = named  # a plain list: names of parameters stay timm's
    if image_size is not None:
        add_parts(net, (2, in_channels, image_size, image_size))
        _try(net, name, torch.empty(2, in_channels, image_size, image_size, device="meta"), num_classes)
    return net


def _divides(net: nn.Module, name: str, size: int) -> None:
    """Raise ArgumentError if patches would leave out pixels at the images' edges."""
    for sides in [getattr(module, "patch_size", None) for module in net.children()]:
        side = sides[0] if isinstance(sides, tuple) else sides
        if isinstance(side, int) and size % side:
            raise ArgumentError(
                f"patch_size={side} of {name} does not divide the {size} pixels of an image's side: set one that does."
            )


def _unfit(name: str, channels: int, size: int | None, error: Exception) -> ArgumentError:
    said = " ".join(str(error).split()) or type(error).__name__
    images = "" if size is None else f" for images of {channels} x {size} x {size}"
    return ArgumentError(f"name={name} is no net{images} ({said[:200]}): choose another, or another image_size.")


def _try(net: nn.Module, name: str, images: Tensor, classes: int) -> None:
    """Run the net on the meta device, or on values if that fails."""
    training = net.training
    bare = {key: tensor.detach().to("meta") for key, tensor in [*net.named_parameters(), *net.named_buffers()]}
    net.eval()
    try:
        with torch.no_grad():
            try:
                found = torch.func.functional_call(net, bare, (images,))
            except Exception:  # shapes that do not fit, or a net that needs values
                found = net(torch.zeros(images.shape))
    except (AssertionError, ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise _unfit(name, images.shape[1], images.shape[2], error) from None
    finally:
        net.train(training)
    if not isinstance(found, Tensor) or found.shape != (len(images), classes):
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ArgumentError(
            f"name={name}: expected logits of shape [batch, {classes}], got {shape}: choose a net that classifies."
        )


def find_blocks(net: nn.Module) -> list[nn.Module]:
    """Return the repeated units of one of timm's nets in execution order; empty for an unknown family.

    A family is recognized by the name of its stages: `blocks` (vit, deit, beit, eva, mixer, efficientnet, mobilenet),
    `stages` (convnext, resnetv2, byobnet, nfnet, metaformer, ...), `layers` (swin), `layer1` to `layer4` (resnet and
    relatives), `s1` to `s4` (regnet), or `features` with nested units (densenet). Stages that run their blocks, or a
    downsampling and then blocks, in sequence are split into these; others are units themselves.
    """
    parts = dict(net.named_children())
    for name in ("blocks", "stages", "layers"):
        if isinstance(parts.get(name), nn.Sequential | nn.ModuleList):
            stages = list(parts[name].children())
            return stages if name == "blocks" else [unit for stage in stages for unit in _units(stage)]
    for prefix in ("layer", "s"):
        numbered = list(takewhile(lambda name: name in parts, (f"{prefix}{i}" for i in range(1, len(parts) + 1))))
        if len(numbered) > 1:
            return [unit for name in numbered for unit in _units(parts[name])]
    if isinstance(parts.get("features"), nn.Sequential):
        children = list(parts["features"].children())
        nested = [number for number, child in enumerate(children) if any(_weighs(part) for part in child.children())]
        if nested and nested == list(range(nested[0], nested[-1] + 1)):
            return [children[number] for number in nested]
    return []


def _weighs(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _units(stage: nn.Module) -> list[nn.Module]:
    parts = dict(stage.named_children())
    chained = isinstance(stage, nn.Sequential) or all(re.fullmatch(r"b\d+", name) for name in parts)
    if chained and parts:
        return list(parts.values())
    inner = parts.get("blocks")
    if isinstance(inner, nn.Sequential) and list(parts) in (["blocks"], ["downsample", "blocks"]):
        first = [part for name, part in parts.items() if name == "downsample" and not isinstance(part, nn.Identity)]
        return [*first, *inner]
    return [stage]


# Methods that run in sequence before the blocks, and between them and `forward_head`; the first entry whose names a net
# has is used.
ENDS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("conv1", "bn1", "act1", "maxpool"), ()),  # resnet and relatives
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
    """Give a net of timm `enter`, `leave` and `is_its_parts`, if its structure is known.

    With them, `forward(x) == leave(blocks(enter(x)))`; `is_its_parts` tests that on random images of the shape
    `images`.
    """
    for before, behind in ENDS:
        if blocks_of(net) and all(callable(getattr(net, name, None)) for name in (*before, *behind, "forward_head")):
            # in the object's own dict: neither modules of the net nor attributes of its class
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
    except Exception:  # a net can require anything of its blocks that a chain lacks
        return False
    finally:
        net.train(training)
