"""A file with only weights, for use with the net's Python code. Integers of few bits are packed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lathe.compression.quantization.fake_quant import FakeQuantize
from lathe.compression.quantization.net import integer_weight, quantized_layers
from lathe.compression.structure import apply_structure, structure_of
from lathe.errors import UserError
from lathe.export.files import readable, whole
from lathe.export.targets.onnx_graph import Array

suffix = ".pt"
computes = False
integers: bool | None = None
VERSION = 1
# observer buffers, which only training needs
OBSERVED = ("minimum", "maximum", "updates")
SCALES = (".weight_quantizer.scale", ".weight_quantizer.zero_point")  # stored with the integers


def available() -> str | None:
    """Return None: only torch is needed."""
    return None


def export(net: nn.Module, example: Tensor, path: str | Path) -> None:
    """Write the net's weights and structure for `torch.load(path, weights_only=True)`.

    The content is `{"version", "structure", "state", "integers", "aliases"}`: `state` has tensors by their plain names;
    a quantized layer's weight is in `integers` instead, with its `data` (int8, or uint8 with packed bits), `shape`,
    `bits` and `scale`; `aliases` are further names of a tensor. `restore` reads them.
    """
    with whole(path) as temporary:
        torch.save(content_of(net), temporary)


def content_of(net: nn.Module) -> dict[str, Any]:
    """Return the content of a file of the net's weights (see `export`); tensors have separate storages."""
    state: dict[str, Tensor] = {}
    stored: dict[int, str] = {}  # tensors with two names, such as a tied head's, are written once
    aliases: dict[str, str] = {}
    integers: dict[str, dict[str, Any]] = {}
    packed: dict[int, str] = {}
    floats = _read_as_floats(net)
    for name, layer in quantized_layers(net).items():
        weight = getattr(layer, "weight", None)
        quantizer = getattr(layer, "weight_quantizer", None)
        if weight is None or quantizer is None or not quantizer.is_enabled or id(weight) in floats:
            continue
        key = f"{name}.weight"
        if id(weight) in packed:
            aliases[key] = packed[id(weight)]
            continue
        packed[id(weight)] = key
        values, scale = integer_weight(layer)
        integers[key] = {
            "data": pack(values.cpu(), quantizer.bits),
            "shape": list(values.shape),
            "bits": quantizer.bits,
            "scale": scale.detach().float().cpu().clone(),
        }
    skipped = {
        name
        for name in _derived(net)
        if not name.endswith(SCALES) or f"{_layer(name)}.weight" in {**integers, **aliases}
    }
    for name, tensor in net.state_dict(keep_vars=True).items():
        if name in integers or name in aliases or name in skipped:
            continue
        if id(tensor) in packed:
            aliases[name] = packed[id(tensor)]
        elif id(tensor) in stored:
            aliases[name] = stored[id(tensor)]
        else:
            stored[id(tensor)] = name
            state[name] = tensor.detach().cpu().contiguous().clone()
    return {
        "version": VERSION,
        "structure": structure_of(net),
        "state": state,
        "integers": integers,
        "aliases": aliases,
    }


def _read_as_floats(net: nn.Module) -> set[int]:
    """Return ids of the parameters that float layers read, such as an excluded tied head's."""
    rounding = {id(layer) for layer in quantized_layers(net).values()}
    return {id(p) for module in net.modules() if id(module) not in rounding for p in module.parameters(recurse=False)}


def _layer(name: str) -> str:
    return name.rsplit(".", 2)[0]


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
    return fill(net, _read(path), path)


def fill(net: nn.Module, content: dict[str, Any], path: str | Path) -> nn.Module:
    """Restore the content of a file, from `content_of`; messages name `path`."""
    try:
        return _filled(net, content, path)
    except (
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # of untrusted content
        raise UserError(
            f"{path} can't be read as weights ({type(error).__name__}): it is damaged; export the run again."
        ) from error


def _filled(net: nn.Module, content: dict[str, Any], path: str | Path) -> nn.Module:
    apply_structure(net, content["structure"])
    state = dict(content["state"])
    layers = quantized_layers(net)
    for key, stored in content["integers"].items():
        integers, scale = unpack(stored["data"], stored["shape"], stored["bits"]), stored["scale"]
        name = key.removesuffix(".weight")
        if name not in layers:
            raise UserError(
                f"{path} has integers for {name}, which {type(net).__name__} lacks: choose the net that was exported."
            )
        quantizer = layers[name].weight_quantizer
        assert isinstance(quantizer, FakeQuantize)
        values = quantizer.grouped(integers).float()
        state[key] = (values * quantizer.view(scale, values)).view(integers.shape)
        for other in _owners(layers, quantizer):
            state[f"{other}.weight_quantizer.scale"] = scale
            state[f"{other}.weight_quantizer.observing"] = torch.zeros_like(quantizer.observing)
    state |= {alias: state[name] for alias, name in content["aliases"].items()}
    missing = _derived(net) - state.keys()
    own = net.state_dict()
    try:
        net.load_state_dict({**{name: own[name] for name in missing if name in own}, **state})
    except RuntimeError as error:
        raise UserError(
            f"{path} does not fit {type(net).__name__}: choose the net that was exported ({_first(error)})."
        ) from error
    return net


def _owners(layers: dict[str, nn.Module], quantizer: nn.Module) -> list[str]:
    return [name for name, layer in layers.items() if getattr(layer, "weight_quantizer", None) is quantizer]


def _first(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[min(1, len(lines) - 1)].rstrip(".")[:200]


def _read(path: str | Path) -> dict[str, Any]:
    try:
        content = torch.load(readable(path, "path"), map_location="cpu", weights_only=True)
        assert content["version"] == VERSION
    except UserError:
        raise
    except Exception as error:  # a torn file can raise anything
        raise UserError(f"{path} can't be read as weights of this version of Lathe: export the run again.") from error
    return dict(content)


def load(path: str | Path, threads: int | None = None) -> Callable[[Array], Array]:
    """Raise UserError: weights can't compute without a net; use `restore`."""
    raise UserError(
        f"{path} holds weights alone: lathe.export.get('weights').restore(net, path) puts them into a net; or use "
        "another target."
    )
