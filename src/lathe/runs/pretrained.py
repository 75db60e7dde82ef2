"""Pretrained weights of timm's nets, from which a training begins."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from lathe.errors import require
from lathe.export.manifest import sha256
from lathe.nets.timm_weights import is_timm, take_timm_weights
from lathe.runs.foreign_weights import read_weights


def take_pretrained(net: nn.Module, model: Mapping[str, Any]) -> list[str]:
    """Puts the pretrained weights that `model` of a configuration names into one of timm's nets, and says so: lines of
    what was taken, and what the net keeps as it was made. They are those of a file, or for true those that timm
    publishes.

    Raises:
        UserError: the net is none of timm's, there are no such weights, the file's SHA-256 is another one, or they are
            those of another net.
    """
    source, digest, channels = model["pretrained"], model.get("sha256"), model["net"].get("in_channels", 3)
    key = f"model.pretrained={str(source).lower() if isinstance(source, bool) else source}"
    require(
        is_timm(net),
        f"{key} is for model=timm, and {type(net).__name__} is none of timm's nets: use ckpt_path=<file> "
        "ckpt_strict=false.",
    )
    if source is True:
        return take_timm_weights(net, None, channels, key)
    path = Path(source)
    require(path.is_file(), f"{key}: there is no such file.")
    if digest is not None:
        found = sha256(path)
        require(
            found == digest.lower(),
            f"{key}: the file's SHA-256 is {found}, and model.sha256 says {digest.lower()}: it is another file, or a "
            "damaged one.",
        )
    return take_timm_weights(net, read_weights(path, "model.pretrained")["state_dict"], channels, key)
