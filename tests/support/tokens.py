"""A stream of unique tokens, for the tests of windows."""

import numpy as np

from lathe.data.tokens import Tokens

COUNT = 83  # each token has a unique id; not a multiple of any window


def stream(count: int = COUNT) -> Tokens:
    return Tokens(np.arange(count, dtype=np.uint16))


class Fixed:
    """A source of given streams."""

    vocab_size = COUNT

    def __init__(self, **sizes: int) -> None:
        self.sizes = {"train": COUNT, "val": 30, "test": 20, **sizes}

    def prepare(self) -> None: ...

    def load(self) -> dict[str, Tokens]:
        return {name: stream(size) for name, size in self.sizes.items()}
