"""`scripts/serve.py`: LitServe starts the workers and runs their loop and hooks; this server listens, queues and watches over them.

LitServe's own `run()` is not used, for what LitServe 0.2.19 does there: a restarted worker leaves the requests that the dead one held
without an answer (its monitor looks at them in another process), a SIGTERM leaves children behind, Ctrl-C kills workers before they have
answered, and collecting a batch holds up every request by the whole `batch_timeout`. Here the HTTP server lives in the first process, and
`engine` takes the place of LitServe's queues.
"""

import asyncio
import errno
import signal
import socket
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Request
from litserve import LitServer
from litserve.utils import configure_logging
from starlette.exceptions import HTTPException
from starlette.responses import Response

from lathe.errors import UserError
from lathe.serving import model
from lathe.serving import options as serve_options
from lathe.serving.api import Api
from lathe.serving.bodies import quoted
from lathe.serving.channel import WorkerEnd
from lathe.serving.engine import Engine
from lathe.serving.hosts import Hosts
from lathe.serving.limits import BadRequest
from lathe.serving.options import Options
from lathe.serving.protocol import options_of
from lathe.serving.routes import Outermost, Routes, refusal


class Server(LitServer):
    """LitServe's server of one net. `facts` are the manifest of what `options` names."""

    def __init__(self, options: Options, facts: dict[str, Any]) -> None:
        self.options, self.facts = options, facts
        self.engine = Engine(self.launch, options)
        self.workers_setup_status: dict[str, str] = {}
        super().__init__(
            Api(options, facts),
            accelerator="cpu",  # the exports and the module compute on the CPU
            workers_per_device=options.workers,
            timeout=options.request_timeout,
            disable_openapi_url=True,
        )

    def register_endpoints(self) -> None:
        """LitServe's hook: our routes in place of its own."""
        about = {
            "receipt": model.receipt(Path(self.options.run)),
            "limits": {"body_bytes": self.options.limits.body, "pixels": self.options.limits.pixels, "samples": self.options.limits.samples,
                       "tokens": self.options.limits.tokens, "queue": self.options.max_queue, "seconds": self.options.request_timeout},
            "server": {"litserve": metadata.version("litserve"), "workers": self.options.workers, "threads": self.options.threads,
                       "max_batch_size": self.options.max_batch_size, "batch_timeout": self.options.batch_timeout},
        }  # fmt: skip
        self.app.router.routes[:] = Routes(self.engine, self.options, self.facts, about).routes()
        self.app.router.redirect_slashes = False
        self.app.add_exception_handler(HTTPException, _unknown)

    def launch(self, index: int) -> tuple[BaseProcess, socket.socket]:
        """Starts worker `index` by LitServe's own means, with one end of a socket pair for its queue and its transport."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._transport = WorkerEnd(theirs)
            self.litapi_request_queues[self.lit_api.api_path] = self._transport
            process: BaseProcess = self.launch_single_inference_worker(self.lit_api, index)
        return process, ours

    def serve(self, listener: socket.socket) -> None:
        """Answers until SIGINT or SIGTERM, then what it has accepted, and returns when no worker is left.

        Raises:
            UserError: a worker can't load the net.
        """
        configure_logging("error")
        config = uvicorn.Config(
            Outermost(self.app, self.engine, Hosts(self.options.host, self.options.hosts)),
            **options_of(self.options, self.engine.metrics),
        )
        make_loop = config.get_loop_factory() or asyncio.new_event_loop
        loop = make_loop()
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._serve(_Uvicorn(config, self._greet), listener))
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    async def _serve(self, server: "_Uvicorn", listener: socket.socket) -> None:
        starting = asyncio.ensure_future(self.engine.start())
        stopped = asyncio.Event()

        def stop() -> None:
            server.force_exit = server.should_exit  # the second signal does not wait for answers
            server.should_exit = True
            stopped.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        waiting = asyncio.ensure_future(stopped.wait())
        try:
            await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                await server.serve(sockets=[listener])
        finally:
            starting.cancel()
            waiting.cancel()
            await asyncio.gather(starting, waiting, return_exceptions=True)
            await self.engine.stop()

    def _greet(self, address: tuple[Any, ...]) -> None:
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        key = f"; requests need the API key of api_key or {serve_options.KEY}" if self.options.api_key else ""
        print(
            f"Serving {self.options.run} (target={self.options.target}) at http://{host}:{address[1]}{key}. Ctrl-C stops it.",
            flush=True,
        )


class _Uvicorn(uvicorn.Server):
    """uvicorn's server without its own handling of signals, which raises them again at the end."""

    def __init__(self, config: uvicorn.Config, greet: Any) -> None:
        super().__init__(config)
        self.greet = greet

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        await self._serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        assert sockets
        self.greet(sockets[0].getsockname())


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        sentence = f"There is nothing at {quoted(request.scope['path'])}: the paths are /, /predict, /health, /metrics and /info."
    elif error.status_code == 405:
        sentence = f"{request.method} is not for {quoted(request.scope['path'])}: POST goes to /predict, GET to the others."
    else:
        sentence = str(error.detail)
    answer = refusal(BadRequest(error.status_code, sentence))
    answer.headers.update(error.headers or {})
    return answer


def listen(host: str, port: int) -> socket.socket:
    """A socket that is bound, so that nobody else takes the port while the net is loaded; it listens once that is done.

    Raises:
        UserError: the address is not this machine's, or in use.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:  # a label of a name is empty, or too long
        reason = getattr(error, "strerror", None) or "no name can be so"
        raise UserError(f"host={host} is no address of this machine ({reason}): give 127.0.0.1, or 0.0.0.0 for all.") from error
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
    """The job of scripts/serve.py: serves the run until it is stopped by a signal.

    Raises:
        UserError: an option that can't be, no such run or export, or a port in use.
    """
    options = serve_options.read(cfg["request"], str(Path(cfg["paths"]["run_dir"])))
    listener = listen(options.host, options.port)
    with listener:
        facts = model.describe(options.run, options.target, options.checkpoint)
        serve_options.check_batch(options, model.example(facts).nbytes)
        Server(options, facts).serve(listener)
