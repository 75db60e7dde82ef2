"""The wire between the server and one worker: a socket pair that carries a batch there and its answers back.

A frame is a list of arrays, texts and nulls: two lengths, then JSON with the type and shape of each array in its place,
then the arrays' bytes. Nothing is pickled: whatever a net does in its worker, the server reads numbers and text.
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
    """The items of a frame; arrays are views of `content`.

    Raises:
        ValueError: it is no frame.
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
    """In the worker. A server that has gone, or wants this worker to stop, raises EOFError."""

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
        found = bytearray(length)  # so that its arrays can be written to, as torch wants
        try:
            if self._file.readinto(found) == length:
                return found
        except OSError as error:
            raise EOFError from error
        raise EOFError


class ServerEnd:
    """The same in the server's event loop. A worker that is gone, or sends anything but frames, raises EOFError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket) -> "ServerEnd":
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    async def exchange(self, batch: Sequence[Item]) -> list[Any]:
        """Sends a batch and waits for its answers, one for each input."""
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
