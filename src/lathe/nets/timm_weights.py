"""Loads external weights into timm's nets; timm adapts them to channels, classes and image size."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lathe.errors import UserError, require


def is_timm(net: nn.Module) -> bool:
    return type(net).__module__.startswith("timm.") and isinstance(getattr(net, "pretrained_cfg", None), dict)


def take_timm_weights(net: nn.Module, weights: Mapping[str, Tensor] | None, channels: int, key: str) -> list[str]:
    """Load `weights`, or those that timm publishes if None, into a net of timm; return lines for the log.

    `channels` is the net's number of input channels. All weights must be present, except a head for other classes,
    which is skipped. The first convolution is adapted to the channels, and position embeddings to the image's size.
    Raises UserError for weights of another net, or if timm's published ones can't be downloaded.
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
        said = " ".join(str(error).split())[:200] or type(error).__name__
        end = "take other weights" if weights is not None else "give a file instead"
        raise UserError(f"{key}: these can't be made the weights of {name} ({said}): {end}.") from error
    return lines or [f"{key}: the weights that timm publishes for {name} are taken."]


def _names(value: Any, *ends: str) -> set[str]:
    """Return the parameters of the layers in an entry of timm's config: none, one or several."""
    layers = (value,) if isinstance(value, str) else value or ()
    return {f"{layer}.{end}" for layer in layers for end in ends}


def _checked(net: nn.Module, state: dict[str, Any], cfg: dict[str, Any], channels: int, key: str) -> list[str]:
    """Remove from `state` what the net has no place for; return lines for the log."""
    own = net.state_dict()
    convs, head = _names(cfg.get("first_conv"), "weight"), _names(cfg.get("classifier"), "weight", "bias")
    other = [name for name in sorted(head) if name in own and name in state and state[name].shape != own[name].shape]
    lacking = [
        name for name in own if name not in state and name not in head and not name.endswith("num_batches_tracked")
    ]
    first = next(iter(state), "nothing")
    require(
        not lacking,
        f"{key} does not fit {cfg['architecture']}: it has no {(lacking or [''])[0]}, its first weight is {first}; "
        "choose the net that it is of, or use ckpt_path with ckpt_map.",
    )
    for name, value in state.items():
        if name in own and name not in head | convs and value.shape != own[name].shape:
            raise UserError(
                f"{key} does not fit {cfg['architecture']}: {name} is {list(value.shape)} there and "
                f"{list(own[name].shape)} here; choose the net that it is of."
            )
    if all(name in state and name in own and state[name].shape == own[name].shape for name in convs):
        cfg["input_size"] = (channels, *(cfg.get("input_size") or (channels, 0, 0))[1:])  # made for these channels
    extra = [name for name in state if name not in own]
    shapes = [f"{name} ({list(state[name].shape)} there, {list(own[name].shape)} here)" for name in other]
    absent = [name for name in sorted(head) if name in own and name not in state]
    for name in (*other, *extra):
        del state[name]
    lines = [f"{key}: {len(state)} of {len(own)} weights are taken."]
    for said, found in (
        ("Of another shape, so as they were made", shapes),
        ("Not in the file, so as they were made", absent),
        ("In the file alone", extra),
    ):
        if found:
            lines.append(f"{said}: {', '.join(found)}.")
    return lines
