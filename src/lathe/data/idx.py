"""IDX, the format of MNIST (Y. LeCun): a magic number, the sizes as big-endian int32, the values."""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lathe.data.splits import Images
from lathe.errors import UserError

UINT8 = 0x08  # the only supported type of values


@dataclass(frozen=True)
class IdxFile:
    """A published file: name without `.gz`, MD5 of the compressed file, SHA-256 of its contents, shape."""

    name: str
    md5: str
    sha256: str
    shape: tuple[int, ...]


def read_bounded(path: Path, most: int) -> bytes:
    """Read a file, decompressed if its name ends in .gz; at most `most` + 1 bytes."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(most + 1)  # at the end of the file gzip compares its checksum
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): put the published file there and run again.") from error


def parse_idx(data: bytes, shape: tuple[int, ...]) -> Images:
    """Return the array, uint8 of that `shape`.

    Raises:
        ValueError: it is not IDX, has another type or shape, or is too short or too long.
    """
    head = 4 + 4 * len(shape)
    if len(data) < head or data[:2] != b"\0\0":
        raise ValueError("no IDX file")
    if (data[2], data[3]) != (UINT8, len(shape)):
        raise ValueError(f"expected {len(shape)} dimensions of bytes, got {data[3]} dimensions of type 0x{data[2]:02x}")
    sizes = struct.unpack(f">{len(shape)}i", data[4:head])
    if sizes != tuple(shape):
        raise ValueError(f"expected an array {list(shape)}, got {list(sizes)}")
    if len(data) != head + math.prod(shape):
        many = "more" if len(data) > head + math.prod(shape) else "less"
        raise ValueError(f"its values are {many} than the {math.prod(shape)} that it announces")
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
