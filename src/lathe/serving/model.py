"""Loads an export of a run, or the run's own net (`target=module`), as a function of arrays."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe import export
from lathe.errors import require
from lathe.export import manifest as manifests
from lathe.export.bundle import check_origin, open_bundle
from lathe.export.torch_runner import on_arrays
from lathe.measure.calls import Call
from lathe.runs.checkpoints import check_current
from lathe.runs.export_model import open_core, open_export_model
from lathe.runs.inference import check_input_spec, is_lightning
from lathe.runs.rundir import open_run
from lathe.serving.named import is_batched, pack, packed_net
from lathe.tasks.core import EXAMPLE

MODULE = "module"
Array = np.ndarray[Any, Any]


def describe(run: str, target: str, checkpoint: str) -> dict[str, Any]:
    """Return an export's manifest, or the same facts of the module.

    Raises:
        UserError: not a run, no such export, or one of earlier weights, of another checkpoint or from elsewhere.
    """
    opened = open_run(run, "run")
    core, folder = is_lightning(opened.config), opened.path / "exports" / target
    there = manifests.PLAIN.fullmatch(target) is not None and folder.is_dir()
    if not core and (target == MODULE or not there):  # don't propose an export that would be refused
        check_input_spec(opened.config, run)
    if target == MODULE:
        return {
            "target": MODULE,
            **(open_core if core else open_export_model)(opened.path, checkpoint=checkpoint).facts,
        }
    require(
        there,
        f"target={target}: {opened.path} has no such export: make it with python scripts/export.py run={opened.path} "
        f"target={target}, or take the module with target={MODULE}.",
    )
    found = manifests.read(folder)
    kind = export.get(str(found["target"]))
    missing = kind.available()
    require(missing is None, str(missing))
    require(kind.computes, f"target={target} holds weights alone, which compute nothing: choose another target.")
    check_origin(folder, found)
    require(
        checkpoint in ("best", found["checkpoint"]),  # best is the default
        f"checkpoint={checkpoint}: target={target} was exported from {found['checkpoint']}.ckpt: leave it out, or "
        "export the other.",
    )
    check_current(opened, target, found)
    return found


def load(run: str, target: str, checkpoint: str, threads: int, device: str | None = None) -> Callable[[Array], Array]:
    """Return the net as a function of arrays.

    `device` is a GPU, such as `cuda:0`; None is the CPU, or the device of the export's runtime.
    Inputs are uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`, outputs logits `[batch,
    ..., classes]`; those of a core are structured arrays (`lathe.serving.named`).
    """
    if device is not None and device.startswith("cuda"):
        torch.cuda.set_device(device)  # a runtime's own allocations are then there as well
    if target != MODULE:
        bundle = open_bundle(Path(run, "exports", target), threads, device=device)
        return packed_net(bundle.run, bundle.manifest) if "inputs" in bundle.manifest else bundle
    torch.set_num_threads(threads)
    if is_lightning(open_run(run, "run").config):
        require(device is None, "trainer.accelerator=gpu serves nets of images and tokens: leave it cpu.")
        opened = open_core(run, checkpoint=checkpoint)
        return packed_net(on_arrays(opened.net), opened.facts)
    place = None if device is None else torch.device(device)
    net = open_export_model(run, checkpoint=checkpoint).net.to(place)
    return on_arrays(lambda x: net(x).float(), device=place)


def example(facts: dict[str, Any], run: str | Path) -> Array:
    """Return one sample of zeros: uint8 pixels `[1, channels, height, width]` or int64 ids `[1, time]`.

    For a core it is the first sample of the run's example.pt, since its values may be lengths or indices.
    """
    if "inputs" in facts:
        batched = is_batched(facts)
        call = Call.load(Path(run, EXAMPLE))
        tensors = (call[:1] if batched else call).tensors()
        return pack([tensors[entry["place"]].numpy() for entry in facts["inputs"]], facts["inputs"], batched)
    given = facts["input"]
    sides = {"height": 32, "width": 32, "time": min(int(given.get("longest") or 8), 8)}
    if facts["preprocess"] is not None:
        sides["height"], sides["width"] = facts["preprocess"]["size"]
    shape = [1, *(side if isinstance(side, int) else sides[side] for side in given["shape"][1:])]
    return np.zeros(shape, np.uint8 if facts["preprocess"] is not None else np.int64)
