"""A request's body within a size and a time, whatever its headers say of it."""

import asyncio

from starlette.requests import ClientDisconnect, Request

from lathe.serving.limits import BadRequest

# seconds that a refused body is read on: a client that still sends would see a reset connection in place of the answer
LINGER = 1.0


async def read(request: Request, most: int, seconds: float) -> bytes:
    """The whole body. `request.state.unread` says whether some of it may still be under way.

    Raises:
        BadRequest: 413 it has more than `most` bytes, 408 it took longer than `seconds`.
        ClientDisconnect: the client went away.
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
    """Reads on for a moment, and forgets it; not if the client waits for leave to send it."""
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
