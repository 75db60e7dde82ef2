"""IDX, the format of MNIST and its successors (Y. LeCun): a magic number, the sizes as big-endian int32, the values."""

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lathe.data.splits import Images
from lathe.errors import UserError

UINT8 = 0x08  # the only type of values that is read


@dataclass(frozen=True)
class IdxFile:
    """A published file: its name without `.gz`, the MD5 hash of the compressed file as published, the SHA-256 hash of
    its contents, and the array in it.
    """

    name: str
    md5: str
    sha256: str
    shape: tuple[int, ...]


def read_bounded(path: Path, most: int) -> bytes:
    """The contents of a file, decompressed if its name ends in .gz; never more than `most` + 1 bytes of them.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(most + 1)  # that the end was met also means that gzip's checksum was compared
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{path} cannot be read ({error}): put the published file there and run again.") from error


def parse_idx(data: bytes, shape: tuple[int, ...]) -> Images:
    """The array, uint8 of that `shape`.

    Raises:
        ValueError: it is not IDX, holds another type or shape, or is cut short or too long.
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
