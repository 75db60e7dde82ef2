"""The server's HTTP protocol without a network: data arrive in exactly the given pieces."""

import asyncio
import json
import re
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from lathe.serving.metrics import Metrics
from lathe.serving.options import Options
from lathe.serving.protocol import options_of


class Pipe(asyncio.Transport):
    """A transport that keeps what is written, and signals its end like a socket's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop, self.written, self.closed, self.eof = loop, b"", False, False
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        assert not self.eof, "written behind its own end"
        if not self.closed:
            self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"sockname": ("127.0.0.1", 8000), "peername": ("127.0.0.1", 50000)}.get(name, default)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the request."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message.get("more_body", False)
    names = [name.decode() for name, _ in scope["headers"]]
    told = json.dumps({"path": scope["path"], "body": body.decode("latin-1"), "names": names}).encode()
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(told)).encode())]}
    )
    await send({"type": "http.response.body", "body": told})


def exchange(options: Options, *pieces: bytes, end: bool = False) -> tuple[list[tuple[int, Any]], bool]:
    """Return status and JSON of the answers, and whether the connection closed. `end` closes the client's side."""

    async def talk() -> tuple[bytes, bool]:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(echo, **options_of(options, Metrics(lambda: 0, lambda: 1)))
        config.load()
        pipe = Pipe(loop)
        pipe.protocol = config.http_protocol_class(config=config, server_state=ServerState(), app_state={}, _loop=loop)  # type: ignore[call-arg]
        pipe.protocol.connection_made(pipe)
        for number, piece in enumerate(pieces):
            if not pipe.closed:
                pipe.protocol.data_received(piece)
            if number % 64 == 0 or len(piece) > 1000:
                await asyncio.sleep(0)
        if end and not pipe.closed and not pipe.protocol.eof_received():
            pipe.close()
        for _ in range(20):
            await asyncio.sleep(0)
        ended = pipe.closed or pipe.eof
        pipe.close()
        await asyncio.sleep(0)
        return pipe.written, ended

    written, ended = asyncio.run(talk())
    return list(parsed(written)), ended


def parsed(written: bytes) -> Any:
    while written:
        head, _, rest = written.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status == 100:
            written = rest
            continue
        found = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
        assert found, head
        length = int(found[1])
        assert len(rest) >= length, "an answer is cut off"
        yield status, json.loads(rest[:length])
        written = rest[length:]
