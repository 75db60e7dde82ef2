"""A real server of a run: started by the real command on a free loopback port, stopped by SIGTERM."""

import json
import os
import re
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.commands import command, environment, start
from support.runs import ROOT

BINARY = "application/octet-stream"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def sentence(self) -> str:
        """The error message; asserts that it is one line without a traceback."""
        found = self.json
        assert list(found) == ["error"], found
        assert re.fullmatch(r"[^\n]+\.", found["error"]), found
        assert "Traceback" not in found["error"]
        return str(found["error"])


class Served:
    """`scripts/serve.py` as a process; `stop` ends everything that it started."""

    def __init__(self, run: Path, *words: str, cwd: Path | None = None, **extra: str) -> None:
        line = command(f"run={run}", "port=0", *words, script="scripts/serve.py")
        self.process = start(line, cwd or ROOT, environment(**extra))
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        match = re.search(r"http://127\.0\.0\.1:(\d+)", ready)
        if match is None:
            out, error = self.process.communicate()
            raise AssertionError(f"{ready}{out}{error}")
        self.port, self.ready = int(match[1]), ready

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.stop()

    def stop(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Stop it; return its exit code and its stderr."""
        children = self.children()
        self.process.send_signal(number)
        _, error = self.process.communicate(timeout=60)
        deadline = time.monotonic() + 5  # multiprocessing's resource tracker ends after the process
        while any(alive(child) for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(alive(child) for child in children)
        return self.process.returncode, error

    def children(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def workers(self) -> list[int]:
        """Return the process ids of the workers that are alive."""
        return [
            pid for pid in self.children() if alive(pid) and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Send one request on a new connection. `content_type="..."` becomes the header Content-Type."""
        with self.connect() as connection:
            return ask(connection, message(method, path, body, **headers))

    def metric(self, name: str) -> float:
        """Return the value of a metric, with its labels as in /metrics."""
        found = re.search(rf"^{re.escape(name)} (\S+)$", self.ask("GET", "/metrics").body.decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def message(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    given = {"host": "localhost", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if method == "POST" and "transfer-encoding" not in given:
        given.setdefault("content-length", str(len(body)))
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body


def ask(connection: socket.socket, sent: bytes) -> Answer:
    connection.sendall(sent)
    return receive(connection)


def receive(connection: socket.socket) -> Answer:
    """Return the next answer; raise ConnectionError if the server closes before its end."""
    found = b""
    while b"\r\n\r\n" not in found:
        found += _more(connection)
    head, _, body = found.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += _more(connection)
    return Answer(int(first.split()[1]), headers, body)


def _more(connection: socket.socket) -> bytes:
    part = connection.recv(65536)
    if not part:
        raise ConnectionError("closed before the answer was whole")
    return part


def descriptors(pid: int) -> int:
    """Return the number of open files and sockets of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))
