"""`scripts/serve.py`: uvicorn listens in this process, `routes` answers, and `engine` runs the worker processes."""

import asyncio
import errno
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware.gzip import GZipMiddleware

from lathe.errors import UserError
from lathe.serving import model, worker
from lathe.serving import options as serve_options
from lathe.serving.engine import Engine
from lathe.serving.options import Options
from lathe.serving.protocol import options_of
from lathe.serving.routes import App


class Server(uvicorn.Server):
    """The server of one net; `facts` are the target's manifest."""

    def __init__(self, options: Options, facts: dict[str, Any]) -> None:
        self.options = options
        self.engine = Engine(partial(worker.launch, options=options, facts=facts), options)
        app = GZipMiddleware(App(self.engine, options, facts), minimum_size=1000)
        super().__init__(uvicorn.Config(app, **options_of(options, self.engine.metrics)))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until SIGINT or SIGTERM, answer accepted requests, and return when all workers have stopped."""
        starting = asyncio.create_task(self.engine.start())

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
                await super().serve(sockets)
        finally:
            await self.engine.stop()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # `serve` handles them; uvicorn would raise them again at the end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        address = sockets[0].getsockname()
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        where = f" on {', '.join(dict.fromkeys(self.options.devices))}" if self.options.devices else ""
        key = f"; requests need the API key of api_key or {serve_options.KEY}" if self.options.api_key else ""
        print(
            f"Serving {self.options.run} (target={self.options.target}{where}) at http://{host}:{address[1]}{key}. "
            "Ctrl-C stops it.",
            flush=True,
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket, so that no other process takes the port while the net is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # UnicodeError: an empty or too long label of a name
        reason = getattr(error, "strerror", None) or "no name can be so"
        raise UserError(
            f"host={host} is no address of this machine ({reason}): give 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port={port} is in use at {host}: choose another, or port=0 for any free one.") from error
        if error.errno == errno.EACCES:
            raise UserError(f"port={port} may not be used by this user: choose one from 1024.") from error
        raise UserError(
            f"host={host} is no address of this machine ({error.strerror}): give 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    return listener


def serve(cfg: dict[str, Any]) -> None:
    """Serve the run until a signal: the job of scripts/serve.py."""
    options = serve_options.read(cfg["request"], str(Path(cfg["paths"]["run_dir"])))
    listener = listen(options.host, options.port)
    with listener:
        facts = model.describe(options.run, options.target, options.checkpoint)
        serve_options.check_batch(options, model.example(facts).nbytes)
        Server(options, facts).run([listener])
