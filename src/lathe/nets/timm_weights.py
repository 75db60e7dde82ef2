"""Weights of elsewhere for timm's nets, fitted by timm's own functions to another number of channels or classes, or to
another size of image."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lathe.errors import UserError, require


def is_timm(net: nn.Module) -> bool:
    return type(net).__module__.startswith("timm.") and isinstance(getattr(net, "pretrained_cfg", None), dict)


def take_timm_weights(net: nn.Module, weights: Mapping[str, Tensor] | None, channels: int, key: str) -> list[str]:
    """Puts `weights`, or where these are None those that timm publishes for it, into one of timm's nets that takes
    images of `channels` channels, and says so: lines of what was taken, and what the net keeps as it was made.

    All of the net has to be there, but for a head, which is left out where it is for other classes. The first
    convolution is fitted to the channels, and so are embeddings of positions to the image's size.

    Raises UserError for weights of another net, and where those that timm publishes can't be had.
    """
    from timm.models import clean_state_dict, load_pretrained, model_entrypoint

    cfg: dict[str, Any] = {**net.pretrained_cfg, "num_classes": 0, "label_offset": 0}  # type: ignore[dict-item]
    # as many classes as are asked for below: heads are left to `_checked`
    name = cfg["architecture"]
    # by this name a file of timm's has the function that makes weights of others, or of other sizes, its own
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
    except Exception as error:  # of timm, the network, or names that a function of timm's looks for
        said = " ".join(str(error).split())[:200] or type(error).__name__
        end = "take other weights" if weights is not None else "give a file instead"
        raise UserError(f"{key}: these can't be made the weights of {name} ({said}): {end}.") from error
    return lines or [f"{key}: the weights that timm publishes for {name} are taken."]


def _names(value: Any, *ends: str) -> set[str]:
    """The parameters of the layers that timm's facts name: none, one or several."""
    layers = (value,) if isinstance(value, str) else value or ()
    return {f"{layer}.{end}" for layer in layers for end in ends}


def _checked(net: nn.Module, state: dict[str, Any], cfg: dict[str, Any], channels: int, key: str) -> list[str]:
    """Takes out of `state` what the net has no place for, and says so."""
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
