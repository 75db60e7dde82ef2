"""Request bodies for the server, valid and hostile, and the expected inputs."""

import base64
import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lathe.serving.decode import BadRequest, Limits, decode

LIMITS = Limits(body=200_000, pixels=10_000, samples=5, tokens=64)
PIXELS = np.arange(60, dtype=np.uint8).reshape(4, 5, 3)  # [height, width, channels]
GREY = np.arange(20, dtype=np.uint8).reshape(4, 5) * 12


def facts(*shape: Any) -> dict[str, Any]:
    return {"input": {"dtype": "uint8", "shape": ["batch", *shape], "layout": "NCHW"}, "preprocess": {"in_graph": True}}


ONE, THREE, ANY = facts(1, 4, 5), facts(3, 4, 5), facts(3, "height", "width")
WORDS = {
    "input": {"dtype": "int64", "shape": ["batch", "time"], "layout": "NT", "longest": 8, "vocab_size": 50},
    "preprocess": None,
}


def file_of(array: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, kind, **options)
    return out.getvalue()


def npy(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def as_json(**content: Any) -> bytes:
    return json.dumps(content).encode()


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def refused(body: bytes, kind: str, given: dict[str, Any] = ONE, shape: str | None = None) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        decode(body, kind, given, LIMITS, shape)
    sentence = caught.value.sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert len(sentence) < 260
    return caught.value.status, sentence


def decoded(body: bytes, kind: str, given: dict[str, Any] = ONE, shape: str | None = None) -> tuple[np.ndarray, bool]:
    array, single = decode(body, kind, given, LIMITS, shape)
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert array.dtype == given["input"]["dtype"]
    return array, single


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


def bomb(width: int, height: int) -> bytes:
    """Return a few kilobytes of PNG that unpack to width x height pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )


def header(content: str, data: bytes = b"") -> bytes:
    padded = content.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(padded)) + padded + data
