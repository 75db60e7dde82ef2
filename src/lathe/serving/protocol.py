"""uvicorn's HTTP protocol with what it lacks against slow and endless clients: a deadline and a size for headers, errors as JSON."""

import asyncio
import json
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lathe.serving.metrics import Metrics
from lathe.serving.options import Options

HEADER_BYTES = 65536


def make_protocol(options: Options, metrics: Metrics) -> type[asyncio.Protocol]:
    """The protocol's class, as uvicorn's `http` takes it."""

    class Protocol(HttpToolsProtocol):
        """A connection has `header_timeout` seconds for the headers of each request; the first ones count from its opening. Of answers that
        are on their way, a client has to read something every `body_timeout` seconds."""

        timer: asyncio.TimerHandle | None = None
        begun = False  # in the headers of a request
        size = 0  # of those headers, bytes
        chunk = b""  # what was received last
        running: Any = None  # the request that is being answered
        stuck: asyncio.TimerHandle | None = None  # while the client does not read its answers

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()
            if len(self.connections) > options.max_connections:
                self._refuse(503, f"{options.max_connections} connections are open already: connect again later.")

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            self.resume_writing()
            if self.running is not None:  # uvicorn tells the newest request of a pipeline alone
                self.running.disconnected = True
                self.running.message_event.set()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.timer is None and (self.cycle is None or self.cycle.response_complete):
                self._start()
            self.size += len(data)
            self.chunk = data
            super().data_received(data)
            if self.begun and self.size > HEADER_BYTES:
                self._refuse(431, f"The headers have more than {HEADER_BYTES} bytes: send less.")

        def on_message_begin(self) -> None:
            self.begun = True
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._end()
            super().on_headers_complete()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self.running = cycle
            super()._start_asgi_task(cycle, app)

        def _should_upgrade(self) -> bool:
            return True  # whatever it is to: `handle_websocket_upgrade` declines

        def handle_websocket_upgrade(self) -> None:
            """Java's client and curl --http2 offer HTTP/2 with a request; behind such an offer httptools takes no body. So the request is
            read again without the offer."""
            error, method = sys.exc_info()[1], self.parser.get_method()
            if method == b"CONNECT" or error is None:
                return self.send_400_response("")
            kept = [pair for pair in self.headers if pair[0] not in (b"connection", b"upgrade", b"http2-settings")]
            head = b"".join(name + b": " + value + b"\r\n" for name, value in kept)
            self.parser = httptools.HttpRequestParser(self)
            self.data_received(method + b" " + self.url + b" HTTP/1.1\r\n" + head + b"\r\n" + self.chunk[error.args[0] :])

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            if self.stuck is not None:
                self.stuck.cancel()
                self.stuck = None
            super().resume_writing()

        def _watch(self, left: int) -> None:
            self.stuck = self.loop.call_later(options.body_timeout, self._move_on, left)

        def _move_on(self, before: int) -> None:
            """Ends the connection of a client that has read nothing since."""
            left = self.transport.get_write_buffer_size()
            if left < before:
                self._watch(left)
            else:
                self.transport.abort()

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "This is no HTTP request that can be read: check the request line, the headers and Content-Length.")

        def _start(self) -> None:
            self.size = 0
            self.timer = self.loop.call_later(options.header_timeout, self._late)

        def _end(self) -> None:
            self.begun = False
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _late(self) -> None:
            self.timer = None
            if self.begun:
                self._refuse(408, f"The headers took longer than {options.header_timeout:g} seconds: send them at once.")
            elif not self.transport.is_closing():
                self.transport.close()

        def _refuse(self, status: int, sentence: str) -> None:
            self._end()
            if self.transport.is_closing():
                return
            if self.cycle is not None and not self.cycle.response_complete:
                if self.cycle.response_started or not self.cycle.more_body or self.pipeline:
                    self.cycle.keep_alive = False  # it is being answered, and what follows it on this connection can't be read
                    self.flow.pause_reading()
                    return
                self.cycle.disconnected = True  # its own body can't be read: whoever reads it is told to leave
                self.cycle.message_event.set()
            body = json.dumps({"error": sentence}).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            self.transport.write(STATUS_LINE[status] + head + body)
            metrics.answered("other", status)
            self.transport.close()

    return Protocol


def options_of(options: Options, metrics: Metrics) -> dict[str, Any]:
    """What uvicorn is told besides the app."""
    return {
        "http": make_protocol(options, metrics),
        "ws": "none",
        "lifespan": "off",
        "log_level": "error",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": options.keep_alive_timeout,
        "timeout_graceful_shutdown": options.stop_timeout,
    }
