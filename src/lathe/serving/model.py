"""The served net: an export of a run, or the run's own net (`target=module`), as a function of one array.

For the core of a LightningModule, with named inputs and outputs as JSON or .npz, a request is one structured array with
a field for each input and a row for each sample, so that the queue and the workers treat it as they do images. A core
without an axis of samples has one row for the whole request. Requests are untrusted.
"""

import io
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe import export
from lathe.errors import UserError, require
from lathe.export.bundle import PLAIN, check_origin, open_bundle, read_manifest
from lathe.export.inputs import as_list
from lathe.export.torch_runner import on_arrays
from lathe.measure.calls import Call
from lathe.runs.checkpoints import check_current
from lathe.runs.export_model import open_core, open_export_model
from lathe.runs.inference import check_input_spec, is_lightning
from lathe.runs.rundir import open_run
from lathe.serving.decode import JSON, BadRequest, Limits, check_samples, demand, parsed, read_npy
from lathe.tasks.core import EXAMPLE

Array = np.ndarray[Any, Any]
NPZ = "application/x-npz"
BATCH = "batch"
MODULE = "module"


def describe(run: str, target: str, checkpoint: str) -> dict[str, Any]:
    """Return an export's manifest, or the same facts of the module; UserError for one that can't be used."""
    opened = open_run(run, "run")
    core, folder = is_lightning(opened.config), opened.path / "exports" / target
    there = PLAIN.fullmatch(target) is not None and folder.is_dir()
    if not core and (target == MODULE or not there):  # don't propose an export that would be refused
        check_input_spec(opened.config, run)
    if target == MODULE:
        return {
            "target": MODULE,
            **(open_core if core else open_export_model)(opened.path, checkpoint=checkpoint).facts,
        }
    fix = f"make it with python scripts/export.py run={opened.path} target={target}, or take target={MODULE}"
    require(there, f"target={target}: {opened.path} has no such export: {fix}.")
    manifest = read_manifest(folder)
    kind = export.get(str(manifest["target"]))
    require(kind.computes, f"target={target} holds weights alone, which compute nothing: choose another target.")
    check_origin(folder, manifest)
    same = checkpoint in ("best", manifest["checkpoint"])  # best is the default
    message = f"checkpoint={checkpoint}: target={target} was exported from {manifest['checkpoint']}.ckpt"
    require(same, f"{message}: leave it out, or export the other.")
    check_current(opened, target, manifest)
    return manifest


def load(run: str, target: str, checkpoint: str, threads: int, device: str | None = None) -> Callable[[Array], Array]:
    """Return the net as a function of arrays.

    `device` is a GPU, such as `cuda:0`; None is the CPU, or the device of the export's runtime.
    Inputs are uint8 pixels `[batch, channels, height, width]` or token ids `[batch, time]`, outputs logits `[batch,
    ..., classes]`; those of a core are structured arrays (`lathe.serving.model`).
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
    torch_device = None if device is None else torch.device(device)
    net = open_export_model(run, checkpoint=checkpoint).net.to(torch_device)
    return on_arrays(lambda x: net(x).float(), device=torch_device)


def example(facts: dict[str, Any], run: str | Path) -> Array:
    """Return one sample of zeros: uint8 pixels `[1, channels, height, width]` or int64 ids `[1, time]`.

    For a core it is the first sample of the run's example.pt, since its values may be lengths or indices.
    """
    if "inputs" in facts:
        batched = is_batched(facts)
        call = Call.load(Path(run, EXAMPLE))
        tensors = (call[:1] if batched else call).tensors()
        return pack([tensors[entry["place"]].numpy() for entry in facts["inputs"]], facts["inputs"], batched)
    spec = facts["input"]
    sides = {"height": 32, "width": 32, "time": min(int(spec.get("longest") or 8), 8)}
    if facts["preprocess"] is not None:
        sides["height"], sides["width"] = facts["preprocess"]["size"]
    shape = [1, *(side if isinstance(side, int) else sides[side] for side in spec["shape"][1:])]
    return np.zeros(shape, np.uint8 if facts["preprocess"] is not None else np.int64)


def as_arrays(named: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Array]:
    """Return the arrays of a core's inputs in their order, checked against the manifest's `inputs`."""
    wanted = {entry["name"]: entry for entry in facts["inputs"]}
    require(set(named) == set(wanted), f"the inputs are {', '.join(wanted)}, not {', '.join(map(str, named))}.")
    arrays, sizes = [], dict[str, int]()
    for name, entry in wanted.items():
        array, shape = np.asarray(named[name]), entry["shape"]
        same = len(array.shape) == len(shape) and all(
            side == (sizes.setdefault(own, side) if isinstance(own, str) else own)
            for own, side in zip(shape, array.shape, strict=True)
        )
        require(same and array.size > 0, f"{name} has shape {list(array.shape)}, and the net takes {shape}.")
        dtype = np.dtype(entry["dtype"])
        fits = array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")
        fits = fits and not (array.dtype == np.uint8 and dtype.kind == "f")  # pixels that the steps would normalise
        require(fits, f"{name} is of {array.dtype}, and the net takes {dtype}: pass what the module's steps give it.")
        arrays.append(np.ascontiguousarray(array, dtype))
    return arrays


def is_batched(facts: Mapping[str, Any]) -> bool:
    """Return whether each input and output has samples on its first axis."""
    return all(entry["shape"][:1] == [BATCH] for entry in (*facts["inputs"], *facts["outputs"]))


def pack(arrays: Sequence[Array], entries: Sequence[Mapping[str, Any]], batched: bool) -> Array:
    """Return arrays in the order of the manifest's entries as a structured array with a row for each sample."""
    rows = [array if batched else array[None] for array in arrays]
    fields = [(entry["name"], row.dtype, row.shape[1:]) for entry, row in zip(entries, rows, strict=True)]
    packed = np.empty(len(rows[0]), dtype=np.dtype(fields))
    for entry, row in zip(entries, rows, strict=True):
        packed[entry["name"]] = row
    return packed


def unpack(packed: Array, batched: bool) -> dict[str, Array]:
    """Return the arrays that `pack` has packed, by name."""
    names = packed.dtype.names or ()
    return {name: np.array(packed[name] if batched else packed[name][0], order="C") for name in names}


def packed_net(run: Callable[..., Any], facts: Mapping[str, Any]) -> Callable[[Array], Array]:
    """Return a function of several arrays as one of a structured array."""
    batched = is_batched(facts)

    def forward(packed: Array) -> Array:
        outputs = as_list(run(*unpack(packed, batched).values()))
        return pack([np.asarray(each) for each in outputs], facts["outputs"], batched)

    return forward


def decode_named(body: bytes, content_type: str, facts: Mapping[str, Any], limits: Limits) -> Array:
    """Return the request of a body: a JSON object or a .npz file of the inputs by name."""
    kind, batched = content_type.partition(";")[0].strip().lower(), is_batched(facts)
    sentence = f"Content-Type {content_type[:60]!r} is not taken: declare one of {JSON}, {NPZ}."
    demand(kind in (JSON, NPZ), 415, sentence)
    if kind == JSON:
        sizes, entries = {BATCH: limits.samples}, facts["inputs"]
        shapes = ([s if isinstance(s, int) else sizes.get(s, limits.tokens) for s in e["shape"]] for e in entries)
        content = parsed(body, sum(map(math.prod, shapes)))
        try:
            named = {name: np.array(value) for name, value in dict(content).items()}
        except (ValueError, TypeError) as error:
            raise BadRequest(400, "The body can't be read as JSON of full arrays by name.") from error
    else:
        named = _from_npz(body, limits)
    try:
        arrays = as_arrays(named, facts)
    except UserError as error:
        raise BadRequest(422, f"The request does not fit: {error}") from error
    if batched:
        check_samples(len(arrays[0]), limits)
    return pack(arrays, facts["inputs"], batched)


def _from_npz(body: bytes, limits: Limits) -> dict[str, Any]:
    arrays, left = {}, limits.body
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    content = file.read(left + 1)  # not more, whatever the entry declares
                left -= len(content)
                if left < 0:
                    raise BadRequest(413, f"The arrays have more than {limits.body} bytes: send less at a time.")
                arrays[entry.filename.removesuffix(".npy")] = read_npy(content)
    except BadRequest:
        raise
    except Exception as error:  # zipfile and zlib raise many types for a damaged archive
        raise BadRequest(400, "The body can't be read as .npz: send what numpy.savez writes.") from error
    return arrays


def is_finite(packed: Array) -> bool:
    """Return whether all floats of an answer are finite."""
    names = packed.dtype.names
    parts = [packed] if names is None else [packed[name] for name in names]
    return all(bool(np.isfinite(part).all()) for part in parts)
