"""Headers of .npy files."""

from typing import IO, Any

import numpy as np

READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, whether it is in Fortran order, and dtype; `file` is left at the values.

    Raises:
        ValueError: it is not a .npy file.
    """
    try:
        shape, fortran, dtype = READERS[np.lib.format.read_magic(file)](file)
    except Exception as error:  # the parser of the header's Python literal raises many types
        raise ValueError("this is no header of a .npy file") from error
    if not all(type(side) is int for side in shape):
        raise ValueError(f"its shape is {shape}")
    return shape, fortran, dtype
