"""An export in hand: its file, checked and loaded, and what its manifest says of inputs and answers."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lathe import export, trust
from lathe.errors import UserError
from lathe.export import manifest as manifests
from lathe.trust.export_signing import made_here

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Bundle:
    """`run` takes what `manifest["input"]` describes, `[batch, ...]`, and gives logits as an array `[batch, ...,
    classes]`.
    """

    folder: Path
    manifest: dict[str, Any]
    run: Callable[[Array], Array]

    def __call__(self, inputs: Array) -> Array:
        """Logits of uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`, wherever
        preprocessing happens.
        """
        return self.run(prepared(self.manifest, inputs))


def open_bundle(
    folder: str | Path, threads: int | None = None, key: str = "target", device: str | None = None
) -> Bundle:
    """The export in `folder`, with `threads` as its target's `load` takes them, on the GPU `device`, such as `cuda:1`;
    None is where its target runs by itself.

    Raises:
        UserError: there is no export, it was changed since, its target can't be used here or not on `device`, it
            computes nothing, or it is a program from elsewhere that is not trusted.
    """
    folder = Path(folder)
    manifest = manifests.read(folder, key)
    target = export.get(str(manifest["target"]))
    if not target.computes:
        raise UserError(
            f"{key}={manifest['target']} holds weights alone, which compute nothing without their net: choose "
            "another target."
        )
    check_origin(folder, manifest)
    where: dict[str, Any] = {} if device is None else {"device": device}
    if where and "device" not in inspect.signature(target.load).parameters:
        raise UserError(
            f"{key}={manifest['target']} runs on CPUs alone, not on {device}: leave trainer.accelerator=cpu, or export "
            "to onnx, torch_export, aot_inductor or tensorrt."
        )
    run = target.load(folder / manifest["file"], threads, **where)
    return Bundle(folder, manifest, run)


def check_origin(folder: Path, manifest: dict[str, Any]) -> None:
    """Raises UserError for a program from elsewhere that is not trusted."""
    if manifest["target"] in export.PROGRAMS and not made_here(manifest):
        trust.allow_program(str(manifest["target"]), folder)


def prepared(manifest: dict[str, Any], inputs: Array) -> Array:
    """Pixels as the file takes them: as they are where preprocessing is in the graph, else normalised here."""
    preprocess = manifest["preprocess"]
    if preprocess is None or preprocess["in_graph"]:
        return inputs
    mean, std = (np.asarray(preprocess[name], dtype=np.float64)[:, None, None] for name in ("mean", "std"))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return inputs.astype(np.float32) * scale + shift
