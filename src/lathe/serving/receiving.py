"""Reads a request's body within limits of size and time, whatever its headers claim."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from lathe.serving.limits import BadRequest

# seconds for which a refused body is still read: a client that is sending would see a reset instead of the answer
LINGER = 1.0


async def read(request: Request, most: int, seconds: float) -> bytes:
    """Return the whole body. `request.state.unread` is set if some of it may still arrive.

    Raises:
        BadRequest: 413 it has more than `most` bytes, 408 it took longer than `seconds`.
        ClientDisconnect: the client disconnected.
    """
    too_large = BadRequest(413, f"The body has more than {most} bytes: send less at a time.")
    if int(request.headers.get("content-length", 0)) > most:
        await discard(request)
        raise too_large
    chunks: list[bytes] = []
    request.state.unread = True

    async def collect() -> bool:
        size = 0
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            size += len(message["body"])
            if size > most:
                return False
            chunks.append(message["body"])
            if not message.get("more_body", False):
                return True

    try:
        whole = await asyncio.wait_for(collect(), seconds)
    except TimeoutError:
        raise BadRequest(408, f"The body took longer than {seconds:g} seconds: send it faster.") from None
    if not whole:
        await discard(request)
        raise too_large
    request.state.unread = False
    return b"".join(chunks)


async def discard(request: Request) -> None:
    """Read and drop the rest of the body for `LINGER` seconds, unless the client waits for `100 Continue`."""
    request.state.unread = True
    if request.headers.get("expect", "").lower() == "100-continue":
        return

    async def drain() -> None:
        while True:
            message = await request.receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    try:
        await asyncio.wait_for(drain(), LINGER)
        request.state.unread = False
    except TimeoutError:
        pass
