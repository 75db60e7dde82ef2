"""Decodes a request's body to the array that an export takes. Imports no torch; all input is untrusted.

Statuses: 400 not of the declared type, 413 above a limit, 415 an unsupported type, 422 readable but not an input of the
net. All functions raise BadRequest.
"""

import base64
import io
from typing import Any

import numpy as np

from lathe.images.pictures import COLOURS, PictureError, TooLarge, arranged, kind_of, read_picture, scaled
from lathe.serving.bodies import numbers, quoted, read_json, read_npy, read_shape
from lathe.serving.limits import BadRequest, Limits

Array = np.ndarray[Any, Any]

PICTURES = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG"}
NPY, JSON, BINARY = "application/x-npy", "application/json", "application/octet-stream"
FILES = {b"\x93NUMPY": NPY, b"\x89PNG\r\n\x1a\n": "image/png"}  # magic bytes, unlikely as pixels


def decode(
    body: bytes, content_type: str, facts: dict[str, Any], limits: Limits, shape_header: str | None = None
) -> tuple[Array, bool]:
    """Return an export's input, and whether the request was a single sample without a batch axis.

    Pictures are uint8 `[n, channels, height, width]`, also if the file itself takes normalised floats (`Bundle`
    normalises); tokens are int64 `[n, time]`. PNG and JPEG are scaled to the export's size, unless it takes any; arrays
    must have it.

    Args:
        body: of the request.
        content_type: the declared type; nothing is guessed from the body.
        facts: the export's manifest.
        limits: of a request.
        shape_header: for binary input: `height,width` of pictures, or `n,time` of token ids.
    """
    if len(body) > limits.body:
        raise BadRequest(413, f"The body has {len(body)} bytes, more than {limits.body}: send less at a time.")
    kind = content_type.partition(";")[0].strip().lower()
    words = "vocab_size" in facts["input"]
    taken = [JSON, NPY, BINARY] if words else ["image/png", "image/jpeg", NPY, JSON, BINARY]
    if kind not in taken and (words or kind not in PICTURES):
        raise BadRequest(415, f"Content-Type {quoted(content_type)} is not taken: declare one of {', '.join(taken)}.")
    if not body:
        raise BadRequest(400, f"The body is empty: send {_what(facts, kind)}.")
    inputs = Tokens(facts["input"], limits) if words else Images(facts["input"], limits, _squashed(facts))
    return inputs.decode(body, kind, shape_header)


def _squashed(facts: dict[str, Any]) -> bool:
    """Return whether the net was trained on whole pictures, whatever their aspect ratio."""
    return bool((facts.get("preprocess") or {}).get("squash"))


class Images:
    """Decodes pictures for the manifest's `input`, `declared`. `squash` scales them whole, not a centre crop."""

    def __init__(self, declared: dict[str, Any], limits: Limits, squash: bool = False) -> None:
        self.squash = squash
        _, self.channels, height, width = declared["shape"]
        self.size = (height, width) if isinstance(height, int) else None  # None: any
        self.limits = limits

    def decode(self, body: bytes, kind: str, shape_header: str | None) -> tuple[Array, bool]:
        if kind in PICTURES:
            return self.pictures([body], PICTURES[kind]), True
        if kind == NPY:
            return self.array(read_npy(body), "The array")
        if kind == BINARY:
            return self.binary(body, shape_header)
        name, value = read_json(body, ("image", "images"), self.most_values())
        texts = [value] if name == "image" else value
        if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
            return self.pictures([unpacked(text) for text in texts]), name == "image"
        pixels = numbers(value, name)
        if pixels.min() < 0 or pixels.max() > 255:
            raise BadRequest(
                422, f"{name} has pixels from {pixels.min()} to {pixels.max()}: send whole numbers from 0 to 255."
            )
        return self.array(pixels.astype(np.uint8), name, one=name == "image")

    def pictures(self, files: list[bytes], kind: str | None = None) -> Array:
        """Decode PNG or JPEG files, of `limits.pixels` together, to uint8 `[n, channels, height, width]`."""
        self.count(len(files))
        if self.channels not in COLOURS:
            raise BadRequest(
                415, f"PNG and JPEG have 1 or 3 channels, but the net takes {self.channels}: send an array as {NPY}."
            )
        found: list[Array] = []
        left = self.limits.pixels
        for content in files:
            try:
                pixels = read_picture(io.BytesIO(content), kind or told_by(content), self.channels, left)
            except TooLarge as error:
                several = f", as {self.limits.pixels} for all images of a request leave" if found else ""
                raise BadRequest(413, f"The image {error}{several}: send a smaller one.") from error
            except PictureError as error:
                raise BadRequest(400, f"The image {error}: send a whole one, and declare its type.") from error
            left -= pixels.shape[1] * pixels.shape[2]
            found.append(pixels if self.size is None else scaled(pixels, self.size, self.squash))
        if len({pixels.shape for pixels in found}) > 1:
            raise BadRequest(
                422,
                "The images have different sizes, which this net takes one at a time: send them so, or of one size.",
            )
        return np.stack(found)

    def array(self, pixels: Array, name: str, one: bool | None = None) -> tuple[Array, bool]:
        """Return `pixels` in the net's layout; `one` as in `arranged`."""
        if pixels.dtype != np.uint8:
            raise BadRequest(422, f"{name} is of {pixels.dtype}: send pixels from 0 to 255 as uint8.")
        found = arranged(pixels, self.channels, self.size, one)
        if found is None:
            height, width = self.size or ("height", "width")
            single = [f"[{height}, {width}]"] * (self.channels == 1) + [f"[{self.channels}, {height}, {width}]"]
            several = [f"[n, {self.channels}, {height}, {width}]", f"[n, {height}, {width}, {self.channels}]"]
            layouts = " or ".join({True: single, False: several, None: single + several}[one])
            raise BadRequest(422, f"{name} has shape {list(pixels.shape)}, but the net takes {layouts}: send that.")
        pictures, is_single = found
        self.count(len(pictures))
        self.check_pixels(pictures.shape[2], pictures.shape[3])
        return np.array(pictures, order="C"), is_single  # a copy, since torch requires writable arrays

    def binary(self, body: bytes, shape_header: str | None) -> tuple[Array, bool]:
        """Decode concatenated uint8 samples `[n, channels, height, width]`."""
        for start, kind in FILES.items():  # whose length may by chance be a multiple of a sample's
            if body.startswith(start):
                raise BadRequest(415, f"The body is a file of type {kind}: declare that as its Content-Type.")
        given = read_shape(shape_header, "height,width")
        if given is None and self.size is None:
            raise BadRequest(422, "This net takes images of any size: say theirs in the header X-Shape: height,width.")
        if given and self.size and given != self.size:
            raise BadRequest(
                422,
                f"X-Shape is {given[0]},{given[1]}, but the net takes {self.size[0]},{self.size[1]}: scale the images.",
            )
        height, width = self.size or given or (0, 0)
        self.check_pixels(height, width)
        length = self.channels * height * width
        if len(body) % length:
            shape = [self.channels, height, width]
            raise BadRequest(
                422, f"The body has {len(body)} bytes: send a multiple of {length}, the uint8 pixels of images {shape}."
            )
        count = len(body) // length
        self.count(count)
        return np.frombuffer(body, dtype=np.uint8).reshape(count, self.channels, height, width).copy(), count == 1

    def count(self, samples: int) -> None:
        """Raise BadRequest if there are more samples than a request may have."""
        if samples > self.limits.samples:
            raise BadRequest(
                413, f"The request has {samples} images, more than {self.limits.samples}: send it in parts."
            )

    def check_pixels(self, height: int, width: int) -> None:
        """Raise BadRequest if images are empty or larger than the limit."""
        if not 1 <= height * width <= self.limits.pixels:
            raise BadRequest(413, f"The images have {height} x {width} pixels: send from 1 to {self.limits.pixels}.")

    def most_values(self) -> int:
        """Return the number of pixels that a request can have at most."""
        return self.channels * (self.limits.samples * self.size[0] * self.size[1] if self.size else self.limits.pixels)


class Tokens:
    """Decodes token ids for the manifest's `input`, `declared`."""

    def __init__(self, declared: dict[str, Any], limits: Limits) -> None:
        self.vocab_size, self.limits = int(declared["vocab_size"]), limits
        self.longest = min(int(declared.get("longest") or limits.tokens), limits.tokens)
        self.exactly = declared["shape"][1] if isinstance(declared["shape"][1], int) else None

    def decode(self, body: bytes, kind: str, shape_header: str | None) -> tuple[Array, bool]:
        if kind == JSON:
            name, value = read_json(body, ("tokens",), self.limits.samples * self.longest)
            return self.check(numbers(value, name), name)
        if kind == NPY:
            return self.check(read_npy(body), "The array")
        if len(body) % 8:
            raise BadRequest(
                422, f"The body has {len(body)} bytes: send token ids as int64, 8 bytes each, little-endian."
            )
        ids, given = np.frombuffer(body, dtype="<i8"), read_shape(shape_header, "n,time")
        if given is None:
            return self.check(ids, "The body")
        if given[0] * given[1] != ids.size:
            raise BadRequest(
                422, f"X-Shape is {given[0]},{given[1]}, but the body has {ids.size} ids: make them equal."
            )
        return self.check(ids.reshape(given), "The body")

    def check(self, ids: Array, name: str) -> tuple[Array, bool]:
        """Return int64 `[n, time]` of ids within the vocabulary."""
        if ids.dtype.kind not in "iu":
            raise BadRequest(422, f"{name} is of {ids.dtype}: send token ids as whole numbers, such as int64.")
        single = ids.ndim == 1
        if ids.ndim not in (1, 2) or ids.size == 0:
            raise BadRequest(
                422, f"{name} has shape {list(ids.shape)}: send token ids [time] or [n, time], at least one."
            )
        ids = ids[None] if single else ids
        if len(ids) > self.limits.samples:
            raise BadRequest(
                413, f"The request has {len(ids)} sequences, more than {self.limits.samples}: send it in parts."
            )
        if self.exactly is not None and ids.shape[1] != self.exactly:
            raise BadRequest(
                422, f"A sequence has {ids.shape[1]} token ids, but the net takes {self.exactly}: send as many."
            )
        if ids.shape[1] > self.longest:
            status = 413 if self.longest == self.limits.tokens else 422
            raise BadRequest(
                status,
                f"A sequence has {ids.shape[1]} token ids, more than {self.longest}: send its last {self.longest}.",
            )
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise BadRequest(
                422, f"{name} has ids from {ids.min()} to {ids.max()}: the net knows 0 to {self.vocab_size - 1}."
            )
        return np.array(ids, dtype=np.int64, order="C"), single


def _what(facts: dict[str, Any], kind: str) -> str:
    if kind in PICTURES:
        return f"a {PICTURES[kind]} image"
    sent = "token ids" if "vocab_size" in facts["input"] else "images"
    return {
        NPY: f"{sent} as numpy.save writes them",
        JSON: f"{sent} as lists of whole numbers",
        BINARY: f"{sent} as bytes",
    }[kind]


def unpacked(text: str) -> bytes:
    """Decode base64, also with the prefix `data:...;base64,` of browsers."""
    try:
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except ValueError as error:
        raise BadRequest(
            400, "The image is text, but not base64: send a PNG or JPEG in base64, or lists of whole numbers."
        ) from error


def told_by(content: bytes) -> str:
    """Return PNG or JPEG by the magic bytes, since JSON declares no picture type."""
    kind = kind_of(content[:12])
    if kind is not None and kind in PICTURES.values():
        return kind
    raise BadRequest(400, "The image is base64 of neither PNG nor JPEG: send one of them, or lists of whole numbers.")
