"""The channel between server and worker."""

import asyncio
import io
import json
import pickle
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from lathe.serving.channel import LENGTHS, ServerEnd, WorkerEnd


def exchange(answer: Callable[[WorkerEnd, socket.socket], Any], *batch: Any) -> list[Any]:
    """Return what the server's end gets for `batch` if a worker does `answer` and exits."""
    ours, theirs = socket.socketpair()

    def work() -> None:
        with theirs:
            answer(WorkerEnd(theirs), theirs)

    async def ask() -> list[Any]:
        end = await ServerEnd.open(ours)
        try:
            return await asyncio.wait_for(end.exchange(batch), 10)
        finally:
            end.close()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        return asyncio.run(ask())
    finally:
        thread.join(10)


ARRAYS = [
    np.arange(12, dtype=np.uint8).reshape(1, 3, 4)[:, :, ::2],
    np.float32([[np.nan, -np.inf, 1e-45]]),
    np.arange(6).reshape(2, 3).T,
    np.zeros((2, 0), np.float32),
    np.random.default_rng(0).integers(0, 256, (9, 3, 300, 301), dtype=np.uint8),
]


def test_arrays_texts_and_nulls_come_back_as_they_were() -> None:
    seen: list[Any] = []

    def echo(end: WorkerEnd, _: socket.socket) -> None:
        seen.extend(end.receive())
        end.send(seen)

    sent = [*ARRAYS, None, "é\n", *ARRAYS]
    found = exchange(echo, *sent)
    for items in (seen, found):
        assert len(items) == len(sent)
        for item, expected in zip(items, sent, strict=True):
            if isinstance(expected, np.ndarray):
                assert item.dtype == expected.dtype
                np.testing.assert_array_equal(item, expected)
            else:
                assert item == expected
    assert all(item.flags.writeable for item in seen if isinstance(item, np.ndarray))  # as torch requires


class Trap:
    def __reduce__(self) -> Any:
        return pytest.fail, ("the server has loaded a pickle",)


def frame(head: Any, content: bytes = b"") -> bytes:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return LENGTHS.pack(len(text), len(content)) + text + content


def objects() -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Trap()], dtype=object), allow_pickle=True)
    return file.getvalue()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        frame([["<f4", [1]]], b"abc"),
        frame([["<f4", [1]]], b"abcde"),
        frame([["|O", [1]]], b"abcdefgh"),
        frame([["no type", [1]]], b"abcd"),
        frame([]),
        frame(b"\xff"),
        frame(b"[" * 100_000),
        frame(pickle.dumps([Trap()])),
        frame(objects()),
    ],
)
def test_a_worker_that_sends_anything_else_counts_as_dead(sent: bytes) -> None:
    def answer(end: WorkerEnd, wire: socket.socket) -> None:
        end.receive()
        wire.sendall(sent)

    with pytest.raises(EOFError):
        exchange(answer, ARRAYS[0])
