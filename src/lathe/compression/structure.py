"""Structural changes of compression, as plain data to rebuild a net before loading a checkpoint."""

from typing import Any

from torch import nn

from lathe.errors import UserError


def structure_of(net: nn.Module) -> dict[str, Any]:
    """Return the changes, in the order to repeat them, as plain data; empty for a net as configured."""
    if not any("plan" in vars(module) or "_channels_removed" in vars(module) for module in net.modules()):
        return {}  # avoids the imports for most nets
    from lathe.compression import channels, quantization

    descriptions = {"channels": channels.describe(net), "quantization": quantization.describe(net)}
    return {name: description for name, description in descriptions.items() if description}


def apply_structure(net: nn.Module, structure: dict[str, Any]) -> None:
    """Repeat the changes on an unchanged net, or verify them, in place; load the weights afterwards.

    Raises:
        UserError: the net has no such layers, or `structure` does not come from `structure_of`.
    """
    if not structure:
        return
    from lathe.compression import channels, quantization

    try:
        if "channels" in structure and channels.describe(net) != structure["channels"]:
            channels.rebuild(net, structure["channels"])
        if "quantization" in structure and quantization.describe(net) != structure["quantization"]:
            quantization.rebuild(net, structure["quantization"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(
            f"The checkpoint's structure can't be applied to {type(net).__name__} ({type(error).__name__}): the "
            "checkpoint is damaged or of another net. Use another checkpoint."
        ) from error
