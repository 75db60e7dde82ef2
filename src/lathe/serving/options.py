"""Reads and checks the keys of configs/serve.yaml."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from lathe.errors import require
from lathe.serving.devices import places
from lathe.serving.hosts import ANY, NAME, address, plain
from lathe.serving.limits import Limits

KEY = "LATHE_API_KEY"
PROCESSES = 256  # at most, of workers or threads of one, unless the machine has more cores
AUTO = "lathe.strategies.auto"
BATCH_BYTES = 2**30  # of a batch's inputs


@dataclass(frozen=True)
class Options:
    """The options of a server. `run` is the run directory; times are in seconds.

    `devices` has the GPU of each worker, such as `cuda:1`, and is empty on the CPU.
    """

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
    devices: tuple[str, ...] = ()


def read(request: Mapping[str, Any], run: str) -> Options:
    """Return the options of a resolved configs/serve.yaml, with the environment's API key if it has none."""
    strategy = (request.get("strategy") or {}).get("_target_", AUTO)
    require(strategy == AUTO, "strategy is for training: the server has workers; leave it out.")
    target, host = request["export"], request["host"]
    require(target is not None, "target is none or several: name one export of the run, or module.")
    require(_printable(host), f"host={host!r}: give a name or an address, such as 127.0.0.1.")
    require(
        all(map(_host, request["hosts"])),
        f"hosts={request['hosts']!r}: give a list of names or addresses without ports, such as hosts=[example.org], or "
        "hosts=['*'] for any.",
    )
    wait, longest = request["batch_timeout"], request["request_timeout"]
    require(
        wait < longest,
        f"batch_timeout={wait!r}: give a number of seconds from 0, below request_timeout={longest}.",
    )
    threads = request["threads"]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    most = max(PROCESSES, cores)
    workers, devices = places(request["trainer"]["accelerator"], request["workers"])
    require(workers <= most, f"workers={workers}: give at most {most}, the machine has {cores} cores.")
    require(
        threads is None or threads <= most,
        f"threads={threads!r}: give a whole number from 1 to {most}, or null for the cores that each worker has.",
    )
    given = request["api_key"]
    where = "api_key" if given is not None else KEY
    key = os.environ.get(KEY) if given is None else str(given)
    require(
        key is None or (key.isascii() and key.isprintable() and key.strip() == key and key != ""),
        f"{where} is empty or has characters that a header can't carry: use letters, digits and punctuation.",
    )
    limits = Limits(request["max_body_bytes"], request["max_pixels"], request["max_samples"], request["max_tokens"])
    made = ("run", "target", "workers", "threads", "hosts", "limits", "api_key", "devices")
    same = {option.name: request[option.name] for option in fields(Options) if option.name not in made}
    return Options(
        run=run,
        target=target,
        workers=workers,
        threads=threads or max(1, cores // workers),
        hosts=tuple(request["hosts"]),
        limits=limits,
        api_key=key,
        devices=devices,
        **same,
    )


def check_batch(options: Options, sample: int) -> None:
    """Raise UserError if the largest batch, of inputs of `sample` bytes, is too large. Workers start with it."""
    require(
        options.max_batch_size * sample <= BATCH_BYTES,
        f"max_batch_size={options.max_batch_size} inputs of {sample} bytes are above 1 GiB: give at most "
        f"{BATCH_BYTES // sample}.",
    )


def _printable(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text


def _host(name: str) -> bool:
    return name == ANY or NAME.fullmatch(plain(name)) is not None or address(plain(name)) is not None
