"""The socket pair between the server and a worker, for batches and their answers.

A frame is a list of arrays, texts and nulls: two lengths, JSON with the dtype and shape of each array in its place, and
the arrays' bytes. Nothing is pickled, so a net in a worker can send the server only numbers and text.
"""

import asyncio
import json
import math
import struct
from collections.abc import Sequence
from socket import socket
from typing import Any

import numpy as np

Item = np.ndarray[Any, Any] | str | None
LENGTHS = struct.Struct("<QQ")


def pack(items: Sequence[Item]) -> bytes:
    arrays = [np.ascontiguousarray(item) for item in items if isinstance(item, np.ndarray)]
    head = json.dumps(
        [[item.dtype.str, item.shape] if isinstance(item, np.ndarray) else item for item in items]
    ).encode()
    parts = [array.reshape(-1).view(np.uint8).data for array in arrays]
    return b"".join([LENGTHS.pack(len(head), sum(len(part) for part in parts)), head, *parts])


def unpack(head: bytes | bytearray, content: bytes | bytearray) -> list[Any]:
    """Return the items of a frame; arrays are views of `content`.

    Raises:
        ValueError: not a frame.
    """
    found, at = [], 0
    for item in json.loads(head):
        if isinstance(item, list):
            name, shape = item
            item = np.frombuffer(content, np.dtype(name), math.prod(shape), at).reshape(shape)
            at += item.nbytes
        found.append(item)
    if at != len(content):
        raise ValueError("there is more than the arrays")
    return found


class WorkerEnd:
    """The worker's end. Raises EOFError if the server is gone or wants the worker to stop."""

    def __init__(self, end: socket) -> None:
        self._socket, self._file = end, end.makefile("rb")

    def send(self, items: Sequence[Item]) -> None:
        try:
            self._socket.sendall(pack(items))
        except OSError as error:
            raise EOFError from error

    def receive(self) -> list[Any]:
        head, content = LENGTHS.unpack(self._read(LENGTHS.size))
        return unpack(self._read(head), self._read(content))

    def _read(self, length: int) -> bytearray:
        found = bytearray(length)  # writable, as torch requires of an array
        try:
            if self._file.readinto(found) == length:
                return found
        except OSError as error:
            raise EOFError from error
        raise EOFError


class ServerEnd:
    """The server's end, in its event loop. Raises EOFError if the worker is gone or sends anything but frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket) -> "ServerEnd":
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    async def exchange(self, batch: Sequence[Item]) -> list[Any]:
        """Send a batch and return its answers, one for each input."""
        try:
            self._writer.write(pack(batch))
        except (OSError, RuntimeError) as error:
            raise EOFError from error
        return await self.receive(len(batch))

    async def receive(self, count: int) -> list[Any]:
        try:
            head, content = LENGTHS.unpack(await self._reader.readexactly(LENGTHS.size))
            found = unpack(await self._reader.readexactly(head), await self._reader.readexactly(content))
        except (OSError, ValueError, TypeError, RecursionError) as error:  # IncompleteReadError is an EOFError
            raise EOFError from error
        if len(found) != count:
            raise EOFError
        return found

    def close(self) -> None:
        self._writer.close()
