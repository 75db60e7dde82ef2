"""An opened export: its verified and loaded file, and its manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lathe import export, trust
from lathe.errors import require
from lathe.export import Array
from lathe.export import manifest as manifests
from lathe.export.inputs import as_list
from lathe.export.torch_runner import prepared
from lathe.trust import made_here


@dataclass(frozen=True)
class Bundle:
    """`run` maps inputs as in `manifest["input"]`, `[batch, ...]`, to logits `[batch, ..., classes]`.

    For the core of a LightningModule it takes an array for each of `manifest["inputs"]`, and returns one for each of
    `manifest["outputs"]`: one array, or several in a list.
    """

    folder: Path
    manifest: dict[str, Any]
    run: Callable[..., Any]

    def __call__(self, *arrays: Array, **named: Array) -> Any:
        """Return logits of uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`.

        For a core, the arrays are its inputs in their order, or by name, and the outputs come in a dict by name.
        """
        if "inputs" not in self.manifest:
            return self.run(prepared(self.manifest, *arrays))
        given = [*arrays, *(named[entry["name"]] for entry in self.manifest["inputs"][len(arrays) :])]
        outputs = (entry["name"] for entry in self.manifest["outputs"])
        return dict(zip(outputs, as_list(self.run(*given)), strict=True))


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
        device is None or (target.has_gpu and "inputs" not in manifest),
        f"{key}={name} runs on CPUs alone, not on {device}: leave trainer.accelerator=cpu, or export to onnx, "
        "torch_export, aot_inductor or tensorrt.",
    )
    return Bundle(folder, manifest, target.load(folder / manifest["file"], threads, device))


def check_origin(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise UserError for an untrusted program from another machine."""
    if export.get(manifest["target"]).is_program and not made_here(manifest):
        trust.allow_program(str(manifest["target"]), folder)
