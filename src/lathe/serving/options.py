"""The keys of configs/serve.yaml, checked."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lathe.errors import require
from lathe.serving.hosts import ANY, NAME, address, plain
from lathe.serving.limits import Limits

KEY = "LATHE_API_KEY"
WHOLE = {
    "workers": 1,
    "max_batch_size": 1,
    "top_k": 1,
    "max_body_bytes": 1,
    "max_pixels": 1,
    "max_samples": 1,
    "max_tokens": 1,
    "max_queue": 1,
    "max_connections": 1,
    "port": 0,
}
PROCESSES = 256  # workers, or threads of one, at most: the machine's cores, if it has more
AUTO = "lathe.strategies.auto"
BATCH_BYTES = 2**30  # of a batch of inputs
LONGEST = 1e6  # seconds
SECONDS = (
    "request_timeout",
    "header_timeout",
    "body_timeout",
    "keep_alive_timeout",
    "health_timeout",
    "stop_timeout",
    "load_timeout",
)


@dataclass(frozen=True)
class Options:
    """`run` is the run directory's path; times are in seconds."""

    run: str
    target: str
    checkpoint: str
    host: str
    hosts: tuple[str, ...]
    port: int
    workers: int
    threads: int
    max_batch_size: int
    batch_timeout: float
    top_k: int
    max_queue: int
    max_connections: int
    request_timeout: float
    header_timeout: float
    body_timeout: float
    keep_alive_timeout: float
    health_timeout: float
    stop_timeout: float
    load_timeout: float
    limits: Limits
    api_key: str | None = field(default=None, repr=False)


def read(request: Mapping[str, Any], run: str) -> Options:
    """The options of a resolved configs/serve.yaml, with the API key from the environment where it names none.

    Raises:
        UserError: a value that can't be.
    """
    for name in (
        "export",
        "host",
        "hosts",
        "checkpoint",
        "batch_size",
        "batch_timeout",
        "threads",
        "api_key",
        *WHOLE,
        *SECONDS,
    ):
        require(name in request, f"{name} is left out: give it a value, as configs/serve.yaml does.")
    _check_alone(request)
    target, host = request["export"], request["host"]
    require(
        isinstance(target, str) and bool(target), "target is none or several: name one export of the run, or module."
    )
    require(isinstance(host, str) and bool(host), f"host={host!r}: give a name or an address, such as 127.0.0.1.")
    require(_printable(host), f"host={host!r}: give a name or an address, such as 127.0.0.1.")
    hosts = request["hosts"]
    names = hosts if isinstance(hosts, list) else [hosts]
    require(
        isinstance(hosts, list) and all(isinstance(name, str) and _host(name) for name in names),
        f"hosts={hosts!r}: give a list of names or addresses without ports, such as hosts=[example.org], or "
        "hosts=['*'] for any.",
    )
    require(request["checkpoint"] in ("best", "last"), f"checkpoint={request['checkpoint']!r}: choose best or last.")
    require(
        request["batch_size"] is None,
        f"batch_size={request['batch_size']!r}: what comes together is computed together; set max_batch_size for the "
        "most.",
    )
    for name, least in WHOLE.items():
        value = request[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        require(whole and value >= least, f"{name}={value!r}: give a whole number from {least}.")
    require(request["port"] < 65536, f"port={request['port']}: give a number from 0 (any free port) to 65535.")
    for name in SECONDS:
        require(
            _number(request[name]) and 0 < request[name] <= LONGEST,
            f"{name}={request[name]!r}: give a number of seconds above 0, at most {LONGEST:g}.",
        )
    wait, longest = request["batch_timeout"], request["request_timeout"]
    require(
        _number(wait) and 0 <= wait < longest,
        f"batch_timeout={wait!r}: give a number of seconds from 0, below request_timeout={longest}.",
    )
    threads = request["threads"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(PROCESSES, cores)
    require(
        request["workers"] <= most, f"workers={request['workers']}: give at most {most}, the machine has {cores} cores."
    )
    require(
        threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and 1 <= threads <= most),
        f"threads={threads!r}: give a whole number from 1 to {most}, or null for the cores that each worker has.",
    )
    given = request["api_key"]
    where = "api_key" if given is not None else KEY
    require(
        given is None or (isinstance(given, (str, int)) and not isinstance(given, bool)),
        f"{where} is no text: quote it.",
    )
    key = os.environ.get(KEY) if given is None else str(given)
    require(
        key is None or (key.isascii() and key.isprintable() and key.strip() == key and key != ""),
        f"{where} is empty or has characters that a header can't carry: use letters, digits and punctuation.",
    )
    limits = Limits(request["max_body_bytes"], request["max_pixels"], request["max_samples"], request["max_tokens"])
    same = {
        name: request[name]
        for name in (
            "checkpoint",
            "host",
            "port",
            "workers",
            "max_batch_size",
            "top_k",
            "max_queue",
            "max_connections",
            *SECONDS,
        )
    }
    return Options(
        run=run,
        target=target,
        threads=threads or max(1, cores // request["workers"]),
        batch_timeout=float(wait),
        hosts=tuple(hosts),
        limits=limits,
        api_key=key,
        **same,
    )


def _check_alone(request: Mapping[str, Any]) -> None:
    """One process listens, on the CPU: its workers are no ranks."""
    trainer = request["trainer"]
    device, count = trainer.get("accelerator", "cpu"), trainer.get("devices", 1)
    require(device == "cpu", f"trainer.accelerator={device}: the server computes on the CPU; leave it out.")
    require(count == 1, f"trainer.devices={count}: one process listens; say by workers how many compute.")
    strategy = (request.get("strategy") or {}).get("_target_", AUTO)
    require(strategy == AUTO, "strategy is for training: the server has workers; leave it out.")


def check_batch(options: Options, sample: int) -> None:
    """Each worker computes the largest batch once, before it takes requests; `sample` is the bytes of one input.

    Raises:
        UserError: it is larger than any that could come.
    """
    require(
        options.max_batch_size * sample <= BATCH_BYTES,
        f"max_batch_size={options.max_batch_size} inputs of {sample} bytes are above 1 GiB: give at most "
        f"{BATCH_BYTES // sample}.",
    )


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _host(name: str) -> bool:
    return name == ANY or NAME.fullmatch(plain(name)) is not None or address(plain(name)) is not None


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
