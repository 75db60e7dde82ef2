"""Changes that compression made to a net besides its weights, as plain data: enough to rebuild the net and load a
checkpoint into it.
"""

from typing import Any

from torch import nn

from lathe.errors import UserError


def structure_of(net: nn.Module) -> dict[str, Any]:
    """Return the changes in the order in which they have to be repeated; empty for a net as configured.

    Numbers, strings, lists and dicts only, for a checkpoint or JSON.
    """
    if not any("plan" in vars(module) or "_channels_removed" in vars(module) for module in net.modules()):
        return {}  # most nets: without importing what follows
    from lathe.compression import channels, quantization

    found = {"channels": channels.describe(net), "quantization": quantization.describe(net)}
    return {name: description for name, description in found.items() if description}


def apply_structure(net: nn.Module, structure: dict[str, Any]) -> None:
    """Repeat the changes on a net that has none of them, or exactly these, in place. Load the weights afterwards.

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
