"""Reads a pickle of NumPy arrays without running other code."""

import io
import pickle  # through a class that resolves a few names only
from collections.abc import Callable
from typing import Any

import numpy as np


def _latin1(text: str, encoding: str) -> bytes:
    """Encode as Python 3 writes bytes in old protocols; raise for any other codec."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding}")
    return text.encode("latin1")


# NumPy has moved these modules; an array's own reduction has the function under any name
_RECONSTRUCT: Callable[..., Any] = np.zeros(0).__reduce__()[0]  # type: ignore[assignment]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


class _ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it names {module}.{name}") from None


def load_arrays(data: bytes) -> Any:
    """Load numbers, bytes, text, lists, dictionaries and arrays; text of Python 2 becomes bytes.

    Raises:
        pickle.UnpicklingError: the pickle names anything else, or is damaged.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(str(error)) from error
