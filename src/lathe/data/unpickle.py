"""Reading a pickle of NumPy arrays without running anything that it names."""

import io
import pickle  # through a class that resolves three names only
from collections.abc import Callable
from typing import Any

import numpy as np


def _latin1(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old protocols; any other codec is refused."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"codec {encoding}")
    return text.encode("latin1")


# NumPy moved these modules; an array's own reduction gives the function under whatever name it has now
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
    """Numbers, bytes, text, lists, dictionaries and arrays; text of Python 2 comes as bytes.

    Raises:
        pickle.UnpicklingError: if the pickle names anything else than an array's parts, or is damaged.
    """
    try:
        return _ArrayUnpickler(io.BytesIO(data), encoding="bytes").load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise pickle.UnpicklingError(str(error)) from error
