"""The server in this process, on loopback: the export computes immediately, instead of workers."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import uvicorn

from lathe.serving.options import Options
from lathe.serving.server import Server, listen
from support.server_process import Answer, ask, message


class Here:
    """The server. `compute` replaces the workers: inputs of the export to its logits. `loop` makes the event loop."""

    def __init__(
        self,
        options: Options,
        facts: dict[str, Any],
        compute: Callable[[Any], Any],
        loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self.options, self.make_loop = options, loop
        server = Server(options, facts)

        async def predict(inputs: np.ndarray, timeout: float, urgent: bool = False) -> np.ndarray:
            await asyncio.sleep(0)
            found = np.asarray(compute(inputs))
            return found if found.dtype.names else found.astype(np.float32)

        server.batcher.predict, server.batcher.ready = predict, 1  # type: ignore[method-assign]
        self.uvicorn = uvicorn.Server(server.config)  # without its workers and signals
        self.listener = listen(options.host, 0)
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        loop = self.make_loop()
        try:
            loop.run_until_complete(self.uvicorn._serve([self.listener]))
        finally:
            loop.close()

    def __enter__(self) -> "Here":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        with self.connect() as connection:
            return ask(connection, message(method, path, body, **headers))
