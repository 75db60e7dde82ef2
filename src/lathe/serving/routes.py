"""The ASGI application: the answer of each path."""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lathe.serving import answers, auth, decode, model, receiving
from lathe.serving.bodies import quoted
from lathe.serving.engine import Engine
from lathe.serving.hosts import Hosts
from lathe.serving.limits import BadRequest
from lathe.serving.options import Options
from lathe.serving.page import page

INLINE = 65536  # bytes of a body that is decoded in the event loop, since a thread would take longer
JSON, BINARY, HTML = "application/json", "application/octet-stream", "text/html; charset=utf-8"
MOST = 65536  # lines of an answer: they are formatted in the event loop, which blocks other requests
# in addition to the page's own policy, which can't forbid framing
FOR_BROWSERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
GONE = 499  # the client has disconnected; only /metrics has this status
Handler = Callable[[Request], Awaitable[Response]]


class App:
    """The application. `facts` are the export's manifest."""

    def __init__(self, engine: Engine, options: Options, facts: dict[str, Any]) -> None:
        self.engine, self.options, self.facts = engine, options, facts
        self.hosts = Hosts(options.host, options.hosts)
        self.example = model.example(facts)
        self.page = page(facts).encode()
        self.about = json.dumps(about(options, facts)).encode()
        self.handlers: dict[str, Handler] = {
            "/predict": self.predict,
            "/health": self.health,
            "/metrics": self.metrics,
            "/info": self.info,
            "/": self.index,
        }
        self._probe: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: count it, and turn an error into one sentence. Tracebacks are only logged."""
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), *FOR_BROWSERS]
                if request.state.unread:  # some of the request may still arrive
                    message["headers"].append((b"connection", b"close"))
                self.engine.metrics.answered(scope["path"], message["status"])
            await send(message)

        request = Request(scope, receive)
        try:
            response = await self._answer(request)
            await response(scope, receive, counted)
        except asyncio.CancelledError:  # stop_timeout is over
            if not started:
                request.state.unread = True
                stopping = BadRequest(503, "The server is stopping: send it again later.")
                await refusal(stopping, request)(scope, receive, counted)
        except Exception:
            if started:
                raise
            logging.getLogger("uvicorn.error").exception("The server met an error of its own.")
            own = BadRequest(500, "The server met an error of its own: its log says which.")
            await refusal(own, request)(scope, receive, counted)

    async def _answer(self, request: Request) -> Response:
        try:
            try:
                return await self._handler(request)(request)
            finally:
                if not hasattr(request.state, "unread"):  # the handler has not read the body
                    await receiving.discard(request)
        except BadRequest as error:
            return refusal(error, request)
        except ClientDisconnect:
            return Response(status_code=GONE)

    def _handler(self, request: Request) -> Handler:
        """Return the handler of the request's path."""
        self.hosts.check(request.scope)
        path, method = request.scope["path"], request.method
        if path not in self.handlers:
            raise BadRequest(
                404, f"There is nothing at {quoted(path)}: the paths are /, /predict, /health, /metrics and /info."
            )
        if method not in allowed(path):
            raise BadRequest(405, f"{method} is not for {quoted(path)}: POST goes to /predict, GET to the others.")
        auth.check(path, request.headers, self.options.api_key)
        return self.handlers[path]

    async def predict(self, request: Request) -> Response:
        began = time.perf_counter()
        if self.engine.full:
            raise BadRequest(503, f"{self.options.max_queue} requests wait already: send it again later.")
        content = await receiving.read(request, self.options.limits.body, self.options.body_timeout)
        top_k = self._top_k(request)
        kind = _only(request, "content-type") or ""
        if (coding := _only(request, "content-encoding") or "identity").lower() != "identity":
            raise BadRequest(415, f"Content-Encoding {quoted(coding)} is not taken: send the body as it is.")
        given = (content, kind, self.facts, self.options.limits, _only(request, "x-shape"))
        # JSON may have a picture
        quick = len(content) <= INLINE and not kind.lower().startswith(("image/", "application/json"))
        if quick:
            inputs, single = decode.decode(*given)
        else:
            inputs, single = await self._in_time(asyncio.to_thread(decode.decode, *given), began)
        binary = BINARY in request.headers.get("accept", "")
        if not binary and len(inputs) * min(top_k, self.facts["output"]["shape"][-1]) > MOST:
            raise BadRequest(
                413, f"The answer would have more than {MOST} lines: ask for fewer by top_k, or with Accept: {BINARY}."
            )
        logits = await self.engine.predict(inputs, self._left(began))
        found = self._binary(logits) if binary else self._json(logits, top_k, single)
        seconds = time.perf_counter() - began
        found.headers["server-timing"] = f"predict;dur={1000 * seconds:.2f}"  # in milliseconds; browsers show it
        self.engine.metrics.latency.observe(seconds)
        return found

    def _left(self, began: float) -> float:
        return max(self.options.request_timeout - (time.perf_counter() - began), 0.001)

    async def _in_time(self, work: Awaitable[tuple[model.Array, bool]], began: float) -> tuple[model.Array, bool]:
        """Return the result of `work` within the request's time. A thread that takes longer is abandoned."""
        try:
            return await asyncio.wait_for(work, self._left(began))
        except TimeoutError:
            seconds = self.options.request_timeout
            raise BadRequest(504, f"There was no answer within {seconds:g} seconds: send it again later.") from None

    def _top_k(self, request: Request) -> int:
        for name in set(request.query_params) - {"top_k"}:
            raise BadRequest(400, f"{quoted(name)} is no option of a request: the only one is top_k.")
        word, *more = request.query_params.getlist("top_k") or [str(self.options.top_k)]
        if more:
            raise BadRequest(400, f"top_k is given {1 + len(more)} times: give it once.")
        if not (word.isascii() and word.isdigit() and 1 <= len(word) <= 9 and int(word) >= 1):
            raise BadRequest(400, f"top_k is {word[:20]!r}: give a whole number from 1.")
        return int(word)

    def _binary(self, logits: model.Array) -> Response:
        shape = ",".join(str(side) for side in logits.shape)
        return Response(np.ascontiguousarray(logits, "<f4").tobytes(), media_type=BINARY, headers={"x-shape": shape})

    def _json(self, logits: model.Array, top_k: int, single: bool) -> Response:
        try:
            return Response(json.dumps(answers.answer(logits, self.facts, top_k, single)), media_type=JSON)
        except ValueError as error:
            raise BadRequest(500, f"There is no answer to this input: {error}.") from error

    async def health(self, request: Request) -> Response:
        """Answer with a real prediction, shared by concurrent callers."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._predict_example())
        await asyncio.shield(self._probe)
        return Response(json.dumps({"status": "ok", "workers": self.engine.ready}), media_type=JSON)

    async def _predict_example(self) -> None:
        try:
            logits = await self.engine.predict(self.example, self.options.health_timeout, urgent=True)
        except BadRequest as error:
            raise BadRequest(503, f"A prediction failed: {error.sentence}") from error
        if (
            logits.shape[0] != 1
            or logits.shape[-1] != self.facts["output"]["shape"][-1]
            or not np.isfinite(logits).all()
        ):
            raise BadRequest(503, "A prediction failed: its answer is not finite logits of the manifest's shape.")

    async def metrics(self, request: Request) -> Response:
        return Response(self.engine.metrics.text(), headers={"content-type": self.engine.metrics.content_type})

    async def info(self, request: Request) -> Response:
        return Response(self.about, media_type=JSON)

    async def index(self, request: Request) -> Response:
        return Response(self.page, headers={"content-type": HTML})


def about(options: Options, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of /info."""
    return {
        "manifest": facts,
        "receipt": model.receipt(Path(options.run)),
        "limits": {
            "body_bytes": options.limits.body,
            "pixels": options.limits.pixels,
            "samples": options.limits.samples,
            "tokens": options.limits.tokens,
            "queue": options.max_queue,
            "seconds": options.request_timeout,
        },
        "server": {
            "uvicorn": metadata.version("uvicorn"),
            "workers": options.workers,
            "devices": options.devices or ["cpu"],
            "threads": options.threads,
            "max_batch_size": options.max_batch_size,
            "batch_timeout": options.batch_timeout,
        },
    }


def _only(request: Request, name: str) -> str | None:
    """Return the value of a header, or None. Raises for duplicates: a proxy may have read another one."""
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise BadRequest(400, f"The request has {len(values)} headers {name}: send one.")
    return values[0] if values else None


def allowed(path: str) -> tuple[str, ...]:
    return ("POST",) if path == "/predict" else ("GET", "HEAD")


def refusal(error: BadRequest, request: Request) -> Response:
    """Return an error's sentence as JSON."""
    headers = {}
    if error.status == 503:
        headers["retry-after"] = "1"
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status == 405:
        headers["allow"] = ", ".join(allowed(request.scope["path"]))
    return Response(json.dumps({"error": error.sentence}), error.status, headers, JSON)
