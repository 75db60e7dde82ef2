"""The command scripts/serve.py: the keys of configs/serve.yaml, read and checked together."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lathe.errors import require
from lathe.serving import model
from lathe.serving.decode import Limits

KEY = "LATHE_API_KEY"
AUTO = "lathe.strategies.auto"


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
    """Return the options of a resolved configs/serve.yaml, with the environment's API key if it has none.

    `workers=auto` is one for each GPU, or one on the CPU; more workers than GPUs share them in turn.
    """
    strategy = (request.get("strategy") or {}).get("_target_", AUTO)
    require(strategy == AUTO, "strategy is for training: the server has workers; leave it out.")
    require(request["export"] is not None, "target is none or several: name one export of the run, or module.")
    key = request["api_key"] if request["api_key"] is not None else os.environ.get(KEY)
    require(key != "", f"api_key or {KEY} is empty: give a key, or unset it.")  # it must not open the server to all
    on_gpus = request["trainer"]["accelerator"] == "gpu"
    gpus = torch.cuda.device_count() if on_gpus else 0  # allocates nothing: only workers use them
    require(gpus > 0 or not on_gpus, "trainer.accelerator=gpu: no GPU is visible here: leave it cpu.")
    workers = max(1, gpus) if request["workers"] == "auto" else int(request["workers"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    values = {option.name: request[option.name] for option in fields(Options) if option.name in request}
    limits = {option.name: request[f"max_{option.name}"] for option in fields(Limits) if option.name != "body"}
    return Options(
        **values
        | {
            "run": run,
            "target": request["export"],
            "hosts": tuple(request["hosts"]),
            "workers": workers,
            "devices": tuple(f"cuda:{index % gpus}" for index in range(workers)) if gpus else (),
            "threads": request["threads"] or max(1, cores // workers),
            "limits": Limits(body=request["max_body_bytes"], **limits),
            "api_key": None if key is None else str(key),
        }
    )


def serve(cfg: dict[str, Any]) -> None:
    """Serve the requested export or net of a run; raise UserError for one that can't be served."""
    options = read(cfg["request"], str(Path(cfg["paths"]["run_dir"])))
    facts = model.describe(options.run, options.target, options.checkpoint)
    missing = [name for name in ("starlette", "uvicorn", "httptools", "prometheus_client") if find_spec(name) is None]
    require(not missing, f"scripts/serve.py needs {', '.join(missing)}: pip install -e '.[serve]'.")
    from lathe.serving import server

    server.serve(options, facts)
