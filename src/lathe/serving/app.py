"""The ASGI application: a starlette app for the paths, and the checks of host and API key in front of it."""

import asyncio
import base64
import hashlib
import hmac
import html
import io
import json
import re
import time
from collections.abc import Collection
from dataclasses import asdict
from importlib import metadata
from importlib.resources import files
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from lathe.serving import decode, model
from lathe.serving.batcher import Batcher
from lathe.serving.decode import BINARY, BadRequest, demand
from lathe.serving.options import Options

INLINE = 65536  # bytes of a body that is decoded in the event loop, since a thread would take longer
MOST = 65536  # lines of an answer: they are formatted in the event loop, which blocks other requests
OPEN = ("/", "/health")  # without an API key, for browsers and load balancers
PATHS = ("/", "/predict", "/health", "/metrics", "/info")
GONE = 499  # the client has disconnected; only /metrics has this status
# In the page itself, so that it holds behind a proxy or in a saved file too; scripts and styles are allowed by hash.
POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; img-src blob: data:; connect-src 'self'; base-uri "
    "'none'; form-action 'none'"
)
PAGE_HEADERS = {"x-content-type-options": "nosniff", "x-frame-options": "DENY"}


class App:
    """The application. `facts` are the export's manifest."""

    def __init__(self, batcher: Batcher, options: Options, facts: dict[str, Any]) -> None:
        self.batcher, self.options, self.facts = batcher, options, facts
        self.example, self.page, self.about = model.example(facts, options.run), page(facts), about(options, facts)
        self._probe: asyncio.Task[None] | None = None
        self.hosts = {"localhost", *(host_of(name) for name in (options.host, *options.hosts))}
        routes = [
            Route("/predict", self.predict, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/info", self.info),
            Route("/", self.index),
        ]
        compress = Middleware(GZipMiddleware, minimum_size=1000)
        errors: dict[Any, Any] = dict.fromkeys((BadRequest, HTTPException, ClientDisconnect, Exception), answer_error)
        self.app = Starlette(routes=routes, middleware=[compress], exception_handlers=errors)
        self.app.router.redirect_slashes = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check and answer a request, and count the answer."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = scope["path"] if scope["path"] in PATHS else "other"
                self.batcher.metrics.responses.labels(path, str(message["status"])).inc()
            await send(message)

        app = self._refusal(Headers(scope=scope), scope["path"]) or self.app
        await app(scope, receive, counted)

    def _refusal(self, headers: Headers, path: str) -> Response | None:
        """Return the answer to a request for another server or without the API key, else None."""
        host = host_of(headers.get("host", ""))
        if "*" not in self.hosts and not is_allowed(host, self.hosts):
            host = host[:60]
            return refusal(421, f"{host!r} is not this server: if it should be, start it with hosts=[{host}].")
        if self.options.api_key is None or path in OPEN:
            return None
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        key = headers.get("x-api-key") or (bearer.strip() if scheme.lower() == "bearer" else "")
        if hmac.compare_digest(key.encode(), self.options.api_key.encode()):
            return None
        sentence = f"The API key is {'wrong' if key else 'missing'}: send it in the header X-API-Key."
        return refusal(401, sentence, {"www-authenticate": "Bearer"})

    async def predict(self, request: Request) -> Response:
        """Answer `POST /predict` with classes, binary logits, or a core's outputs by name."""
        began, limits = time.perf_counter(), self.options.limits
        demand(not self.batcher.full, 503, f"{self.options.max_queue} requests wait already: send it again later.")
        body = await read_body(request, limits.body, self.options.body_timeout)
        plain = request.headers.get("content-encoding", "identity") == "identity"
        demand(plain, 415, "Content-Encoding is not taken: send the body as it is.")
        kind, accept = request.headers.get("content-type", ""), request.headers.get("accept", "")
        answer: Response
        if "inputs" in self.facts:
            packed = await asyncio.to_thread(model.decode_named, body, kind, self.facts, limits)
            packed_outputs = await self._computed(packed, began)
            outputs = model.unpack(packed_outputs, model.is_batched(self.facts))
            if model.NPZ in accept:
                file = io.BytesIO()
                np.savez(file, **outputs)  # type: ignore[arg-type]
                answer = Response(file.getvalue(), media_type=model.NPZ)
            else:
                check_lines(sum(array.size for array in outputs.values()), f"ask with Accept: {model.NPZ}.")
                sentence = f"The answer has NaN or infinite numbers: ask with Accept: {model.NPZ}."
                demand(model.is_finite(packed_outputs), 500, sentence)
                answer = JSONResponse({"outputs": {name: array.tolist() for name, array in outputs.items()}})
        else:
            word = request.query_params.get("top_k", str(self.options.top_k))
            valid = set(request.query_params) <= {"top_k"} and word.isdecimal() and int(word[:9]) >= 1
            demand(valid, 400, "The only option of a request is top_k, a whole number from 1.")
            top_k = int(word[:9])
            arguments = (body, kind, self.facts, limits, request.headers.get("x-shape"))
            # JSON may have a picture
            if len(body) <= INLINE and not kind.lower().startswith(("image/", "application/json")):
                inputs, single = decode.decode(*arguments)
            else:
                inputs, single = await asyncio.to_thread(decode.decode, *arguments)
            binary = BINARY in accept
            lines = 0 if binary else len(inputs) * min(top_k, self.facts["output"]["shape"][-1])
            check_lines(lines, f"ask for fewer by top_k, or with Accept: {BINARY}.")
            logits = await self._computed(inputs, began)
            if binary:  # little-endian float32
                shape = {"x-shape": ",".join(map(str, logits.shape))}
                answer = Response(np.ascontiguousarray(logits, "<f4").tobytes(), headers=shape, media_type=BINARY)
            else:
                try:
                    answer = JSONResponse(decode.answer(logits, self.facts, top_k, single))
                except ValueError as error:
                    raise BadRequest(500, f"There is no answer to this input: {error}.") from error
        seconds = time.perf_counter() - began
        answer.headers["server-timing"] = f"predict;dur={1000 * seconds:.2f}"  # in milliseconds; browsers show it
        self.batcher.metrics.latency.observe(seconds)
        return answer

    async def _computed(self, inputs: model.Array, began: float) -> model.Array:
        try:
            left = self.options.request_timeout - (time.perf_counter() - began)
            return await self.batcher.predict(inputs, max(left, 0.001))
        except asyncio.CancelledError:  # stop_timeout is over
            raise BadRequest(503, "The server is stopping: send it again later.") from None

    async def health(self, request: Request) -> Response:
        """Answer with a real prediction, shared by concurrent callers."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._predict_example())
        await asyncio.shield(self._probe)
        return JSONResponse({"status": "ok", "workers": self.batcher.ready})

    async def _predict_example(self) -> None:
        try:
            logits = await self.batcher.predict(self.example, self.options.health_timeout, urgent=True)
        except BadRequest as error:
            raise BadRequest(503, f"A prediction failed: {error.sentence}") from error
        if not model.is_finite(logits):
            raise BadRequest(503, "A prediction failed: its answer is not finite.")

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self.batcher.metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def info(self, request: Request) -> Response:
        return JSONResponse(self.about)

    async def index(self, request: Request) -> Response:
        return HTMLResponse(self.page, headers=PAGE_HEADERS)


def check_lines(count: int, fix: str) -> None:
    """Raise BadRequest for an answer that is too long for JSON."""
    demand(count <= MOST, 413, f"The answer would have more than {MOST} numbers: {fix}")


def host_of(header: str) -> str:
    """Return the name or address of a header Host: lower case, without port, IPv6 brackets and the root's dot."""
    name = header.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return (name.partition(":")[0] if name.count(":") == 1 else name).removesuffix(".")


def is_allowed(host: str, names: Collection[str]) -> bool:
    """Return whether a request may be for `host`: an address, or one of the `names` of this server.

    A web page's own name may resolve to this machine (DNS rebinding): its requests then have that name as their Host.
    Addresses and localhost can't be rebound.
    """
    if host in names or host.endswith(".localhost"):
        return True
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


async def read_body(request: Request, most: int, seconds: float) -> bytes:
    """Return the whole body.

    Of a body that is too large, the rest is read and dropped: a client that still sends would not see the answer.

    Raises:
        BadRequest: 413 it has more than `most` bytes, 408 it took longer than `seconds`.
        ClientDisconnect: the client disconnected.
    """
    too_large = BadRequest(413, f"The body has more than {most} bytes: send less at a time.")
    if "expect" in request.headers and int(request.headers.get("content-length", 0)) > most:  # it has not been sent yet
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= most:
                    chunks.append(chunk)
    except TimeoutError:
        raise BadRequest(408, f"The body took longer than {seconds:g} seconds: send it faster.") from None
    if size > most:
        raise too_large
    return b"".join(chunks)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return an error as one sentence. Starlette raises other errors again, so that uvicorn logs their traceback."""
    if isinstance(error, BadRequest):
        return refusal(error.status, error.sentence)
    if isinstance(error, HTTPException):
        return refusal(error.status_code, f"{error.detail}: the paths are {', '.join(PATHS)}.", error.headers)
    if isinstance(error, ClientDisconnect):
        return Response(status_code=GONE)
    return refusal(500, "The server met an error of its own: its log says which.")


def refusal(status: int, sentence: str, headers: Any = None) -> Response:
    """Return an error's sentence as JSON."""
    more = {503: {"retry-after": "1"}, 408: {"connection": "close"}}.get(status, {})
    return JSONResponse({"error": sentence}, status, {**(headers or {}), **more})


def about(options: Options, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the content of /info: the manifest, the receipt and the settings."""
    limits, receipt = asdict(options.limits), Path(options.run, "receipt.json")
    limits["body_bytes"] = limits.pop("body")
    return {
        "manifest": facts,
        "receipt": json.loads(receipt.read_text()) if receipt.is_file() else None,
        "limits": {**limits, "queue": options.max_queue, "seconds": options.request_timeout},
        "server": {
            "uvicorn": metadata.version("uvicorn"),
            "workers": options.workers,
            "devices": options.devices or ["cpu"],
            "threads": options.threads,
            "max_batch_size": options.max_batch_size,
            "batch_timeout": options.batch_timeout,
        },
    }


def page(facts: dict[str, Any]) -> str:
    """Return the page's HTML for the net of an export's manifest."""
    text = files("lathe.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = POLICY.format(script=_hash(text, "script"), style=_hash(text, "style"))
    data = json.dumps(shown(facts)).replace("<", "\\u003c")  # no class or run name can close the element
    for mark, content in (
        ("__POLICY__", policy),
        ("__TITLE__", html.escape(f"{facts['run']}: {facts['target']}")),
        ("__FACTS__", data),
    ):
        text = text.replace(mark, content, 1)
    return text


def shown(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the data of the page's script: the kind and size of the input, and the lines below the title."""
    arithmetic = "integers" if facts.get("integers") else "floats"
    about = [f"run {facts['run']}", f"{facts['target']} of {facts['checkpoint']}.ckpt, {arithmetic}"]
    if "inputs" in facts:
        lines = [f"{entry['name']}: {entry['dtype']} {entry['shape']}" for entry in facts["inputs"]]
        shapes = {entry["name"]: [1 if isinstance(n, str) else n for n in entry["shape"]] for entry in facts["inputs"]}
        body = {name: np.zeros(shape, int).tolist() for name, shape in shapes.items()}
        return {"kind": "arrays", "body": json.dumps(body), "schema": lines, "about": about}
    spec = facts["input"]
    if "vocab_size" in spec:
        return {
            "kind": "tokens",
            "vocab_size": spec["vocab_size"],
            "longest": spec.get("longest"),
            "about": [*about, f"{spec['vocab_size']} tokens"],
        }
    preprocess, (channels, height, width) = facts["preprocess"], spec["shape"][1:]
    fixed = isinstance(height, int)
    size = [height, width] if fixed else preprocess["size"]
    look = f"{size[0]} x {size[1]} pixels" if fixed else "pixels of any size"
    return {
        "kind": "image",
        "draw": channels == 1,
        "size": size,
        "ink": "white" if preprocess["mean"][0] < 0.5 else "black",  # as in the data: most of an image is background
        "about": [
            *about,
            f"{'grey' if channels == 1 else f'{channels} channels'}, {look}",
            f"{len(facts['classes'])} classes",
        ],
    }


def _hash(text: str, name: str) -> str:
    """Return the CSP source expression of the page's only inline element of that name without attributes."""
    (content,) = re.findall(f"<{name}>(.*?)</{name}>", text, flags=re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
