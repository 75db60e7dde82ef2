"""`scripts/serve.py`: uvicorn listens in this process, `app` answers, and `batcher` runs the worker processes."""

import asyncio
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from lathe.errors import UserError
from lathe.serving.app import App
from lathe.serving.batcher import Batcher, launch
from lathe.serving.model import is_batched
from lathe.serving.options import KEY, Options

HEADER_BYTES = 65536  # of a request line and headers


def make_protocol(header_timeout: float) -> type[HttpToolsProtocol]:
    """Return uvicorn's protocol with limits of time and size for the headers of a request, which uvicorn lacks."""

    class Protocol(HttpToolsProtocol):
        deadline: asyncio.TimerHandle | None = None  # while headers are to come
        size = 0  # bytes received within these headers, after the first

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.deadline = self.loop.call_later(header_timeout, transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.size = 0
            if self.deadline is None:
                self.deadline = self.loop.call_later(header_timeout, self.transport.close)

        def data_received(self, data: bytes) -> None:
            self.size += len(data)
            super().data_received(data)
            if self.deadline is not None and self.size > HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response(f"The headers have more than {HEADER_BYTES} bytes.")

        def on_headers_complete(self) -> None:
            self._stop()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop()
            super().connection_lost(exc)

        def _stop(self) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None

    return Protocol


class Server(uvicorn.Server):
    """The server of one net; `facts` are the target's manifest."""

    def __init__(self, options: Options, facts: dict[str, Any]) -> None:
        self.options = options
        self.batcher = Batcher(partial(launch, options=options, facts=facts), options)
        super().__init__(
            uvicorn.Config(
                App(self.batcher, options, facts),
                http=make_protocol(options.header_timeout),
                ws="none",
                lifespan="off",
                log_level="error",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=options.max_connections,
                timeout_keep_alive=options.keep_alive_timeout,  # type: ignore[arg-type]  # passed to call_later
                timeout_graceful_shutdown=options.stop_timeout,  # type: ignore[arg-type]
            )
        )

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until SIGINT or SIGTERM, answer accepted requests, and return when all workers have stopped."""
        starting = asyncio.create_task(self.batcher.start())

        def stop() -> None:
            self.force_exit = self.should_exit  # the second signal does not wait for answers
            self.should_exit = True
            starting.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        try:
            await asyncio.wait({starting})
            if not starting.cancelled():
                starting.result()
                assert sockets
                host, port = sockets[0].getsockname()[:2]
                host = f"[{host}]" if ":" in host else host
                where = f" on {', '.join(dict.fromkeys(self.options.devices))}" if self.options.devices else ""
                key = f"; requests need the API key of api_key or {KEY}" if self.options.api_key else ""
                what = f"{self.options.run} (target={self.options.target}{where})"
                print(f"Serving {what} at http://{host}:{port}{key}. Ctrl-C stops it.", flush=True)
                await super().serve(sockets)
        finally:
            await self.batcher.stop()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # `serve` handles them; uvicorn would raise them again at the end


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that no other process takes the port while the net is loaded."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise UserError(f"port={port} at host={host} can't be used ({error.strerror}): choose another.") from error


def serve(options: Options, facts: dict[str, Any]) -> None:
    """Serve the net of a manifest until a signal: the job of scripts/serve.py."""
    if "inputs" in facts and not is_batched(facts):
        options = replace(options, max_batch_size=1)  # requests can't be computed together
    with listen(options.host, options.port) as listener:
        Server(options, facts).run([listener])
