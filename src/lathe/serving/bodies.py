"""Parses JSON and .npy bodies at a cost that their size bounds, else raises BadRequest. Imports no torch."""

import io
import json
import math
import re
from itertools import chain
from typing import Any, NoReturn

import numpy as np

from lathe.images.npy import read_header
from lathe.serving.limits import BadRequest

Array = np.ndarray[Any, Any]

SHAPE = re.compile(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*")


def read_npy(body: bytes) -> Array:
    """Return the array of a .npy file. numpy's own reader would allocate what the header declares."""
    file = io.BytesIO(body)
    try:
        shape, fortran, dtype = read_header(file)
    except ValueError as error:
        raise BadRequest(400, "The body can't be read as a .npy array: send what numpy.save writes.") from error
    if dtype.kind not in "biuf" or len(shape) > 4 or any(side < 1 for side in shape):
        raise BadRequest(
            422,
            f"The array is of {quoted(str(dtype))} and shape {quoted(str(list(shape)))}: send numbers, at least one, "
            "up to 4 axes.",
        )
    expected, found = math.prod(shape) * dtype.itemsize, len(body) - file.tell()
    if expected != found:
        raise BadRequest(
            400, f"The body has {found} bytes of array, but its header declares {expected}: send the whole file."
        )
    return np.frombuffer(body, dtype=dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def read_json(body: bytes, names: tuple[str, ...], most: int) -> tuple[str, Any]:
    """Return name and value of the only key of a JSON object. `most` is the most values that it can have."""
    form = "one JSON object with " + " or ".join(names)
    # parsed, a body of nothing but lists takes 20 times its bytes
    if max(body.count(sign) for sign in (b",", b"[", b"{")) > 3 * most + 16:
        raise BadRequest(
            413, f"The JSON has more than {most} numbers, the most that a request can have: send it in parts."
        )

    def refuse(word: str) -> NoReturn:
        raise BadRequest(400, f"The JSON has {word}, which is no number: send whole numbers.")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # JSON parsers differ in which duplicate they take
        if len(dict(pairs)) < len(pairs):
            raise BadRequest(422, f"The JSON has a key twice, {quoted(pairs[-1][0])} last: send {form}.")
        return dict(pairs)

    try:
        found = json.loads(body.decode("utf-8"), parse_constant=refuse, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"The body can't be read as JSON: send {form}.") from error
    if not isinstance(found, dict) or len(found) != 1 or not set(found) <= set(names):
        raise BadRequest(422, f"The JSON is not what the net takes: send {form} and nothing else.")
    return next(iter(found.items()))


def numbers(value: Any, name: str) -> Array:
    """Convert nested lists of integers to int64."""
    if not isinstance(value, list):
        raise BadRequest(422, f"{name} is {'null' if value is None else 'no list'}: send lists of whole numbers.")
    # not by numpy, which converts 0.5 to 0 and true to 1, and makes all values as wide as the longest text
    flat, shape = value, [len(value)]
    while list in (types := set(map(type, flat))):
        lengths = set(map(len, flat)) if types == {list} else set()
        if len(lengths) != 1 or len(shape) == 4:
            raise BadRequest(
                422, f"{name} has lists of unequal lengths, or too deep ones: send a full array of whole numbers."
            )
        shape.append(lengths.pop())
        flat = list(chain.from_iterable(flat))
    if types != {int}:
        raise BadRequest(422, f"{name} has something else than whole numbers: send those alone, at least one.")
    try:
        return np.array(flat, dtype=np.int64).reshape(shape)
    except OverflowError as error:
        raise BadRequest(422, f"{name} has numbers above 64 bits: send pixels from 0 to 255, or token ids.") from error


def read_shape(header: str | None, form: str) -> tuple[int, int] | None:
    """Parse the two numbers of X-Shape; None without the header."""
    if header is None:
        return None
    match = SHAPE.fullmatch(header)
    if match is None:
        raise BadRequest(400, f"X-Shape {quoted(header)} can't be read: send {form}, such as 32,32.")
    return int(match[1]), int(match[2])


def quoted(text: str) -> str:
    """Return the beginning of a client's text, quoted for a message."""
    return repr(text[:60]) if text else "(none)"
