"""The wire between the server and one worker: a socket pair that carries a batch there and its answers back.

LitServe's own queues live in a third process (`multiprocessing.Manager`). A worker that is killed while it waits there takes the next
request with it, unseen, and each request costs four calls to that process. Here the server hands out batches itself, so it knows what a
worker holds, and the end of the socket tells at once that the worker is gone. Frames are pickled: both ends are this program's own.
"""

import asyncio
import pickle
import socket
import struct
from typing import Any

LENGTH = struct.Struct("<Q")


class WorkerEnd:
    """What LitServe's loop takes for its request queue and its transport, in the worker."""

    def __init__(self, end: socket.socket) -> None:
        self._socket, self._answers = end, []  # type: tuple[socket.socket, list[Any]]

    def send(self, item: Any, consumer_id: int) -> None:
        """Keeps an answer for the next `exchange`; LitServe calls this once per request."""
        self._answers.append(item)

    def exchange(self) -> list[Any]:
        """Sends the answers that were kept and waits for the next batch.

        Raises:
            EOFError: the server has gone, or wants this worker to stop.
        """
        if self._answers:
            self.put(self._answers)
            self._answers = []
        (length,) = LENGTH.unpack(self._receive(LENGTH.size))
        return list(pickle.loads(self._receive(length)))  # noqa: S301 - from the parent process

    def put(self, message: Any) -> None:
        frame = pickle.dumps(message, protocol=5)
        try:
            self._socket.sendall(LENGTH.pack(len(frame)) + frame)
        except OSError as error:
            raise EOFError from error

    def _receive(self, length: int) -> bytearray:
        found = bytearray(length)
        view, at = memoryview(found), 0
        while at < length:
            try:
                count = self._socket.recv_into(view[at:])
            except OSError as error:
                raise EOFError from error
            if not count:
                raise EOFError
            at += count
        return found


class ServerEnd:
    """The same in the server's event loop. A worker that is gone raises EOFError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> "ServerEnd":
        end.setblocking(False)
        return cls(*await asyncio.open_connection(sock=end))

    async def exchange(self, batch: list[Any]) -> Any:
        """Sends a batch and waits for its answers."""
        frame = pickle.dumps(batch, protocol=5)
        try:
            self._writer.write(LENGTH.pack(len(frame)) + frame)
        except (OSError, RuntimeError) as error:
            raise EOFError from error
        return await self.receive()

    async def receive(self) -> Any:
        try:
            (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))  # noqa: S301 - from a child process
        except OSError as error:  # IncompleteReadError is an EOFError
            raise EOFError from error

    def close(self) -> None:
        self._writer.close()
