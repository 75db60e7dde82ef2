"""TorchServe handler of target=torchserve, with the requests and answers of scripts/serve.py.

It is in the archive with the modules that it imports, facts.json, and the net in another target's format. It needs
torch, numpy and pillow, and onnxruntime for an ONNX payload, but not Lathe. TorchServe batches requests: one that can't
be answered gets its own status and message, and the others of its batch their answers.
"""

import json
import logging
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lathe.export.torch_runner import on_arrays, open_program, prepared
from lathe.serving.decode import BINARY, JSON, NPY, BadRequest, Limits, answer, decode

Array = np.ndarray[Any, Any]
logger = logging.getLogger(__name__)


class Model:
    """The payload and the facts in `folder`; RuntimeError if it can't be loaded here.

    `threads` is torch's or ONNX Runtime's; None takes that of the facts, where None is the runtime's default.
    """

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        self.facts: dict[str, Any] = json.loads((Path(folder) / "facts.json").read_text())
        self.limits = Limits(pixels=self.facts["max_pixels"])
        payload = self.facts["payload"]
        threads = self.facts["threads"] if threads is None else threads
        try:
            self.run = open_payload(payload["kind"], Path(folder) / payload["file"], threads)
        except Exception as error:
            # TorchServe reports a RuntimeError, but restarts a worker endlessly after other errors
            what = f"the {payload['kind']} payload, made with torch {self.facts['torch']}"
            raise RuntimeError(f"{what}, can't be loaded beside torch {torch.__version__}: {error}") from error

    def decoded(self, value: Any, content_type: str) -> tuple[Array, bool]:
        """Return the net's input, `[n, ...]`, from a request's body, and whether it was a single sample."""
        facts = self.facts
        if facts["input"] is None:
            raise BadRequest(422, "This archive does not say what its net takes: make it with scripts/export.py.")
        if not isinstance(value, str | bytes | bytearray):  # TorchServe has parsed the JSON
            value = json.dumps(value)
        body = value.encode() if isinstance(value, str) else bytes(value)
        return decode(body, self._kind(body, content_type), facts, self.limits)

    def _kind(self, body: bytes, declared: str) -> str:
        """Return the declared type of a body, or the detected one if it is missing or, as of curl, generic."""
        declared = declared.partition(";")[0].strip().lower()
        if declared in (JSON, NPY) or declared.startswith("image/"):
            return declared
        bare = declared == BINARY
        if body.startswith(b"\x93NUMPY"):
            return NPY
        if body.startswith(b"\x89PNG\r\n\x1a\n"):
            return "image/png"
        # these few bytes may also be the first pixels
        if body.startswith(b"\xff\xd8\xff") and (not bare or body.endswith(b"\xff\xd9")):
            return "image/jpeg"
        return JSON if re.match(rb'\s*\{\s*"(image|images|tokens)"' if bare else rb"\s*\{", body) else BINARY

    def logits(self, inputs: Array) -> Array:
        """Return logits `[n, ..., classes]` of uint8 pixels or token ids `[n, ...]`."""
        return self.run(prepared(self.facts, inputs))

    def answers(self, requests: Sequence[tuple[Array, bool]]) -> list[dict[str, Any] | None]:
        """Return answers to requests of one shape; if they fail, try each; None for those that fail again."""
        try:
            logits = self.logits(np.concatenate([samples for samples, _ in requests]))
            ends = np.cumsum([len(samples) for samples, _ in requests])
            parts = np.split(logits, ends[:-1])
            return [
                answer(part, self.facts, self.facts["top_k"], single)
                for part, (_, single) in zip(parts, requests, strict=True)
            ]
        except Exception:
            logger.exception("%d requests failed", len(requests))
            return [None] if len(requests) == 1 else [self.answers([request])[0] for request in requests]


def open_payload(kind: str, path: Path, threads: int | None) -> Callable[[Array], Array]:
    """Return the net of an archive as a function of arrays."""
    if kind == "onnx":
        import onnxruntime  # type: ignore[import-untyped,import-not-found,unused-ignore]

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads or 0
        if not torch.cpu._is_vnni_supported():
            options.add_session_config_entry("session.x64quantprecision", "1")  # lathe.export.targets.onnx.EXACT
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return lambda x: np.asarray(session.run(["output"], {"input": x})[0])
    net: Any
    if kind == "aot_inductor":
        net = torch._inductor.aoti_load_package(str(path))
    elif kind == "torchscript":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"`torch\.jit\.load` is deprecated")  # the docs mention it
            net = torch.jit.load(str(path), map_location="cpu")
    else:
        net = open_program(path)
    return on_arrays(net, threads)


model: Model | None = None


def handle(data: list[dict[str, Any]] | None, context: Any) -> list[bytes] | None:
    """TorchServe's entry point: load the payload at a first call without data, then answer batches."""
    global model
    if model is None:
        model = Model(context.system_properties["model_dir"])
    if data is None:
        return None
    results: list[dict[str, Any] | None] = [None] * len(data)
    groups: dict[tuple[int, ...], list[tuple[int, tuple[Array, bool]]]] = defaultdict(list)
    for index, request in enumerate(data):
        name = "data" if "data" in request else "body"
        try:
            samples, single = model.decoded(request.get(name, b""), content_type(context, index, name))
            groups[samples.shape[1:]].append((index, (samples, single)))
        except BadRequest as refused:
            results[index] = failed(context, index, refused.status, refused.sentence)
    for members in groups.values():
        for (index, _), result in zip(members, model.answers([request for _, request in members]), strict=True):
            sentence = "The net could not compute an answer: see the server's log."
            results[index] = result or failed(context, index, 500, sentence)
    for index in range(len(data)):
        context.set_response_content_type(index, JSON)
    return [json.dumps(result).encode() for result in results]


def content_type(context: Any, index: int, name: str) -> str:
    """Return the declared content type of a request's body, or of a form's part `name`; "" for none."""
    headers = context.get_all_request_header(index)
    part = headers.get(name)
    if isinstance(part, dict) and part.get("content-type"):
        return str(part["content-type"])
    return next((str(value) for key, value in headers.items() if key.lower() == "content-type"), "")


def failed(context: Any, index: int, status: int, sentence: str) -> dict[str, Any]:
    """Set the status of a request that failed; return its answer."""
    context.set_response_status(code=status, phrase="", idx=index)
    return {"error": sentence, "code": status}
