"""Hardens uvicorn's HTTP protocol against slow, endless and half-closing clients.

It adds a deadline and an exact size limit for headers, one interpretation of a request's framing, answers to clients
that have closed their sending side, and errors as JSON.
"""

import asyncio
import json
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from lathe.serving.metrics import Metrics
from lathe.serving.options import Options
from lathe.serving.receiving import LINGER

# from a request's first byte to the end of its empty line; the same again for the trailers of a chunked body
HEADER_BYTES = 65536
UPGRADE = (b"upgrade", b"http2-settings")
UNREADABLE = "This is no HTTP request that can be read: check the request line, the headers and Content-Length."


def make_protocol(options: Options, metrics: Metrics) -> type[asyncio.Protocol]:
    """Return the protocol class for uvicorn's option `http`."""

    class Protocol(HttpToolsProtocol):
        """uvicorn's protocol with deadlines.

        A connection has `header_timeout` seconds for the headers of each request, the first from its opening. While
        answers are being written, a client must read something every `body_timeout` seconds.

        The parser gets headers line by line and bodies piece by piece, so that their boundaries are known: one packet
        may have the end of a request and more requests after it.
        """

        timer: asyncio.TimerHandle | None = None
        stuck: asyncio.TimerHandle | None = None  # runs while the client does not read its answers
        begun = False  # within the headers of a request
        size = 0  # bytes of those headers, or of a chunk's first line and the trailers after the last chunk
        left = 0  # bytes of the body, or of its chunk, that are still to come
        chunked = False  # within a chunked body
        line: bytes | None = b""  # the received part of a chunk's first line; None: in the trailers
        running: Any = None  # the request that is being answered
        over = False  # nothing more is parsed
        ended = False  # the client has closed its sending side
        refusal: tuple[int, str] | None = None  # the last answer, sent after those that are due

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._start()
            if len(self.connections) > 2 * options.max_connections:
                transport.abort()
            elif len(self.connections) > options.max_connections:
                self._refuse(503, f"{options.max_connections} connections are open already: connect again later.")

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            self._unwatch()
            if self.running is not None:  # uvicorn notifies only the newest request of a pipeline
                self.running.disconnected = True
                self.running.message_event.set()
            super().connection_lost(exc)

        def eof_received(self) -> bool:  # type: ignore[override]
            """Answer a client that has closed only its sending side.

            A client that is gone looks the same until something is written to it, so its request is computed once.
            """
            self.ended = True
            if self.begun or self.left or self.chunked:
                self._refuse(400, "The request ended before its headers or its body did: send the whole of it.")
            elif self._due():
                self.cycle.keep_alive = False
            return self._due()

        def data_received(self, data: bytes) -> None:
            self._unset_keepalive_if_required()
            if self.timer is None and not self.over and not self._due():
                self._start()
            at = 0
            while at < len(data) and not self.over:
                until = at + self.left if self.left else data.find(b"\n", at) + 1 or len(data)
                piece = data[at:until]
                at += len(piece)
                self._feed(piece)

        def _feed(self, piece: bytes) -> None:
            """Parse a line, a part of one, or bytes of a body."""
            if self.left:
                self.left -= len(piece)
                return self._parse(piece)
            self.size += len(piece)
            if self.size > HEADER_BYTES:
                what = "chunk's size and the trailers" if self.chunked else "request line and the headers"
                return self._refuse(431, f"The {what} have more than {HEADER_BYTES} bytes: send less.")
            in_chunks = self.chunked
            self._parse(piece)
            if in_chunks and self.chunked and self.line is not None and not self.over:
                self.line += piece
                if self.line.endswith(b"\n"):
                    length = int(self.line.partition(b";")[0], 16)  # which the parser has accepted too
                    self.left, self.size, self.line = (length + 2, 0, b"") if length else (0, self.size, None)

        def _parse(self, piece: bytes) -> None:
            try:
                self.parser.feed_data(piece)
            except httptools.HttpParserUpgrade:
                self._decline()
            except httptools.HttpParserError:
                self._refuse(400, UNREADABLE)

        def on_message_begin(self) -> None:
            self.begun = True
            super().on_message_begin()

        def on_header(self, name: bytes, value: bytes) -> None:
            if self.begun:  # the parser reports trailers in the same way
                super().on_header(name, value.rstrip(b" \t"))  # the parser keeps this whitespace

        def on_headers_complete(self) -> None:
            self._end()
            codings = [value for name, value in self.headers if name == b"transfer-encoding"]
            version = self.parser.get_http_version()
            if version not in ("1.0", "1.1") or (
                codings and (version == "1.0" or [one.lower() for one in codings] != [b"chunked"])
            ):
                raise ValueError(UNREADABLE)  # the parser passes it on
            self.scope["state"]["target"] = self.url
            super().on_headers_complete()
            self.chunked = bool(codings)
            self.left = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
            self.size, self.line = 0, b""

        def on_message_complete(self) -> None:
            self.chunked, self.left, self.size = False, 0, 0
            super().on_message_complete()

        def _start_asgi_task(self, cycle: Any, app: Any) -> None:
            self.running = cycle
            super()._start_asgi_task(cycle, app)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                self._close()
            elif self.refusal is not None and not self._due():
                self._say_refusal()

        def _due(self) -> bool:
            """Return whether answers are still to come."""
            return self.running is not None and not self.running.response_complete and not self.running.disconnected

        def _should_upgrade(self) -> bool:
            return True  # to any protocol; `_decline` ignores the offer

        def _decline(self) -> None:
            """Parse a request again without its offer of HTTP/2, after which httptools takes no body."""
            method = self.parser.get_method()
            if method == b"CONNECT":
                return self._refuse(400, UNREADABLE)
            head = method + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode() + b"\r\n"
            for name, value in self.headers:
                if name == b"connection":
                    value = b", ".join(word for word in value.split(b",") if word.strip().lower() not in UPGRADE)
                if name not in UPGRADE:
                    head += name + b": " + value + b"\r\n"
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._parse(head + b"\r\n")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch(self.transport.get_write_buffer_size())

        def resume_writing(self) -> None:
            if not self.transport.is_closing():
                self._unwatch()
            super().resume_writing()

        def _unwatch(self) -> None:
            if self.stuck is not None:
                self.stuck.cancel()
                self.stuck = None

        def _watch(self, left: int) -> None:
            self._unwatch()
            self.stuck = self.loop.call_later(options.body_timeout, self._move_on, left)

        def _move_on(self, before: int) -> None:
            """Abort the connection if the client has read nothing since."""
            left = self.transport.get_write_buffer_size()
            if left < before:
                self._watch(left)
            else:
                self.transport.abort()

        def _close(self) -> None:
            """Close, but write what is left for as long as the client reads it."""
            self.transport.close()
            if self.stuck is None:
                self._watch(self.transport.get_write_buffer_size())

        def timeout_keep_alive_handler(self) -> None:
            self._close()

        def _start(self) -> None:
            self.timer = self.loop.call_later(options.header_timeout, self._late)

        def _end(self) -> None:
            self.begun = False
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None

        def _late(self) -> None:
            self.timer = None
            if self.begun:
                self._refuse(
                    408, f"The headers took longer than {options.header_timeout:g} seconds: send them at once."
                )
            else:
                self._close()

        def _refuse(self, status: int, sentence: str) -> None:
            """Set the connection's last answer. Earlier requests get theirs first."""
            self._end()
            if self.over or self.transport.is_closing():
                return
            self.over = True
            cycle = self.cycle
            if cycle is not None and cycle.more_body and not cycle.response_complete:  # this is the refused request
                if cycle is not self.running:
                    self.pipeline.popleft()
                elif cycle.response_started:  # its answer has begun: don't wait for its body
                    cycle.keep_alive = False
                    return
                cycle.disconnected = True  # makes the reader of its body stop
                cycle.message_event.set()
            self.refusal = status, sentence
            if not self._due():
                self._say_refusal()

        def _say_refusal(self) -> None:
            assert self.refusal is not None
            status, sentence = self.refusal
            self._unset_keepalive_if_required()
            body = json.dumps({"error": sentence}).encode()
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode()
            )
            self.transport.write(STATUS_LINE[status] + head + body)
            metrics.answered("other", status)
            try:
                if self.ended or not self.transport.can_write_eof():
                    return self._close()
                self.transport.write_eof()
            except OSError:  # the client has gone
                return self.transport.abort()
            self.flow.resume_reading()
            self.timer = self.loop.call_later(LINGER, self._close)

    return Protocol


def options_of(options: Options, metrics: Metrics) -> dict[str, Any]:
    """Return uvicorn's options, apart from the app."""
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
