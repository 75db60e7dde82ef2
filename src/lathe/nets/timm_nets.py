"""Nets of timm (Wightman 2019, "PyTorch Image Models"), with timm's parameter names, and their pretrained weights."""

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from lathe.config.types import Count, Name, ShareBelowOne
from lathe.config.validation import validated
from lathe.errors import ArgumentError, UserError, did_you_mean, require, uninstalled
from lathe.nets.blocks import blocks_of, run
from lathe.nets.init import describe_loaded

UNFIT = (AssertionError, ValueError, RuntimeError, IndexError, ZeroDivisionError)  # what nets raise for wrong sizes


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
    facts = timm.get_pretrained_cfg(name)
    if image_size is not None and facts is not None and facts.fixed_input_size:
        options["img_size"] = image_size
    try:
        net: nn.Module = timm.create_model(name, in_chans=in_channels, num_classes=num_classes, **options)
    except (TypeError, *UNFIT) as error:  # an option that the net lacks, an unknown tag, or a size
        raise _unfit(name, in_channels, image_size, error) from None  # the message contains the cause
    for part in net.children() if "img_size" in options else ():  # patches could leave out pixels at the edges
        side = getattr(part, "patch_size", None)
        side = side[0] if isinstance(side, tuple) else side
        if isinstance(side, int) and options["img_size"] % side:
            raise ArgumentError(f"patch_size={side} of {name} does not divide the image size {image_size}.")
    blocks = find_blocks(net)
    if blocks and not hasattr(net, "blocks"):
        net.__dict__["blocks"] = blocks  # a plain list: names of parameters stay timm's
    if image_size is not None:
        add_parts(net, (2, in_channels, image_size, image_size))
        _try(net, name, torch.empty(2, in_channels, image_size, image_size, device="meta"), num_classes)
    return net


def _unfit(name: str, channels: int, size: int | None, error: Exception) -> ArgumentError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return ArgumentError(f"name={name} is no net for images of {channels} x {size or '?'} x {size or '?'} ({reason}).")


def _try(net: nn.Module, name: str, images: Tensor, classes: int) -> None:
    """Run the net on the meta device, or on values if that fails."""
    training = net.training
    bare = {key: tensor.detach().to("meta") for key, tensor in [*net.named_parameters(), *net.named_buffers()]}
    net.eval()
    try:
        with torch.no_grad():
            try:
                logits = torch.func.functional_call(net, bare, (images,))
            except Exception:  # shapes that do not fit, or a net that needs values
                logits = net(torch.zeros(images.shape))
    except UNFIT as error:
        raise _unfit(name, images.shape[1], images.shape[2], error) from None
    finally:
        net.train(training)
    if not isinstance(logits, Tensor) or logits.shape != (len(images), classes):
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
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
        grown = [any(list(part.parameters()) for part in child.children()) for child in children]
        nested = [number for number, has_units in enumerate(grown) if has_units]
        if nested and nested == list(range(nested[0], nested[-1] + 1)):
            return [children[number] for number in nested]
    return []


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


def is_timm(net: nn.Module) -> bool:
    return type(net).__module__.startswith("timm.") and isinstance(getattr(net, "pretrained_cfg", None), dict)


def take_timm_weights(net: nn.Module, weights: Mapping[str, Tensor] | None, channels: int, key: str) -> list[str]:
    """Load `weights`, or those that timm publishes if None, into a net of timm; return lines for the log.

    `channels` is the net's number of input channels. All weights must be present, except a head for other classes,
    which is skipped. The first convolution is adapted to the channels, and position embeddings to the image's size.
    """
    from timm.models import clean_state_dict, load_pretrained, model_entrypoint

    cfg: dict[str, Any] = {**net.pretrained_cfg, "num_classes": 0, "label_offset": 0}  # type: ignore[dict-item]
    # as many classes as passed below: `_checked` handles heads
    name = cfg["architecture"]
    # timm's modules have a function of this name that converts weights of other sources or sizes
    own_filter = getattr(sys.modules[model_entrypoint(name).__module__], "checkpoint_filter_fn", None)
    lines: list[str] = []

    def fitted(state: dict[str, Any], net: nn.Module) -> dict[str, Any]:
        state = clean_state_dict(state)
        if own_filter is not None:
            state = own_filter(state, net)
        lines.extend(_checked(net, state, cfg, channels, key))
        return state

    if weights is not None:
        cfg |= {"state_dict": dict(weights), "custom_load": False}
    try:
        load_pretrained(net, cfg, num_classes=0, in_chans=channels, filter_fn=fitted, strict=False)
    except UserError:
        raise
    except Exception as error:  # of timm, of the network, or names that a function of timm's expects
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{key}: these are no weights of {name}, or can't be had ({reason}).") from error
    return lines or [f"{key}: the weights that timm publishes for {name} are taken."]


def _names(value: Any, *ends: str) -> set[str]:
    """Return the parameters of the layers in an entry of timm's config: none, one or several."""
    layers = (value,) if isinstance(value, str) else value or ()
    return {f"{layer}.{end}" for layer in layers for end in ends}


def _checked(net: nn.Module, state: dict[str, Any], cfg: dict[str, Any], channels: int, key: str) -> list[str]:
    """Remove from `state` what the net has no place for; return lines for the log."""
    own = net.state_dict()
    convs, head = _names(cfg.get("first_conv"), "weight"), _names(cfg.get("classifier"), "weight", "bias")
    reshaped = [name for name in sorted(head) if name in own and name in state and state[name].shape != own[name].shape]
    lacking = [
        name for name in own if name not in state and name not in head and not name.endswith("num_batches_tracked")
    ]
    require(
        not lacking,
        f"{key} does not fit {cfg['architecture']}: it has no {(lacking or [''])[0]}, its first weight is "
        f"{next(iter(state), 'nothing')}. Choose the net that it is of.",
    )
    for name, value in state.items():
        if name in own and name not in head | convs and value.shape != own[name].shape:
            theirs, ours = list(value.shape), list(own[name].shape)
            raise UserError(f"{key} does not fit {cfg['architecture']}: {name} is {theirs} there and {ours} here.")
    if all(name in state and name in own and state[name].shape == own[name].shape for name in convs):
        cfg["input_size"] = (channels, *(cfg.get("input_size") or (channels, 0, 0))[1:])  # made for these channels
    extra = [name for name in state if name not in own]
    shapes = [f"{name} ({list(state[name].shape)} there, {list(own[name].shape)} here)" for name in reshaped]
    absent = [name for name in sorted(head) if name in own and name not in state]
    for name in (*reshaped, *extra):
        del state[name]
    return describe_loaded(f"{key}: {len(state)} of {len(own)} weights are taken.", absent, shapes, extra)
