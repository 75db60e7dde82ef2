"""A file with only weights, for use with the net's Python code. Integers of few bits are packed."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.net import integer_weight, quantized_layers
from lathe.compression.structure import apply_structure, structure_of
from lathe.errors import UserError, require
from lathe.export import Target, export_target
from lathe.export.bundle import readable, whole

VERSION = 1
# observer buffers, which only training needs
OBSERVED = ("minimum", "maximum", "updates")
SCALES = (".weight_quantizer.scale", ".weight_quantizer.zero_point")  # stored with the integers


@export_target("weights")
class Weights(Target):
    """The net's weights and structure for `torch.load(path, weights_only=True)`; `restore` reads them.

    The content is `{"version", "structure", "state", "integers", "aliases"}`: `state` has tensors by their plain names;
    a quantized layer's weight is in `integers` instead, with its `data` (int8, or uint8 with packed bits), `shape`,
    `bits` and `scale`; `aliases` are further names of a tensor.
    """

    suffix, computes, takes_cores = ".pt", False, True

    def export(self, net: nn.Module, example: Any, path: str | Path) -> None:
        with whole(path) as temporary:
            torch.save(content_of(net), temporary)

    def restore(self, net: nn.Module, path: str | Path) -> nn.Module:
        return restore(net, path)


def content_of(net: nn.Module) -> dict[str, Any]:
    """Return the content of a file of the net's weights (see `Weights`); tensors have separate storages."""
    state: dict[str, Tensor] = {}
    integers: dict[str, dict[str, Any]] = {}
    aliases: dict[str, str] = {}
    names: dict[int, str] = {}  # tensors with two names, such as a tied head's, are written once
    layers = quantized_layers(net)
    rounding = {id(layer) for layer in layers.values()}
    # a weight that a float layer reads as well, such as an excluded tied head, is stored as floats
    floats = {id(p) for module in net.modules() if id(module) not in rounding for p in module.parameters(recurse=False)}
    for name, layer in layers.items():
        weight, quantizer = getattr(layer, "weight", None), getattr(layer, "weight_quantizer", None)
        if weight is None or quantizer is None or not quantizer.is_enabled or id(weight) in floats:
            continue
        key = f"{name}.weight"
        if id(weight) in names:
            aliases[key] = names[id(weight)]
            continue
        names[id(weight)] = key
        values, scale = integer_weight(layer)
        integers[key] = {
            "data": pack(values.cpu(), quantizer.bits),
            "shape": list(values.shape),
            "bits": quantizer.bits,
            "scale": scale.detach().float().cpu().clone(),
        }
    stored = {**integers, **aliases}
    skipped = {
        name for name in _derived(net) if not name.endswith(SCALES) or f"{name.rsplit('.', 2)[0]}.weight" in stored
    }
    for name, tensor in net.state_dict(keep_vars=True).items():
        if name in stored or name in skipped:
            continue
        if id(tensor) in names:
            aliases[name] = names[id(tensor)]
        else:
            names[id(tensor)] = name
            state[name] = tensor.detach().cpu().contiguous().clone()
    structure = structure_of(net)
    return {"version": VERSION, "structure": structure, "state": state, "integers": integers, "aliases": aliases}


def _derived(net: nn.Module) -> set[str]:
    """Return names of the buffers that can be left out: scales of integer weights, and observers'."""
    names: set[str] = set()
    for name, layer in quantized_layers(net).items():
        for role in dict(layer.named_children()):
            fields = OBSERVED if role != "weight_quantizer" else (*OBSERVED, "scale", "zero_point")
            names |= {f"{name}.{role}.{field}" for field in fields}
    return names


def pack(integers: Tensor, bits: int) -> Tensor:
    """Pack integers of fewer than 8 bits, lowest bit first, in uint8 of one axis; copy those of 8 bits."""
    if bits == 8:
        return integers.contiguous().clone()
    raised = (integers.flatten().to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8).numpy()
    return torch.from_numpy(np.packbits((raised[:, None] >> np.arange(bits, dtype=np.uint8)) & 1, bitorder="little"))


def unpack(data: Tensor, shape: list[int], bits: int) -> Tensor:
    """Return the int8 integers from which `pack` made `data`."""
    if bits == 8:
        return data.view(shape)
    count = int(np.prod(shape))
    single = np.unpackbits(data.numpy(), count=count * bits, bitorder="little").reshape(count, bits)
    raised = (single.astype(np.int16) << np.arange(bits, dtype=np.int16)).sum(1) - 2 ** (bits - 1)
    return torch.from_numpy(raised.astype(np.int8)).view(shape)


def restore(net: nn.Module, path: str | Path) -> nn.Module:
    """Give `net`, as its configuration builds it, a file's structure and weights, in place; return it.

    A rounded weight gets the values of its integers and a fixed range, so that outputs equal those of the exported net.
    """
    path = readable(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        assert content["version"] == VERSION
    except Exception as error:  # a torn file can raise anything
        raise UserError(f"{path} can't be read as weights of this version of Lathe: export the run again.") from error
    return fill(net, content, path)


def fill(net: nn.Module, content: dict[str, Any], path: str | Path) -> nn.Module:
    """Restore the content of a file, from `content_of`; messages name `path`."""
    try:
        return _filled(net, content, path)
    except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:  # of untrusted content
        message = f"{path} can't be read as weights ({type(error).__name__}): it is damaged; export the run again."
        raise UserError(message) from error


def _filled(net: nn.Module, content: dict[str, Any], path: str | Path) -> nn.Module:
    apply_structure(net, content["structure"])
    state, layers, kind = dict(content["state"]), quantized_layers(net), type(net).__name__
    for key, stored in content["integers"].items():
        integers, scale = unpack(stored["data"], stored["shape"], stored["bits"]), stored["scale"]
        name = key.removesuffix(".weight")
        message = f"{path} has integers for {name}, which {kind} lacks: choose the net that was exported."
        require(name in layers, message)
        quantizer = layers[name].weight_quantizer
        assert isinstance(quantizer, FakeQuantize)
        values = quantizer.grouped(integers).float()
        state[key] = (values * quantizer.view(scale, values)).view(integers.shape)
        for other, layer in layers.items():
            if getattr(layer, "weight_quantizer", None) is quantizer:
                state[f"{other}.weight_quantizer.scale"] = scale
                state[f"{other}.weight_quantizer.observing"] = torch.zeros_like(quantizer.observing)
    state |= {alias: state[name] for alias, name in content["aliases"].items()}
    own = net.state_dict()
    left_out = {name: own[name] for name in _derived(net) - state.keys() if name in own}
    try:
        net.load_state_dict({**left_out, **state})
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = lines[min(1, len(lines) - 1)].rstrip(".")[:200]
        raise UserError(f"{path} does not fit {kind}: choose the net that was exported ({reason}).") from error
    return net
