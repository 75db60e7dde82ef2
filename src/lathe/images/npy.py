"""Headers of .npy files, held against the files: numpy's own readers compute with whatever stands there."""

import math
import os
from pathlib import Path
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]
READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether it is in Fortran's order, and dtype; `file` stands at the values then.

    Raises:
        ValueError: it is no .npy file.
    """
    try:
        shape, fortran, dtype = READERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the header is a Python literal, whose parser raises much
        raise ValueError("this is no header of a .npy file") from error
    if not all(type(side) is int for side in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype


def mapped(path: Path) -> Array:
    """The array of a .npy file, which stays on disk.

    Raises:
        ValueError: it is none, of objects, or longer than the file.
        OSError: it can't be opened.
    """
    with open(path, "rb") as file:
        shape, _, dtype = read_header(file)
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > os.fstat(file.fileno()).st_size:
            raise ValueError(f"its shape is {shape}, and the file is shorter")
    return np.lib.format.open_memmap(path, mode="r")
