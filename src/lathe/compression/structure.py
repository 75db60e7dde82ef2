"""What compression has changed about a net besides its weights, as plain data: enough to rebuild the net and load a
checkpoint into it.
"""

from typing import Any

from torch import nn

from lathe.compression import channels, quantization
from lathe.errors import UserError


def structure_of(net: nn.Module) -> dict[str, Any]:
    """The changes, in the order they have to be made again; empty for a net as its configuration builds it.

    Holds numbers, words, lists and dicts alone, so that it can be saved in a checkpoint or as JSON.
    """
    found = {"channels": channels.describe(net), "quantization": quantization.describe(net)}
    return {name: description for name, description in found.items() if description}


def apply_structure(net: nn.Module, structure: dict[str, Any]) -> None:
    """Makes the changes to a net that has none of them or just these, in place. Values of new tensors come with the
    weights.

    Raises:
        UserError: the net has no such layers, or `structure` is none that `structure_of` tells.
    """
    try:
        _apply(net, structure)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"The checkpoint's structure can't be applied to {type(net).__name__} ({type(error).__name__}): it is "
            "damaged, or that of another net; take another checkpoint."
        ) from error


def _apply(net: nn.Module, structure: dict[str, Any]) -> None:
    if "channels" in structure and channels.describe(net) != structure["channels"]:
        channels.rebuild(net, structure["channels"])
    if "quantization" in structure and quantization.describe(net) != structure["quantization"]:
        quantization.rebuild(net, structure["quantization"])
