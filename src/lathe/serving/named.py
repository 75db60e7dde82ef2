"""Requests and answers of a core with named inputs and outputs, as JSON or .npz. Imports no torch; input is untrusted.

Within the server a request is one structured array with a field for each input and a row for each sample, so that the
queue and the workers treat it as they do images. A core without an axis of samples has one row for the whole request.
"""

import io
import math
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lathe.errors import UserError, require
from lathe.serving.decode import JSON, BadRequest, Limits, check_samples, demand, parsed, read_npy

Array = np.ndarray[Any, Any]
NPZ = "application/x-npz"
BATCH = "batch"


def as_arrays(named: Mapping[str, Any], facts: Mapping[str, Any]) -> list[Array]:
    """Return the arrays of a core's inputs in their order, checked against the manifest's `inputs`.

    Raises:
        UserError: a name is missing or unknown, or an array does not fit.
    """
    wanted = {entry["name"]: entry for entry in facts["inputs"]}
    require(set(named) == set(wanted), f"the inputs are {', '.join(wanted)}, not {', '.join(map(str, named))}.")
    found, sizes = [], dict[str, int]()
    for name, entry in wanted.items():
        array, shape = np.asarray(named[name]), entry["shape"]
        same = len(array.shape) == len(shape) and all(
            side == (sizes.setdefault(own, side) if isinstance(own, str) else own)
            for own, side in zip(shape, array.shape, strict=True)
        )
        require(same and array.size > 0, f"{name} has shape {list(array.shape)}, and the net takes {shape}.")
        dtype = np.dtype(entry["dtype"])
        fits = array.dtype == dtype or np.can_cast(array.dtype, dtype, "same_kind")
        require(fits, f"{name} is of {array.dtype}, and the net takes {dtype}.")
        found.append(np.ascontiguousarray(array, dtype))
    return found


def is_batched(facts: Mapping[str, Any]) -> bool:
    """Return whether each input and output has samples on its first axis."""
    return all(entry["shape"][:1] == [BATCH] for entry in (*facts["inputs"], *facts["outputs"]))


def pack(arrays: Sequence[Array], entries: Sequence[Mapping[str, Any]], batched: bool) -> Array:
    """Return arrays in the order of the manifest's entries as a structured array with a row for each sample."""
    rows = [array if batched else array[None] for array in arrays]
    fields = [(entry["name"], row.dtype, row.shape[1:]) for entry, row in zip(entries, rows, strict=True)]
    found = np.empty(len(rows[0]), dtype=np.dtype(fields))
    for entry, row in zip(entries, rows, strict=True):
        found[entry["name"]] = row
    return found


def unpack(packed: Array, batched: bool) -> dict[str, Array]:
    """Return the arrays that `pack` has packed, by name."""
    names = packed.dtype.names or ()
    return {name: np.array(packed[name] if batched else packed[name][0], order="C") for name in names}


def packed_net(run: Callable[..., Any], facts: Mapping[str, Any]) -> Callable[[Array], Array]:
    """Return a function of several arrays as one of a structured array."""
    batched = is_batched(facts)

    def forward(packed: Array) -> Array:
        found = run(*unpack(packed, batched).values())
        outputs = found if isinstance(found, list | tuple) else [found]
        return pack([np.asarray(each) for each in outputs], facts["outputs"], batched)

    return forward


def decode_named(body: bytes, content_type: str, facts: Mapping[str, Any], limits: Limits) -> Array:
    """Return the request of a body: a JSON object or a .npz file of the inputs by name.

    Raises:
        BadRequest: 400 it can't be read, 413 it is above a limit, 415 it is of another type, 422 it does not fit.
    """
    kind, batched = content_type.partition(";")[0].strip().lower(), is_batched(facts)
    sentence = f"Content-Type {content_type[:60]!r} is not taken: declare one of {JSON}, {NPZ}."
    demand(kind in (JSON, NPZ), 415, sentence)
    named = _from_json(body, facts, limits) if kind == JSON else _from_npz(body, limits)
    try:
        arrays = as_arrays(named, facts)
    except UserError as error:
        raise BadRequest(422, f"The request does not fit: {error}") from error
    if batched:
        check_samples(len(arrays[0]), limits)
    return pack(arrays, facts["inputs"], batched)


def _from_json(body: bytes, facts: Mapping[str, Any], limits: Limits) -> dict[str, Any]:
    sizes = {BATCH: limits.samples}
    shapes = ([s if isinstance(s, int) else sizes.get(s, limits.tokens) for s in e["shape"]] for e in facts["inputs"])
    found = parsed(body, sum(map(math.prod, shapes)))
    try:
        return {name: np.array(value) for name, value in dict(found).items()}
    except (ValueError, TypeError) as error:
        raise BadRequest(400, "The body can't be read as JSON of full arrays by name.") from error


def _from_npz(body: bytes, limits: Limits) -> dict[str, Any]:
    found, left = {}, limits.body
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            for entry in archive.infolist():
                with archive.open(entry) as file:
                    content = file.read(left + 1)  # not more, whatever the entry declares
                left -= len(content)
                if left < 0:
                    raise BadRequest(413, f"The arrays have more than {limits.body} bytes: send less at a time.")
                found[entry.filename.removesuffix(".npy")] = read_npy(content)
    except BadRequest:
        raise
    except Exception as error:  # zipfile and zlib raise many types for a damaged archive
        raise BadRequest(400, "The body can't be read as .npz: send what numpy.savez writes.") from error
    return found


def answer_npz(outputs: Mapping[str, Array]) -> bytes:
    """Return the content of a .npz answer."""
    file = io.BytesIO()
    np.savez(file, **outputs)  # type: ignore[arg-type]
    return file.getvalue()


def is_finite(packed: Array) -> bool:
    """Return whether all floats of an answer are finite."""
    names = packed.dtype.names
    parts = [packed] if names is None else [packed[name] for name in names]
    return all(bool(np.isfinite(part).all()) for part in parts)
