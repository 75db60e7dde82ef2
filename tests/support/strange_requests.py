"""Requests drawn by a seed: valid ones in all notations of HTTP, wrong, hostile and damaged ones."""

import gzip
import io
import json
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from support.request_bodies import bomb
from support.strange_words import BODIES, FRAMINGS

RIGHT, REFUSED, EITHER = "right", "refused", "either"
Array = np.ndarray[Any, Any]


@dataclass
class Sent:
    """One request: its bytes and the expected verdict; of a valid one the images and top_k (None: logits)."""

    content: bytes
    verdict: str
    images: Array | None = None
    top_k: int | None = None
    single: bool = False
    head: bool = False  # an answer without a body
    last: bool = False  # the connection may be closed after it


class Requests:
    """Requests for a server at localhost, whose net takes grey images of 8 x 8 pixels and has 10 classes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self) -> Sent:
        return self.random.choice([self.right, self.right, self.wrong, self.hostile, self.damaged])()

    def right(self) -> Sent:
        if self.random.random() < 0.2:
            method, path = self.random.choice(
                [
                    ("GET", "/"),
                    ("GET", "/health"),
                    ("GET", "/info"),
                    ("GET", "/metrics"),
                    ("HEAD", "/"),
                    ("GET", "/?utm=1"),
                    ("HEAD", "/health"),
                ]
            )
            return Sent(self.request(method, path), RIGHT, head=method == "HEAD")
        rows = self.random.choice([1, 1, 2, 5])
        images = np.frombuffer(self.random.randbytes(rows * 64), np.uint8).reshape(rows, 1, 8, 8)
        kind, body, single = self.body(images)
        top_k = self.random.choice([None, None, 1, 3, 10, 999_999_999])
        accept = "application/octet-stream" if top_k is None else self.random.choice(["*/*", "application/json"])
        path = "/predict" if top_k is None else f"/predict?top_k={top_k}"
        return Sent(
            self.request("POST", path, body, ("content-type", kind), ("accept", accept)), RIGHT, images, top_k, single
        )

    def body(self, images: Array) -> tuple[str, bytes, bool]:
        """Return the Content-Type, the body, and whether it is one sample without a batch axis."""
        if len(images) == 1 and self.random.random() < 0.3:
            file = io.BytesIO()
            Image.fromarray(images[0, 0]).save(file, "PNG")
            return self.random.choice(["image/png", "Image/PNG"]), file.getvalue(), True
        way = self.random.choice(["json", "npy", "binary"])
        if way == "json":
            text = json.dumps({"images": images.tolist()}, indent=self.random.choice([None, 1]))
            return self.random.choice(["application/json", "application/json; charset=utf-8"]), text.encode(), False
        if way == "npy":
            file = io.BytesIO()
            np.save(file, images)
            return "application/x-npy", file.getvalue(), False
        return "application/octet-stream", images.tobytes(), len(images) == 1

    def request(self, method: str, path: str, body: bytes | None = None, *fields: tuple[str, str]) -> bytes:
        """Return a valid request in one of its notations."""
        lines = [
            ("host", self.random.choice(["localhost", "127.0.0.1:8000", "[::1]", "a.localhost", "LOCALHOST"])),
            *fields,
        ]
        if self.random.random() < 0.1:
            path = "http://localhost:8000" + path
        if self.random.random() < 0.2:
            lines += [("x-" + "y" * self.random.randrange(1, 30), "ü" * self.random.randrange(200))]
        chunked = body is not None and self.random.random() < 0.4
        if body is not None:
            lines.append(("transfer-encoding", "chunked") if chunked else ("content-length", str(len(body))))
        self.random.shuffle(lines)
        space = self.random.choice([" ", "", "  ", "\t"])
        case = self.random.choice([str.lower, str.upper, str.title])
        head = "".join(f"{case(name)}:{space}{value}{self.random.choice(['', ' '])}\r\n" for name, value in lines)
        begin = self.random.choice(["", "", "", "\r\n"]) + f"{method} {path} HTTP/1.1\r\n{head}\r\n"
        return begin.encode() + (self.chunks(body) if chunked and body is not None else body or b"")

    def chunks(self, body: bytes) -> bytes:
        found, at = b"", 0
        while at < len(body):
            size = self.random.choice([1, 7, 64, len(body)])
            part = body[at : at + size]
            form = self.random.choice(["%x", "%X", "00%x"]) % len(part)
            found += form.encode() + self.random.choice([b"", b";a=b", b';a="b c"', b";a"]) + b"\r\n" + part + b"\r\n"
            at += size
        return found + b"0\r\n" + self.random.choice([b"", b"X-API-Key: a\r\nhost: evil.example\r\n"]) + b"\r\n"

    def wrong(self) -> Sent:
        """Return well-formed HTTP with an invalid request: one sentence answers it, the connection stays open."""

        def post(body: bytes, kind: str, path: str = "/predict", *more: tuple[str, str]) -> bytes:
            return self.request("POST", path, body, ("content-type", kind), *more)

        binary, text, good = "application/octet-stream", "application/json", bytes(64)
        return Sent(
            self.random.choice(
                [
                    lambda: post(self.random.choice(BODIES), text),
                    lambda: post(
                        good,
                        self.random.choice(
                            [
                                "text/plain",
                                "",
                                "application/x-www-form-urlencoded",
                                "multipart/form-data; boundary=a",
                                "image/gif",
                                "*/*",
                                "a" * 3000,
                                "application/octet-stream, text/plain",
                            ]
                        ),
                    ),
                    lambda: post(
                        good,
                        binary,
                        "/predict?top_k="
                        + self.random.choice(
                            [
                                "0",
                                "-1",
                                "1e9",
                                "1&top_k=2",
                                "",
                                "%00",
                                "+1",
                                "1%20",
                                "99999999999",
                                "NaN",
                                "٣".encode().hex(),
                                "0x1",
                                "1.0",
                            ]
                        ),
                    ),
                    lambda: post(
                        good,
                        binary,
                        "/predict?" + self.random.choice(["topk=1", "TOP_K=1", "=", "a=b&top_k=1", "top_k=1&%0a=2"]),
                    ),
                    lambda: post(bytes(self.random.choice([0, 1, 63, 65, 64 * 257])), binary),
                    lambda: post(gzip.compress(good), binary, "/predict", ("content-encoding", "gzip")),
                    lambda: post(
                        good,
                        binary,
                        "/predict",
                        ("x-shape", self.random.choice(["0,0", "-1,8", "9,9", "8", "8,8,8", "9" * 11, "é"])),
                    ),
                    lambda: post(good, binary, "/predict", ("content-type", "text/plain")),
                    lambda: post(
                        good,
                        binary,
                        "/predict",
                        ("origin", self.random.choice(["null", "http://evil.example", "http://localhost:1"])),
                    ),
                    lambda: post(self.picture(), self.random.choice(["image/png", "image/jpeg"])),
                    lambda: self.request(
                        self.random.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "PURGE"]), "/predict"
                    ),
                    lambda: post(
                        b"{}",
                        text,
                        self.random.choice(
                            ["/", "/health", "/predict/", "//predict", "/%0a", "/../predict", "/a" * 900]
                        ),
                    ),
                    lambda: self.request("GET", "/predict%00?a=%ff%0a"),
                ]
            )(),
            REFUSED,
        )

    def picture(self) -> bytes:
        """Return a PNG without pixels, a truncated one, or other bytes."""
        whole = bomb(8, 8)
        return self.random.choice(
            [
                bomb(0, 8),
                bomb(8, 0),
                bomb(2**31 - 1, 2**31 - 1),
                whole[: self.random.randrange(40)],
                b"\x89PNG",
                b"<svg/>",
            ]
        )

    def hostile(self) -> Sent:
        """Return invalid or ambiguous HTTP: the answer is at most one sentence, and the connection is closed."""
        post = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/octet-stream\r\n"
        sizes = [b"-1", b"g", b"0x40", b"40 ", b"f" * 20, b"", b";a", b"40\n", b"+40"]
        return Sent(
            self.random.choice(
                [
                    lambda: post + self.random.choice(FRAMINGS) + b"\r\n\r\n" + bytes(64),
                    lambda: (
                        post
                        + b"transfer-encoding: chunked\r\n\r\n"
                        + self.random.choice(sizes)
                        + b"\r\n"
                        + bytes(64)
                        + b"\r\n0\r\n\r\n"
                    ),
                    lambda: self.random.choice(
                        [
                            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
                            b"SSH-2.0-OpenSSH_9\r\n",
                            b"GET /\r\n\r\n",
                            b"GET / HTTP/3.0\r\n\r\n",
                            b"get / HTTP/1.1\r\n\r\n",
                            b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n",
                            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                            b"GET /\xff HTTP/1.1\r\n\r\n",
                            b"\x00" * 100,
                            b"GET / HTTP/1.1\nhost: localhost\n\n",
                        ]
                    ),
                    lambda: b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
                    lambda: b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 12_000 + b"\r\n",
                    # the client closes its sending side after it
                    lambda: post + b"content-length: 99\r\n\r\n" + bytes(98),
                ]
            )(),
            REFUSED,
            last=True,
        )

    def damaged(self) -> Sent:
        """Return a valid request with some changed bytes: it must not cause a server error."""
        whole = self.right()
        while whole.head:  # whether its answer has a body could not be known
            whole = self.right()
        content = bytearray(whole.content)
        for _ in range(self.random.choice([1, 1, 3, 20])):
            at = self.random.randrange(len(content))
            length, new = self.random.choice([(1, 1), (1, 0), (9, 0), (0, 2)])
            content[at : at + length] = self.random.randbytes(new)
            content = content or bytearray(b"a")
        return Sent(bytes(content), EITHER, last=True)
