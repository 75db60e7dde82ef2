"""An opened export: its verified and loaded file, and its manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe import export, trust
from lathe.errors import require
from lathe.export import Array
from lathe.export import manifest as manifests
from lathe.export.torch_runner import prepared
from lathe.trust.export_signing import made_here


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
    name = str(manifest["target"])
    target = export.get(name)
    require(target.computes, f"{key}={name} holds weights alone, which compute nothing: choose another target.")
    check_origin(folder, manifest)
    require(
        device is None or target.has_gpu,
        f"{key}={name} runs on CPUs alone, not on {device}: leave trainer.accelerator=cpu, or export to onnx, "
        "torch_export, aot_inductor or tensorrt.",
    )
    return Bundle(folder, manifest, target.load(folder / manifest["file"], threads, device))


def check_origin(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise UserError for an untrusted program from another machine."""
    if export.get(manifest["target"]).is_program and not made_here(manifest):
        trust.allow_program(str(manifest["target"]), folder)
