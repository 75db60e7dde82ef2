"""Metadata of a compiled package, which C++ also reads: its input, and the machine that it is for."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from lathe.errors import UserError
from lathe.export import gpu, sums
from lathe.export.calls import Array

# dtype of the input, minimum and maximum of each side, and the number of token ids; -1 for any
DTYPE, SMALLEST, LARGEST, VALUES = "input_dtype", "input_smallest", "input_largest", "input_values"
# "1" if outputs need a processor that sums products of integers exactly, see `lathe.export.sums`
EXACT = "exact_sums"
ANY = -1
# only for a GPU: the device and the compute capability ("9.0") of the compiled kernels
DEVICE, CAPABILITY = "compiled_device", "compiled_capability"


def signature(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Return the program's input as metadata of a package."""
    name = program.graph_signature.user_inputs[0]
    entry = next(node for node in program.graph.nodes if node.name == name)
    value = entry.meta["val"]
    smallest, largest = [], []
    for side in value.shape:
        if not isinstance(side, int):
            bounds = program.range_constraints[side.node.expr]
            smallest.append(int(bounds.lower))
            largest.append(ANY if bounds.upper >= 2**31 else int(bounds.upper))
        else:
            smallest.append(side)
            largest.append(side)
    tables = [node.args[0].meta["val"] for node in entry.users if node.target == torch.ops.aten.embedding.default]
    values = [min(len(table) for table in tables) if tables else ANY]
    lists = {SMALLEST: smallest, LARGEST: largest, VALUES: values}
    return {
        DTYPE: str(value.dtype).rpartition(".")[2],
        **{key: " ".join(map(str, found)) for key, found in lists.items()},
    }


class Takes:
    """The input of a package, read from its metadata."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        if not {DTYPE, SMALLEST, LARGEST, VALUES} <= set(metadata):
            raise UserError(
                f"{path} does not say what it takes, so Lathe did not make it: export the run again with "
                "scripts/export.py."
            )
        has = {
            "AVX512": torch.backends.cpu.get_cpu_capability() == "AVX512",
            "AVX512_VNNI": torch.cpu._is_vnni_supported(),
            "AMX_TILE": torch.cpu._is_amx_tile_supported(),
        }
        lacking = next((name for name in metadata.get("AOTI_CPU_ISA", "").split() if not has.get(name, True)), None)
        if lacking:
            raise UserError(
                f"{path} was compiled for a CPU with {lacking}, which this one lacks: export the run again, here."
            )
        if metadata.get(EXACT) == "1" and not sums.exact():
            raise UserError(
                f"{path} was compiled for a CPU that sums products of 8-bit integers exactly (VNNI), which this one "
                "does not: export the run again, here."
            )
        self.name, self.dtype, self.values = path.name, np.dtype(metadata[DTYPE]), int(metadata[VALUES])
        self.sides = list(
            zip(*([int(word) for word in metadata[key].split()] for key in (SMALLEST, LARGEST)), strict=True)
        )

    def check(self, x: Array) -> None:
        """Raise UserError for another dtype or shape, or for token ids out of range."""
        fits = x.ndim == len(self.sides) and all(
            low <= side and (side <= high or high == ANY) for side, (low, high) in zip(x.shape, self.sides, strict=True)
        )
        if not fits or x.dtype != self.dtype:
            sides = ", ".join(
                str(low) if low == high else f"{low} to {'any' if high == ANY else high}" for low, high in self.sides
            )
            raise UserError(
                f"{self.name} takes {self.dtype} of shape [{sides}], not {x.dtype} of shape {list(x.shape)}."
            )
        if self.values != ANY and not 0 <= x.min() <= x.max() < self.values:
            raise UserError(
                f"{self.name} takes token ids from 0 to {self.values - 1}, not from {x.min()} to {x.max()}."
            )


def written(path: Path) -> dict[str, str]:
    """Return the metadata in a package's file without loading code; {} if unreadable."""
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("_metadata.json"))
            found = json.loads(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def placed(path: Path, metadata: Mapping[str, str], asked: str | None) -> torch.device | None:
    """Return the GPU for a package's inputs, `asked` if given; None for a package for CPUs."""
    kind = metadata.get(DEVICE)
    if kind is None:
        if asked is None:
            return None
        raise UserError(
            f"{path} was compiled for CPUs, not for {asked}: export the run again with target.aot_inductor.device=cuda."
        )
    device = torch.device(asked or kind)
    if gpu.missing(device):
        raise UserError(
            f"{path} was compiled for a GPU ({device}), and torch finds none here: open it on a machine with one, or "
            "export the run again with target.aot_inductor.device=cpu."
        )
    here = gpu.described(device).get("compute_capability")
    if metadata.get(CAPABILITY) != here:
        raise UserError(
            f"{path} was compiled for a GPU of compute capability {metadata.get(CAPABILITY)}, and this one has "
            f"{here}: export the run again, here."
        )
    return device
