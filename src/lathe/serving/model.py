"""Loads an export of a run, or the run's own net (`target=module`), as a function of arrays."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lathe.errors import UserError
from lathe.export.bundle import check_origin, open_bundle
from lathe.export.manifest import PLAIN
from lathe.runs.rundir import open_run
from lathe.serving.described import described

MODULE = "module"
RECEIPT_BYTES = 2**24
Array = np.ndarray[Any, Any]


def describe(run: str, target: str, checkpoint: str) -> dict[str, Any]:
    """Return an export's manifest, or the same facts of the module.

    Raises:
        UserError: not a run, no such export, or a stale one.
    """
    opened = open_run(run, "run")
    path = opened.path
    if target == MODULE or not (path / "exports" / target).is_dir():  # don't propose an export that would be refused
        from lathe.runs.inference import check_input_spec

        check_input_spec(opened.config, run)
    if target == MODULE:
        from lathe.runs.export_model import open_export_model

        return {"target": MODULE, **open_export_model(path, checkpoint=checkpoint).facts}
    from lathe import export
    from lathe.export import manifest
    from lathe.runs.export_staleness import check_current

    found = manifest.read(_folder(path, target))
    kind = export.get(str(found["target"]))
    missing = kind.available()
    if missing is not None:
        raise UserError(missing)
    if not kind.computes:
        raise UserError(
            f"target={target} holds weights alone, which compute nothing without their net: choose another target."
        )
    check_origin(_folder(path, target), found)
    if checkpoint not in ("best", found["checkpoint"]):  # best is the default
        raise UserError(
            f"checkpoint={checkpoint}: target={target} was exported from {found['checkpoint']}.ckpt: leave it out, or "
            "export the other."
        )
    if not described(found):
        again = "export the run again with scripts/export.py"
        raise UserError(f"{_folder(path, target) / manifest.NAME} does not describe a net that can be served: {again}.")
    check_current(opened, target, found)
    return found


def _folder(run: Path, target: str) -> Path:
    folder = run / "exports" / target
    if not PLAIN.fullmatch(target) or not folder.is_dir():
        made = sorted(
            entry.name for entry in (run / "exports").glob("*") if entry.is_dir() and not entry.name.startswith(".")
        )
        raise UserError(
            f"target={target}: {run} has no such export ({'it has ' + ', '.join(made) if made else 'it has none'}): "
            "make it with python "
            f"scripts/export.py run={run} target={target}, or serve the module with target={MODULE}."
        )
    return folder


def load(run: str, target: str, checkpoint: str, threads: int, device: str | None = None) -> Callable[[Array], Array]:
    """Return the net as a function of arrays.

    `device` is a GPU, such as `cuda:0`; None is the CPU, or the device of the export's runtime.
    Inputs are uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`, outputs logits `[batch,
    ..., classes]`.
    """
    if device is not None and device.startswith("cuda"):
        import torch

        torch.cuda.set_device(device)  # a runtime's own allocations are then there as well
    if target != MODULE:
        return open_bundle(_folder(Path(run), target), threads, device=device)
    import torch

    from lathe.export.torch_runner import on_arrays
    from lathe.runs.export_model import open_export_model

    torch.set_num_threads(threads)
    net = open_export_model(run, checkpoint=checkpoint).net
    if device is not None:
        there = net.to(device)
        return on_arrays(lambda x: there(x).float(), device=torch.device(device))

    def call(x: Array) -> Array:
        with torch.inference_mode():
            return net(torch.from_numpy(x)).float().numpy()

    return call


def example(facts: dict[str, Any]) -> Array:
    """Return one sample of zeros: uint8 pixels `[1, channels, height, width]` or int64 ids `[1, time]`."""
    given = facts["input"]
    sides = {"height": 32, "width": 32, "time": min(int(given.get("longest") or 8), 8)}
    if facts["preprocess"] is not None:
        sides["height"], sides["width"] = facts["preprocess"]["size"]
    shape = [1, *(side if isinstance(side, int) else sides[side] for side in given["shape"][1:])]
    return np.zeros(shape, np.uint8 if facts["preprocess"] is not None else np.int64)


def receipt(run: Path) -> Any:
    """Return the run's receipt, or None. Links are not followed, since /info publishes the content."""
    path = run / "receipt.json"
    if not path.is_file() or path.is_symlink():
        return None
    try:
        if path.stat().st_size > RECEIPT_BYTES:
            raise ValueError("larger than any receipt")
        return json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path} can't be read as a receipt: make it again with python scripts/receipt.py run={run}."
        ) from error
