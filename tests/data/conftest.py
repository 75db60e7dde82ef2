"""Small data, and loaders over it."""

import hashlib
import io
import os
import pickle
import struct
import tarfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from lathe.data.augment import Augment, Normalizer
from lathe.data.loader import ImageLoader, ResidentLoader, StreamLoader
from lathe.data.published import ARCHIVES, Archive
from lathe.data.splits import Split

EVERYTHING = Augment(crop=2, crop_fill="reflect", flip="alternating", cutout=3, mixup=0.4, cutmix=1.0)


@pytest.fixture
def split() -> Split:
    """50 random images of 3 x 8 x 8 pixels in 5 classes."""
    rng = np.random.default_rng(0)
    return Split.whole(rng.integers(0, 256, (50, 3, 8, 8), dtype=np.uint8), rng.integers(0, 5, 50))


@pytest.fixture
def make(split: Split) -> Callable[..., ImageLoader]:
    """Build a loader over `split`: make("resident", batch_size=..., ...)."""

    def build(kind: str = "resident", **settings: Any) -> ImageLoader:
        defaults = {
            "num_classes": 5,
            "normalizer": Normalizer((0.4, 0.5, 0.6), (0.2, 0.25, 0.3), 3),
            "augment": EVERYTHING,
            "device": torch.device("cpu"),
            "train": True,
        }
        if kind == "workers":
            return StreamLoader(split, **(defaults | settings))
        images, labels = split.read()
        return ResidentLoader(torch.from_numpy(images), torch.from_numpy(labels), **(defaults | settings))

    return build


def write_tar_gz(path: Path, members: dict[str, bytes]) -> str:
    """Write an archive; return its MD5 hash."""
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture
def tar_gz() -> Callable[[Path, dict[str, bytes]], str]:
    """tar_gz(path, members) writes an archive and returns its MD5 hash."""
    return write_tar_gz


def python2_pickle(pixels: np.ndarray, labels: list[int], key: bytes) -> bytes:
    """Pickle {"data": array, key: labels} as Python 2 and its NumPy: protocol 2, str for text and bytes."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    raw = pixels.tobytes()
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n" + b"cnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    )
    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    shape = number(pixels.shape[0]) + number(pixels.shape[1]) + b"\x86"
    state = b"(" + number(1) + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    entries = text(b"data") + array + state + text(key) + b"](" + b"".join(number(label) for label in labels) + b"e"
    return b"\x80\x02}(" + entries + b"u."


@pytest.fixture
def cifar_files(tmp_path: Path) -> Callable[..., tuple[Archive, dict[str, tuple[np.ndarray, np.ndarray]]]]:
    """Write a tiny archive in the real format: cifar_files(name, "binary" or "python") -> (entry, arrays)."""

    def build(
        name: str, form: str, folder: Path = tmp_path
    ) -> tuple[Archive, dict[str, tuple[np.ndarray, np.ndarray]]]:
        real = ARCHIVES[name][form == "python"]
        rng = np.random.default_rng(1)
        members, truth = {}, {}
        for split, files in real.members.items():
            parts = []
            for file in files:
                pixels = rng.integers(0, 256, (20, 3072), dtype=np.uint8)
                labels = np.arange(20) % (10 if name == "cifar10" else 20)
                if form == "python":
                    members[file] = python2_pickle(pixels, labels.tolist(), real.labels)
                else:
                    assert real.skip is not None
                    coarse = np.full((20, real.skip), 7, dtype=np.uint8)
                    members[file] = np.concatenate([coarse, labels[:, None].astype(np.uint8), pixels], axis=1).tobytes()
                parts.append((pixels.reshape(-1, 3, 32, 32), labels))
            truth[split] = tuple(np.concatenate(column) for column in zip(*parts, strict=True))
        folder.mkdir(exist_ok=True)
        md5 = write_tar_gz(folder / real.file, members)
        return Archive(real.file, md5, real.members, real.skip, real.labels), truth

    return build


class Server:
    """A real HTTP server of one file: it can break off early, and records requests."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.break_after: int | None = None  # bytes after which the next answer ends
        self.status, self.reason = 200, ""

        self.asked: list[str | None] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.asked.append(self.headers.get("Range"))

                if server.status != 200:
                    self.send_error(server.status, server.reason or None)
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(server.content)))
                self.end_headers()
                stop, server.break_after = server.break_after, None
                self.wfile.write(server.content[:stop])

            def log_message(self, *args: object) -> None:
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/"
        self.thread = Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def serve() -> Iterator[Callable[[bytes], Server]]:
    """serve(content) starts a server on the loopback device."""
    servers: list[Server] = []

    def start(content: bytes) -> Server:
        servers.append(Server(content))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


class Malicious:
    """Pickles to a call that would create a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.path),))


@pytest.fixture
def malicious_pickle(tmp_path: Path) -> tuple[bytes, Path]:
    """A pickle, and the folder that exists if it was executed."""
    path = tmp_path / "obeyed"
    return pickle.dumps({"data": Malicious(path), "labels": [0]}, protocol=2), path
