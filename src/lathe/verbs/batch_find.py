"""Find the largest batch that fits into memory; a process per size frees its memory."""

import inspect
import json
import math
import multiprocessing
import re
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch.utils._pytree import tree_leaves

from lathe import files
from lathe.data.base import ExactDataModule
from lathe.data.external import SharedLoader
from lathe.errors import UserError, require, user_location
from lathe.measure.processes import peak_resident
from lathe.runs.instantiate import locate
from lathe.training.dry_run import DryRun, learning_rates
from lathe.training.trainer_setup import device_type

Try = dict[str, Any]
GB = 10**9
# Optimizer classes whose learning rate scales with the batch size linearly (Goyal et al. 2017, arXiv:1706.02677) or
# by its square root (Malladi et al. 2022, arXiv:2205.10287).
LINEAR = ("SGD", "LARS")
LARGEST = 2**20  # samples; the limit without find.most
SQRT = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "RMSprop", "LAMB")


def batch_find(cfg: dict[str, Any]) -> dict[str, Any]:
    """Find the largest batch that fits and the rate for it; print both, write all tries to `find.output`."""
    find, device = cfg["find"], device_type(cfg["trainer"]["accelerator"])
    key, was = size_of(cfg["data"])
    require(
        device == "cuda" or find["memory"] is not None,
        "find.memory: the run shares its memory with the machine: set how many GB it may have, such as find.memory=8.",
    )

    def attempt(size: int) -> Try:
        result = tried(cfg, size, device)
        outcome = result.get("bound") or f"{result['seconds']:.3g} s a step"
        memory = f"{result['peak'] / GB:.2f} GB, " if result["peak"] else "not tried: "  # too few samples
        print(f"{key}={size}: {memory}{outcome}", flush=True)
        return result

    tries = search(attempt, find["start"], find["most"] or max(LARGEST, find["start"]))
    fit = [item for item in tries if item["fits"]]
    require(
        bool(fit), f"find.start={find['start']}: not even this batch fits (find.memory={find['memory']}): lower it."
    )
    best = max(fit, key=lambda item: int(item["size"]))
    limit = "find.most" if find["most"] else f"the limit of {LARGEST} samples, as find.most sets no other"
    above = [item for item in tries if not item["fits"] and item["size"] > best["size"]]
    bound = min(above, key=lambda item: int(item["size"]))["bound"] if above else limit
    own = [item.pop("own", None) for item in tries][tries.index(best)]
    rate = implied(cfg, was, best["size"], own)
    summary = {"batch_size": best["size"], "bound": bound, "peak_bytes": best["peak"], **rate}
    folder = Path(find["output"])
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / "batch_find.json", json.dumps({**summary, "tries": tries}, indent=2) + "\n")
    print(f"The largest that fits is {key}={best['size']}; what bounds it is {bound}.")
    print(summary["said"])
    print(f"{folder / 'batch_find.json'} has all tries; nothing else was written or changed.")
    return summary


def search(attempt: Callable[[int], Try], start: int, most: int) -> list[Try]:
    """Return all tries: double from `start` up to `most` while sizes fit, then bisect to a sixteenth."""
    tries: list[Try] = []

    def fits(size: int) -> bool:
        tries.append({"size": size, **attempt(size)})
        return bool(tries[-1]["fits"])

    low, size = 0, start
    while fits(size):
        low = size
        if size == most:
            return tries
        size = min(2 * size, most)
    while low and size - low > max(1, low // 16):
        middle = (low + size) // 2
        low, size = (middle, size) if fits(middle) else (low, middle)
    return tries


def size_of(data: dict[str, Any]) -> tuple[str, int | None]:
    """Return the key of the batch size and its current value, None if unknown."""
    require("max_tokens" not in data, "data.max_tokens bounds the batches of these data: raise it by hand.")
    if "batch_size" in data:
        return "data.batch_size", data["batch_size"]
    target, name = locate(data), data.get("_target_")
    takes = inspect.signature(target).parameters if callable(target) else {}
    has_it = "batch_size" in takes or any(argument.kind is argument.VAR_KEYWORD for argument in takes.values())
    require(has_it, f"data: {name} takes no batch_size: let its __init__ take one and give it to its loaders.")
    default = takes["batch_size"].default if "batch_size" in takes else None
    return "+data.batch_size", default if isinstance(default, int) else None


def implied(cfg: dict[str, Any], was: int | None, size: int, own: list[Any] | None = None) -> dict[str, Any]:
    """Return the rate for `size` instead of `was` and a sentence; `own` are class and rate of a module's optimizers."""
    options, key = cfg["optimizer"], "optimizer.lr"
    if own is None:
        kind = str((options.get("kind") or {}).get("path") or options.get("_target_")).rpartition(".")[2]
        now = options.get("lr")
    else:
        (kind, now), key = own[0] if len(own) == 1 else ("several optimizers", None), "the module's own rate"
    if options.get("scale_lr", "none") != "none":
        return {"lr": None, "said": f"optimizer.scale_lr={options['scale_lr']} scales optimizer.lr with it already."}
    if kind not in (*LINEAR, *SQRT) or now is None or was is None:
        return {"lr": None, "said": f"No rule is known for the rate of {kind} at this batch: scripts/lr_find.py."}
    rate = float(f"{now * (size / was if kind in LINEAR else math.sqrt(size / was)):.3g}")
    way = "in proportion, Goyal et al. 2017" if kind in LINEAR else "by the square root, Malladi et al. 2022"
    sentence = f"{key}={now:g} at data.batch_size={was} is {rate:g} at {size} ({kind}: {way})."
    return {"lr": rate, "said": f"{sentence} Very large batches need a warm-up and end worse: compare."}


def tried(cfg: dict[str, Any], size: int, device: str) -> Try:
    """Try a batch in a process: whether it `fits`, its `peak` in bytes, `seconds` of a step, the `bound` exceeded."""
    limit = None if cfg["find"]["memory"] is None else int(cfg["find"]["memory"] * GB)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lathe.training.train"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(cfg, size, device, send))
    process.start()
    send.close()
    peak = 0
    try:
        while not receive.poll(0.02):
            with suppress(psutil.Error):  # it has just ended
                peak = max(peak, psutil.Process(process.pid).memory_info().rss if device == "cpu" else 0)
            if limit is not None and peak > limit:
                return {"fits": False, "peak": peak, "bound": "memory"}
        result: Try = receive.recv()
    except EOFError:
        process.join()
        require(process.exitcode == -9, f"data.batch_size={size}: its process ended with {process.exitcode}.")
        return {"fits": False, "peak": peak, "bound": "memory"}  # killed by the system for lack of memory
    finally:
        process.kill()
        process.join()
        receive.close()
    if "refused" in result:
        raise UserError(result["refused"])
    if limit is not None and result["peak"] > limit:
        result |= {"fits": False, "bound": "memory"}
    return result


def _attempt(cfg: dict[str, Any], size: int, device: str, send: Connection) -> None:
    """Train `find.steps` optimizer steps with batches of `size`, and send what `tried` returns."""
    try:
        trial = DryRun({**cfg, "data": {**cfg["data"], "batch_size": size}})
        clock = Clock(None if isinstance(trial.data, ExactDataModule) else size)
        optimizers = trial.fit(clock).optimizers
        own = [[type(optimizer).__name__, max(learning_rates(optimizer), default=None)] for optimizer in optimizers]
        result = {"fits": True, "peak": _peak(device), "seconds": clock.least}
        send.send(result | {"own": None if cfg["optimizer"] else own})
    except UserError as error:
        few = re.search(r"(?:cannot be filled from|train_dataloader has) (\d+) (?:training )?samples", str(error))
        bound = {"fits": False, "peak": 0, "bound": f"the {few[1]} training samples"} if few else None
        send.send(bound or {"refused": str(error)})
    except Exception as error:
        # the CPU's allocator raises a plain RuntimeError
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
            send.send({"fits": False, "peak": _peak(device), "bound": "memory"})
        elif not (location := user_location(error)):
            raise
        else:
            message = " ".join(f"{type(error).__name__}: {error}".split())
            send.send({"refused": f"the run that is tried fails: {message:.500}{location}: mend it there."})


def _peak(device: str) -> int:
    return int(torch.cuda.max_memory_reserved()) if device == "cuda" else peak_resident()


class Clock(Callback):
    """Record the `least` seconds of a step; raise UserError if the first batch of a user's data ignores `size`."""

    skippable_steps = None  # needs every step

    def __init__(self, size: int | None = None) -> None:
        self.size = size
        self.least, self._last, self._steps = float("inf"), 0.0, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        size, self.size = self.size, None
        if size is None:
            return
        loader: Any = trainer.train_dataloader
        if isinstance(loader, SharedLoader):
            samples, alone, exact = loader.global_batch_size, loader.n <= loader.global_batch_size, True
        else:
            sizes = [len(leaf) for leaf in tree_leaves(batch) if torch.is_tensor(leaf) and leaf.ndim]
            samples, alone, exact = (*sizes, LARGEST)[0], trainer.is_last_batch, False
        few = samples < size and alone
        require(not few, f"data.batch_size={size} cannot be filled from {samples} training samples.")
        name = type(trainer.datamodule).__name__  # type: ignore[attr-defined]  # a connector sets it
        require(
            samples == size or (samples > size and not exact),  # a user's loader may count samples differently
            f"data: {name} gives batches of {samples} with batch_size={size}: let its train_dataloader use it.",
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step > self._steps:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.least, self._last, self._steps = min(self.least, now - self._last), now, trainer.global_step
