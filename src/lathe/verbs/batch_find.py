"""The largest batch that fits into memory: each size is tried by a few optimizer steps in a process of its own, which
gives its memory back, by doubling and then by halving what is left between.
"""

import json
import math
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback

from lathe import files
from lathe.callbacks import FrozenStatistics
from lathe.errors import UserError, require
from lathe.runs.build import make_data, make_task
from lathe.runs.trainer import device_type, make_trainer, quiet, widen
from lathe.verbs.lr_find import WITHOUT, begin_with
from lathe.verbs.train import check_loaders, prepare

Try = dict[str, Any]
GB = 10**9
# How the rate goes with the batch: in proportion (Goyal et al. 2017, arXiv:1706.02677) or by its square root (Malladi
# et al. 2022, arXiv:2205.10287), by the optimizer's class.
LINEAR = ("SGD", "LARS")
SQRT = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adafactor", "RMSprop", "LAMB")


def batch_find(cfg: dict[str, Any]) -> dict[str, Any]:
    """Tries batches from `find.start` on, prints the largest that fits and the rate that it implies, and writes all
    tries where `find.output` says; returns the same.

    Raises:
        UserError: no batch fits, or nothing says what is to bound it.
    """
    find, device = cfg["find"], device_type(cfg["trainer"]["accelerator"])
    require("batch_size" in cfg["data"], "data.batch_size: these data declare none, so there is no size to find.")
    require(
        device == "cuda" or find["memory"] is not None,
        "find.memory: this run is for a CPU, whose memory the whole machine shares: say how much the run may have, in "
        "GB, such as find.memory=8.",
    )
    require(device != "mps", "trainer.accelerator=mps: what Apple's GPU may take of the memory is not known: use cpu.")

    def attempt(size: int) -> Try:
        found = tried(cfg, size, device)
        said = found.get("bound") or f"{found['seconds']:.3g} s a step"
        print(f"data.batch_size={size}: {found['peak'] / GB:.2f} GB, {said}", flush=True)
        return found

    tries = search(attempt, find["start"], find["most"])
    fit = [one for one in tries if one["fits"]]
    require(
        bool(fit),
        f"find.start={find['start']}: not even this batch fits (find.memory={find['memory']}): start lower, or "
        "make the net smaller.",
    )
    best = max(fit, key=lambda one: int(one["size"]))
    above = [one for one in tries if not one["fits"] and one["size"] > best["size"]]
    bound = min(above, key=lambda one: int(one["size"]))["bound"] if above else "find.most"
    told = {"batch_size": best["size"], "bound": bound, "peak_bytes": best["peak"], **implied(cfg, best["size"])}
    folder = Path(find["output"])
    folder.mkdir(parents=True, exist_ok=True)
    files.write_atomically(folder / "batch_find.json", json.dumps({**told, "tries": tries}, indent=2) + "\n")
    print(f"The largest that fits is data.batch_size={best['size']}; what bounds it is {bound}.")
    print(told["said"])
    print(f"{folder / 'batch_find.json'} has all tries; nothing else was written or changed.")
    return told


def search(attempt: Callable[[int], Try], start: int, most: int | None) -> list[Try]:
    """All tries: sizes double from `start` until one does not fit, or up to `most`; then what lies between is halved
    until a sixteenth of the size is left.
    """
    tries: list[Try] = []

    def fits(size: int) -> bool:
        tries.append({"size": size, **attempt(size)})
        return bool(tries[-1]["fits"])

    low, size = 0, start
    while fits(size):
        low = size
        if size == most:
            return tries
        size = min(2 * size, most) if most is not None else 2 * size
    while low and size - low > max(1, low // 16):
        middle = (low + size) // 2
        low, size = (middle, size) if fits(middle) else (low, middle)
    return tries


def implied(cfg: dict[str, Any], size: int) -> dict[str, Any]:
    """The rate for a batch of `size`, if there is a rule for the optimizer, and a sentence that says so."""
    options, was = cfg["optimizer"], cfg["data"]["batch_size"]
    kind = str((options.get("kind") or {}).get("path") or options.get("_target_")).rpartition(".")[2]
    rule = "linear" if kind in LINEAR else "sqrt" if kind in SQRT else None
    if options.get("scale_lr", "none") != "none":
        return {"lr": None, "said": f"optimizer.scale_lr={options['scale_lr']} scales optimizer.lr with it already."}
    if rule is None:
        return {"lr": None, "said": f"No rule is known for the rate of {kind} at another batch: scripts/lr_find.py."}
    rate = float(f"{options['lr'] * (size / was if rule == 'linear' else math.sqrt(size / was)):.3g}")
    way = "in proportion, Goyal et al. 2017" if rule == "linear" else "by the square root, Malladi et al. 2022"
    said = f"optimizer.lr={options['lr']:g} at data.batch_size={was} is {rate:g} at {size} ({kind}: {way})."
    return {"lr": rate, "said": f"{said} Very large batches need a warm-up and end worse: compare."}


def tried(cfg: dict[str, Any], size: int, device: str) -> Try:
    """What became of a batch of `size`: whether it `fits`, its `peak` in bytes, `seconds` of a step, and `bound`, what
    it does not fit into.

    Raises:
        UserError: the run can't be built, or its process died.
    """
    limit = None if cfg["find"]["memory"] is None else int(cfg["find"]["memory"] * GB)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lathe.verbs.train"])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_attempt, args=(cfg, size, device, send))
    process.start()
    send.close()
    peak = 0
    try:
        while not receive.poll(0.02):
            peak = max(peak, _resident(process.pid) if device == "cpu" else 0)
            if limit is not None and peak > limit:
                return {"fits": False, "peak": peak, "bound": "memory"}
        found: Try = receive.recv()
    except EOFError:
        process.join()
        require(process.exitcode == -9, f"data.batch_size={size}: its process ended with {process.exitcode}.")
        return {"fits": False, "peak": peak, "bound": "memory"}  # the system took it for want of memory
    finally:
        process.kill()
        process.join()
        receive.close()
    if "refused" in found:
        raise UserError(found["refused"])
    if limit is not None and found["peak"] > limit:
        found |= {"fits": False, "bound": "memory"}
    return found


def _resident(pid: int | None) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:  # it has just ended
        return 0


def _attempt(cfg: dict[str, Any], size: int, device: str, send: Connection) -> None:
    try:
        send.send(measured(cfg, size, device))
    except UserError as error:
        few = re.search(r"cannot be filled from (\d+) training samples", str(error))
        bound = {"fits": False, "peak": 0, "bound": f"the {few[1]} training samples"} if few else None
        send.send(bound or {"refused": str(error)})
    except (torch.OutOfMemoryError, MemoryError):
        send.send({"fits": False, "peak": _peak(device), "bound": "memory"})
    except RuntimeError as error:
        if "memory" not in str(error):  # the CPU's allocator has no exception of its own
            raise
        send.send({"fits": False, "peak": _peak(device), "bound": "memory"})


def measured(cfg: dict[str, Any], size: int, device: str) -> Try:
    """Trains `find.steps` optimizer steps with batches of `size`."""
    quiet()
    seed_everything(cfg["seed"], workers=True, verbose=False)
    trainer_keys = {**cfg["trainer"], **WITHOUT, "max_steps": cfg["find"]["steps"]}
    cfg = {**cfg, "scheduler": None, "trainer": trainer_keys, "data": {**cfg["data"], "batch_size": size}}
    datamodule, task = make_data(cfg), make_task(cfg)
    task.check_run(cfg)
    check_loaders(cfg, datamodule)
    widen(task, cfg)
    clock = Clock()
    frozen = [FrozenStatistics()] if cfg.get("freeze") else []
    trainer = make_trainer(cfg, Path(cfg["find"]["output"]).parent, [*task.own_callbacks(), *frozen, clock])
    begin_with(cfg, task)
    prepare(cfg, task, trainer)
    trainer.fit(task.driven, datamodule=datamodule)
    return {"fits": True, "peak": _peak(device), "seconds": clock.least}


class Clock(Callback):
    """`least`, the seconds of the fastest optimizer step; the first ones warm up."""

    def __init__(self) -> None:
        self.least, self._last, self._steps = float("inf"), 0.0, 0

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


def _peak(device: str) -> int:
    """Bytes that this process has held at most: of the GPU's memory, or resident."""
    if device == "cuda":
        return int(torch.cuda.max_memory_reserved())
    import resource  # not on Windows

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024
