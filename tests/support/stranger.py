"""A seeded client that sends valid and hostile HTTP, and checks each answer."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.server_process import Answer
from support.strange_requests import REFUSED, RIGHT, Requests, Sent

Array = np.ndarray[Any, Any]
PATHS = re.compile(r"Traceback|File \"|site-packages|/(home|root|tmp|usr|work|var)/|\.py\b|0x[0-9a-f]{8}")


@dataclass
class Stranger:
    """The client. `connect` opens a connection, `compute` is the net: uint8 `[n, 1, 8, 8]` to logits `[n, 10]`."""

    seed: int
    connect: Callable[[], socket.socket]
    compute: Callable[[Array], Array]
    patience: float = 0.0  # the most seconds between the pieces of a request
    answered: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.requests = Requests(self.seed)
        self.random = self.requests.random

    def visit(self, connections: int) -> None:
        """Open connections one after another; an AssertionError names the seed and the number of the failed one."""
        for number in range(connections):
            requests = list(self._conversation())
            try:
                self._talk(requests)
            except (AssertionError, OSError) as error:
                told = b" | ".join(request.content[:300] for request in requests)
                raise AssertionError(f"seed={self.seed}, connection {number}: {error!r}: {told!r}") from error

    def _conversation(self) -> Iterator[Sent]:
        for _ in range(self.random.choice([1, 1, 2, 4])):
            request = self.requests.one()
            yield request
            if request.last:
                return

    def _talk(self, requests: list[Sent]) -> None:
        with self.connect() as connection:
            pipelined = self.random.random() < 0.4
            half = requests[-1].last or self.random.random() < 0.3
            for group in [requests] if pipelined else [[request] for request in requests]:
                with suppress(OSError):  # refused and closed
                    for piece in self._pieces(b"".join(request.content for request in group)):
                        connection.sendall(piece)
                        time.sleep(self.random.random() * self.patience)
                    if half and group[-1] is requests[-1]:
                        connection.shutdown(socket.SHUT_WR)
                file = connection.makefile("rb")
                for request in group:
                    answer = receive(file, request.head)
                    if answer is None:
                        assert request is not requests[0] or request.verdict != RIGHT, "no answer"
                        assert any(before.last for before in requests[: requests.index(request) + 1]), "ended too early"
                        return
                    self._judge(request, answer)
                    if answer.headers.get("connection") == "close":
                        return

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        way = self.random.choice(["whole", "whole", "few", "bytes"])
        if way == "bytes" and len(content) < 2000:
            yield from (content[at : at + 1] for at in range(len(content)))
            return
        cuts = sorted(self.random.sample(range(len(content) + 1), min(3, len(content)))) if way == "few" else []
        yield from (
            content[start:end] for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True) if start < end
        )

    def _judge(self, request: Sent, answer: Answer) -> None:
        self.answered[answer.status] = self.answered.get(answer.status, 0) + 1
        text = answer.body.decode("latin-1")
        assert answer.status < 500, text
        if answer.status >= 400 and not request.head:
            assert answer.sentence
            assert not PATHS.search(text), text
        if request.verdict == RIGHT:
            assert answer.status == 200, text
            if request.images is not None:
                self._compare(request, answer)
        elif request.verdict == REFUSED:
            assert answer.status >= 400, text

    def _compare(self, request: Sent, answer: Answer) -> None:
        logits = self.compute(request.images)  # type: ignore[arg-type]
        if request.top_k is None:
            np.testing.assert_allclose(
                np.frombuffer(answer.body, "<f4").reshape(logits.shape), logits, rtol=1e-4, atol=1e-4
            )
            return
        rows = answer.json["predictions"]
        for row, expected in zip([rows] if request.single else rows, logits.astype(np.float64), strict=True):
            shares = np.exp(expected - expected.max()) / np.exp(expected - expected.max()).sum()
            assert len(row) == min(request.top_k, 10)
            assert len({line["index"] for line in row}) == len(row)
            np.testing.assert_allclose(
                [line["probability"] for line in row], np.sort(shares)[::-1][: len(row)], atol=1e-4
            )
            np.testing.assert_allclose(
                [line["probability"] for line in row], [shares[line["index"]] for line in row], atol=1e-4
            )


def receive(file: Any, head: bool) -> Answer | None:
    """Return the next answer, parsed strictly; None if the connection ends before it."""
    with suppress(ConnectionError):
        first = file.readline()
        if first.startswith(b"HTTP/1.1 100 "):
            assert file.readline() == b"\r\n"
            first = file.readline()
        if not first:
            return None
        match = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", first)
        assert match, first
        headers = {}
        while (line := file.readline()) != b"\r\n":
            name, _, value = line.decode("latin-1").rstrip("\r\n").partition(": ")
            assert name.lower() not in headers, line
            headers[name.lower()] = value
        length = int(headers["content-length"])
        body = b"" if head else file.read(length)
        assert len(body) == (0 if head else length)
        return Answer(int(match[1]), headers, body)
    return None
