"""Decode a request's body to the array that an export takes, and name classes. Imports no torch; input is untrusted.

Statuses: 400 not of the declared type, 413 above a limit, 415 an unsupported type, 422 readable but not an input of the
net. All functions raise BadRequest.
"""

import base64
import io
import json
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from lathe.images import COLOURS, PictureError, TooLarge, arranged, kind_of, read_header, read_picture, scaled

Array = np.ndarray[Any, Any]
PICTURES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG"}
NPY, JSON, BINARY = "application/x-npy", "application/json", "application/octet-stream"
SHAPE = re.compile(r"\s*(\d{1,9})\s*,\s*(\d{1,9})\s*")


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    `body`: bytes. `pixels`: height times width of a picture before resizing. `samples`: rows. `tokens`: ids of a
    sequence, if the manifest has no longest.
    """

    body: int = 16 * 2**20
    pixels: int = 4096 * 4096
    samples: int = 256
    tokens: int = 65536


class BadRequest(Exception):
    """A request that can't be answered: an HTTP `status` and one `sentence` with the mistake and the fix."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def demand(holds: bool, status: int, sentence: str) -> None:
    """Raise BadRequest unless a condition holds."""
    if not holds:
        raise BadRequest(status, sentence)


def decode(
    body: bytes, content_type: str, facts: dict[str, Any], limits: Limits, shape_header: str | None = None
) -> tuple[Array, bool]:
    """Return an export's input, and whether the request was a single sample without a batch axis.

    Pictures are uint8 `[n, channels, height, width]`, also if the file itself takes normalised floats (`Bundle`
    normalises); tokens are int64 `[n, time]`. PNG and JPEG are scaled to the export's size, unless it takes any; arrays
    must have it. `content_type` is as declared, `facts` are the export's manifest. `shape_header` is for binary input:
    `height,width` of pictures, or `n,time` of token ids.
    """
    kind, is_text = content_type.partition(";")[0].strip().lower(), "vocab_size" in facts["input"]
    kinds = [NPY, JSON, BINARY] if is_text else [*PICTURES, NPY, JSON, BINARY]
    sentence = f"The body has {len(body)} bytes, more than {limits.body}: send less at a time."
    demand(len(body) <= limits.body, 413, sentence)
    demand(kind in kinds, 415, f"Content-Type {content_type[:60]!r} is not taken: declare one of {', '.join(kinds)}.")
    demand(len(body) > 0, 400, f"The body is empty: send {'token ids' if is_text else 'images'} as {kind}.")
    if is_text:
        return Tokens(facts["input"], limits).decode(body, kind, shape_header)
    squash = bool((facts.get("preprocess") or {}).get("squash"))
    return Images(facts["input"], limits, squash).decode(body, kind, shape_header)


class Images:
    """Decodes pictures for the manifest's `input`, `declared`. `squash` scales them whole, not a centre crop."""

    def __init__(self, declared: dict[str, Any], limits: Limits, squash: bool = False) -> None:
        self.squash, self.limits = squash, limits
        _, self.channels, height, width = declared["shape"]
        self.size = (height, width) if isinstance(height, int) else None  # None: any

    def decode(self, body: bytes, kind: str, shape_header: str | None) -> tuple[Array, bool]:
        if kind in PICTURES:
            return self.pictures([body], PICTURES[kind]), True
        if kind == NPY:
            return self.array(read_npy(body), "The array")
        if kind == BINARY:
            return self.binary(body, shape_header)
        pixels = self.limits.samples * math.prod(self.size) if self.size else self.limits.pixels
        name, value = read_json(body, ("image", "images"), self.channels * pixels)
        texts = [value] if name == "image" else value
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            try:  # browsers send data:...;base64,...
                encoded = (text.partition(",")[2] if text.startswith("data:") else text for text in texts)
                files = [base64.b64decode(word, validate=True) for word in encoded]
            except ValueError as error:
                sentence = "The image is text, but not base64: send a PNG or JPEG in base64, or lists."
                raise BadRequest(400, sentence) from error
            return self.pictures(files), name == "image"
        values = integers(value, name)
        sentence = f"{name} has values outside of 0 to 255: send pixels as whole numbers."
        demand(bool(((values >= 0) & (values <= 255)).all()), 422, sentence)
        return self.array(values.astype(np.uint8), name, is_single=name == "image")

    def pictures(self, files: list[bytes], kind: str | None = None) -> Array:
        """Decode PNG or JPEG files, of `limits.pixels` together, to uint8 `[n, channels, height, width]`."""
        check_samples(len(files), self.limits)
        sentence = f"PNG and JPEG don't have {self.channels} channels: send an array as {NPY}."
        demand(self.channels in COLOURS, 415, sentence)
        images: list[Array] = []
        left = self.limits.pixels
        for content in files:
            own = kind or kind_of(content[:12])  # JSON declares no type
            if own is None or own not in PICTURES.values():
                raise BadRequest(400, "The image is base64 of neither PNG nor JPEG: send one of them, or lists.")
            try:
                pixels = read_picture(io.BytesIO(content), own, self.channels, left)
            except TooLarge as error:
                sentence = f"all images of a request may have {self.limits.pixels}: send smaller ones."
                raise BadRequest(413, f"The image {error}; {sentence}") from error
            except PictureError as error:
                raise BadRequest(400, f"The image {error}: send a whole one, and declare its type.") from error
            left -= pixels.shape[1] * pixels.shape[2]
            images.append(pixels if self.size is None else scaled(pixels, self.size, self.squash))
        same = len({pixels.shape for pixels in images}) == 1
        demand(same, 422, "The images have different sizes: send them one at a time, or of one size.")
        return np.stack(images)

    def array(self, pixels: Array, name: str, is_single: bool | None = None) -> tuple[Array, bool]:
        """Return `pixels` in the net's layout; `is_single` as `one` in `arranged`."""
        demand(pixels.dtype == np.uint8, 422, f"{name} is of {pixels.dtype}: send pixels from 0 to 255 as uint8.")
        arrangement = arranged(pixels, self.channels, self.size, is_single)
        if arrangement is None:
            shape = [self.channels, *(self.size or ("height", "width"))]
            raise BadRequest(422, f"{name} has shape {list(pixels.shape)}, but the net takes {shape}: send that.")
        images, single = arrangement
        check_samples(len(images), self.limits)
        self.check_pixels(images.shape[2], images.shape[3])
        return np.array(images, order="C"), single  # a copy, since torch requires writable arrays

    def binary(self, body: bytes, shape_header: str | None) -> tuple[Array, bool]:
        """Decode concatenated uint8 samples `[n, channels, height, width]`."""
        size = self.size or read_shape(shape_header, "height,width")
        if size is None:
            raise BadRequest(422, "This net takes images of any size: say theirs in the header X-Shape: height,width.")
        other = shape_header is not None and read_shape(shape_header, "height,width") != size
        demand(not other, 422, f"X-Shape is {shape_header}, but the net takes images of {size}: scale them.")
        self.check_pixels(*size)
        shape = [self.channels, *size]
        count, rest = divmod(len(body), math.prod(shape))
        sentence = f"The body has {len(body)} bytes: send whole images {shape} of uint8 pixels."
        demand(rest == 0, 422, sentence)
        check_samples(count, self.limits)
        return np.frombuffer(body, dtype=np.uint8).reshape(count, *shape).copy(), count == 1

    def check_pixels(self, height: int, width: int) -> None:
        sentence = f"The images have {height} x {width} pixels: send from 1 to {self.limits.pixels}."
        demand(1 <= height * width <= self.limits.pixels, 413, sentence)


class Tokens:
    """Decodes token ids for the manifest's `input`, `declared`."""

    def __init__(self, declared: dict[str, Any], limits: Limits) -> None:
        self.vocab_size, self.limits = int(declared["vocab_size"]), limits
        self.longest = min(int(declared.get("longest") or limits.tokens), limits.tokens)
        self.exactly = declared["shape"][1] if isinstance(declared["shape"][1], int) else None

    def decode(self, body: bytes, kind: str, shape_header: str | None) -> tuple[Array, bool]:
        if kind == JSON:
            name, value = read_json(body, ("tokens",), self.limits.samples * self.longest)
            return self.check(integers(value, name), name)
        if kind == NPY:
            return self.check(read_npy(body), "The array")
        sentence = f"The body has {len(body)} bytes: send token ids as int64, 8 bytes each, little-endian."
        demand(len(body) % 8 == 0, 422, sentence)
        ids, shape = np.frombuffer(body, dtype="<i8"), read_shape(shape_header, "n,time")
        fits = shape is None or math.prod(shape) == ids.size
        demand(fits, 422, f"X-Shape is {shape}, but the body has {ids.size} ids: make them equal.")
        return self.check(ids if shape is None else ids.reshape(shape), "The body")

    def check(self, ids: Array, name: str) -> tuple[Array, bool]:
        """Return int64 `[n, time]` of ids within the vocabulary."""
        demand(ids.dtype.kind in "iu", 422, f"{name} is of {ids.dtype}: send token ids as whole numbers.")
        shaped = ids.ndim in (1, 2) and ids.size > 0
        demand(shaped, 422, f"{name} has shape {list(ids.shape)}: send token ids [time] or [n, time], at least one.")
        single, ids = ids.ndim == 1, np.atleast_2d(ids)
        count, length = ids.shape
        check_samples(count, self.limits)
        fits = self.exactly in (None, length)
        demand(fits, 422, f"A sequence has {length} token ids, but the net takes {self.exactly}: send as many.")
        status = 413 if self.longest == self.limits.tokens else 422
        sentence = f"A sequence has {length} token ids, more than {self.longest}: send its last {self.longest}."
        demand(length <= self.longest, status, sentence)
        sentence = f"{name} has ids from {ids.min()} to {ids.max()}: the net knows 0 to {self.vocab_size - 1}."
        demand(ids.min() >= 0 and ids.max() < self.vocab_size, 422, sentence)
        return np.array(ids, dtype=np.int64, order="C"), single


def check_samples(count: int, limits: Limits) -> None:
    """Raise BadRequest for more than `limits.samples` samples."""
    sentence = f"The request has {count} samples, more than {limits.samples}: send it in parts."
    demand(count <= limits.samples, 413, sentence)


def read_npy(body: bytes) -> Array:
    """Return the array of a .npy file. numpy's own reader would allocate what the header declares."""
    file = io.BytesIO(body)
    try:
        shape, fortran, dtype = read_header(file)
    except ValueError as error:
        raise BadRequest(400, "The body can't be read as a .npy array: send what numpy.save writes.") from error
    plain = dtype.kind in "biuf" and len(shape) <= 4 and all(side >= 1 for side in shape)
    demand(plain, 422, f"The array is of {dtype} and shape {shape[:8]}: send numbers, at least one, on 4 axes.")
    whole = len(body) - file.tell() == math.prod(shape) * dtype.itemsize
    demand(whole, 400, "The body has another length than its header declares: send the whole file.")
    return np.frombuffer(body, dtype=dtype, offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def read_json(body: bytes, names: tuple[str, ...], most: int) -> tuple[str, Any]:
    """Return name and value of the only key of a JSON object. `most` is the most values that it can have."""
    form = "one JSON object with " + " or ".join(names)
    content = parsed(body, most)
    fits = isinstance(content, dict) and len(content) == 1 and set(content) <= set(names)
    demand(fits, 422, f"The JSON is not what the net takes: send {form} and nothing else.")
    return next(iter(content.items()))


def parsed(body: bytes, most: int) -> Any:
    """Return the content of JSON with at most `most` values: a body of nothing but lists takes 20 times its bytes."""
    demand(body.count(b",") <= most, 413, f"The JSON has more than {most} numbers: send it in parts.")

    def refuse(word: str) -> NoReturn:
        raise BadRequest(400, f"The JSON has {word[:20]}: send finite numbers.")

    try:
        return json.loads(body, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, "The body can't be read as JSON.") from error


def integers(value: Any, name: str) -> Array:
    """Convert nested lists of integers to int64."""
    try:
        array = np.array(value)
        if array.size and array.dtype.kind not in "iu":
            raise ValueError("not of whole numbers")
        return array.astype(np.int64, casting="safe") if array.size else array.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadRequest(422, f"{name} is not a full array of whole numbers: send lists of equal lengths.") from error


def read_shape(header: str | None, form: str) -> tuple[int, int] | None:
    """Parse the two numbers of X-Shape; None without the header."""
    if header is None:
        return None
    match = SHAPE.fullmatch(header)
    if match is None:
        raise BadRequest(400, f"X-Shape {header[:60]!r} can't be read: send {form}, such as 32,32.")
    return int(match[1]), int(match[2])


def answer(logits: Array, facts: dict[str, Any], top_k: int, single: bool) -> dict[str, Any]:
    """Return `{"predictions": [{"class", "index", "probability"}, ...]}`, the `top_k` most likely first, ties by index.

    Unless `single`, it is a list of such lists, one for each sample. `logits` are `[n, classes]`, or `[n, time,
    vocabulary]`, whose last position (the next token) counts. `facts` are the export's manifest; without class names,
    the indices are the names. Raises ValueError for a logit of NaN or infinity, or if all are -infinity.
    """
    last = logits[:, -1] if logits.ndim == 3 else logits
    names = facts.get("classes")
    rows = []
    for row, shares in zip(last, probabilities(last), strict=True):
        count = min(top_k, len(row))
        # O(n): a full sort of a large vocabulary takes longer than a small net
        candidates = np.flatnonzero(row >= np.partition(row, -count)[-count])
        best = map(int, candidates[np.argsort(-row[candidates], kind="stable")][:count])
        rows.append(
            [{"class": names[i] if names else str(i), "index": i, "probability": float(shares[i])} for i in best]
        )
    return {"predictions": rows[0] if single else rows}


def probabilities(logits: Array) -> Array:
    """Return the softmax over the last axis, in float64."""
    wide = logits.astype(np.float64)
    largest = wide.max(axis=-1, keepdims=True)
    if not np.isfinite(largest).all():  # NaN propagates; a logit of -inf next to finite ones is an impossible class
        raise ValueError("the net's answer has NaN or infinite logits, which are no probabilities")
    shares = np.exp(wide - largest)
    total: Array = shares / shares.sum(axis=-1, keepdims=True)
    return total
