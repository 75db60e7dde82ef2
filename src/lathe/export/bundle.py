"""An opened export: its verified and loaded file, and its manifest."""

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
    """`run` maps inputs as in `manifest["input"]`, `[batch, ...]`, to logits `[batch, ..., classes]`."""

    folder: Path
    manifest: dict[str, Any]
    run: Callable[[Array], Array]

    def __call__(self, inputs: Array) -> Array:
        """Return logits of uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`."""
        return self.run(prepared(self.manifest, inputs))


def open_bundle(
    folder: str | Path, threads: int | None = None, key: str = "target", device: str | None = None
) -> Bundle:
    """Open the export in `folder`, with `threads` as its target's `load` takes them.

    `device` is a GPU such as `cuda:1`; None is the target's default.

    Raises:
        UserError: the folder has no export, the export was changed, its target can't be used here or on `device`, it
            has only weights, or it is an untrusted program from another machine.
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
    """Raise UserError for an untrusted program from another machine."""
    if manifest["target"] in export.PROGRAMS and not made_here(manifest):
        trust.allow_program(str(manifest["target"]), folder)


def prepared(manifest: dict[str, Any], inputs: Array) -> Array:
    """Return the input that the file takes: pixels, normalized unless the graph does it."""
    preprocess = manifest["preprocess"]
    if preprocess is None or preprocess["in_graph"]:
        return inputs
    mean, std = (np.asarray(preprocess[name], dtype=np.float64)[:, None, None] for name in ("mean", "std"))
    scale, shift = (1 / (255 * std)).astype(np.float32), (-mean / std).astype(np.float32)
    return inputs.astype(np.float32) * scale + shift
