"""Limits of a request, and the error of one that can't be answered."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of a request.

    `body`: bytes. `pixels`: height times width of a picture before resizing. `samples`: rows. `tokens`: ids of a
    sequence, if the manifest has no longest.
    """

    body: int = 16 * 2**20
    pixels: int = 4096 * 4096
    samples: int = 256
    tokens: int = 65536


class BadRequest(Exception):
    """A request that can't be answered: an HTTP `status` and one `sentence` with the mistake and the fix."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence
