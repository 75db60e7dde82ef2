"""What one request may ask for, and how it is told that it asked for something else."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """`body`: bytes of a request's body. `pixels`: height times width of a picture, before any resizing. `samples`:
    rows of a request. `tokens`: ids of a sequence where the manifest names no longest."""

    body: int = 16 * 2**20
    pixels: int = 4096 * 4096
    samples: int = 256
    tokens: int = 65536


class BadRequest(Exception):
    """A request that cannot be answered: an HTTP `status` and one `sentence` that names the mistake and the way out."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
