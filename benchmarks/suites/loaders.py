"""suite=loaders: samples/s of data loading, relative to the usual per-sample recipe.

All sides yield contiguous batches on the training device, in a new order each epoch. They take turns in one process, so
that other load affects all alike. Workers start before the first round, and wait with full queues while other sides are
measured.
"""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lathe.config.resolve import resolve
from lathe.files import scratch
from lathe.launch.api import compose
from lathe.measure import plot, usable_cores
from lathe.runs.build import make_data
from suites import dataloader_baseline as baseline
from suites.results import Columns, Facts, Results, Threshold, fact, show
from suites.runner import report, take_turns

CLASSES = ("ant", "bee", "cow", "dog")
SIDE, FILE_SIDE, LENGTH = 32, 64, 256  # in pixels, pixels and tokens
# The usual augmentation of colour images, as keys of the configuration.
IMAGES = (
    *("data.channels=3", f"data.mean={[*baseline.MEAN]}", f"data.std={[*baseline.STD]}"),
    *(f"data.augment.crop={baseline.PADDING}", "data.augment.crop_fill=zero", "data.augment.flip=random"),
    "data.augment.cutout=0",
)
# Samples of an epoch, and of a batch.
SIZES = {"images in memory": 45_000, "image files": 1_000, "dataset": 8_000, "tokens": 8_000}
BATCHES = {"images in memory": 512, "image files": 64, "dataset": 128, "tokens": 32}
PIL, TUNED, JPEG, ITEMS, MAPPED = "PIL", "PIL tuned", "JPEG, PIL", "DataLoader", "memory map"
DATASETS = {"table": "Table", "drawing": "Drawing", "encoded": "Encoded"}
FIGURE = "samples_per_s"


@dataclass
class Side:
    """One way to read: endless batches, `whole` timed at once. The fastest of the sides `usual` is the baseline."""

    kind: str
    how: str
    workers: int
    batches: Iterator[Any]
    samples: int
    size: int
    usual: tuple[str, ...]
    whole: int = 1

    @property
    def name(self) -> str:
        return _name(self.kind, self.how, self.workers)


def _name(kind: str, how: str, workers: int) -> str:
    return f"{kind}: {how}, {workers} workers"


def measure(request: Mapping[str, Any], output: Path) -> tuple[Facts, Results]:
    """Measure samples/s of each side in each round."""
    workers = sorted({0, min(8, usable_cores())} if request["workers"] is None else {*request["workers"]})
    device = torch.device("cuda" if request["accelerator"] == "gpu" else "cpu")
    makers = {"images in memory": _in_memory, "image files": _files, "dataset": _datasets, "tokens": _tokens}
    with scratch() as folder, ExitStack() as stack:
        sides = dict[str, Side]()
        for kind, make in makers.items():
            report(f"making ready: {kind}")
            size = request["batch_size"] or BATCHES[kind]
            sides |= {side.name: side for side in make(folder, SIZES[kind], size, workers, device)}
        for side in sides.values():
            stack.callback(side.batches.close)  # type: ignore[attr-defined]  # of a generator, which ends its workers
        turns = {name: partial(_rate, side, request["seconds"], device) for name, side in sides.items()}
        take_turns(turns, 1, quiet=True)  # starts the workers, and draws the first epoch's tables
        results = take_turns(turns, request["rounds"])
        facts = {
            name: {
                **{"kind": side.kind, "how": side.how, "workers": side.workers, "usual": list(side.usual)},
                **{"samples": side.samples, "batch_size": side.size},
            }
            for name, side in sides.items()
        }
        return facts, results


def _fastest(results: Results, names: list[str]) -> str | None:
    """Return the side with the highest median; None if none was measured."""
    medians = {name: spread.median for name in names if (spread := results.spread(name, FIGURE))}
    return max(medians, key=lambda name: medians[name], default=None)


def tables(facts: Facts, results: Results, request: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return a row for each side, with its speed over the fastest of its `usual` sides."""
    gains = {name: results.ratio(name, _fastest(results, about["usual"]), FIGURE) for name, about in facts.items()}
    columns: Columns = {
        "data": fact(facts, "kind"),
        "read by": fact(facts, "how"),
        "workers": fact(facts, "workers"),
        "batch": fact(facts, "batch_size"),
        "samples/s": results.cells(FIGURE, ",.0f"),
        "s an epoch": lambda name: show(results.spread(name, lambda r: facts[name]["samples"] / r[FIGURE])),
        "over the usual recipe": lambda name: show(gains[name]),
    }
    note = (
        "The usual recipe reads one sample at a time with torch's DataLoader; where it has several rows, the fastest "
        f"of them is the base. A turn reads for {request['seconds']:g} s at least, resident data for whole epochs. "
        f"Images in memory: {SIDE} x {SIDE}, three colours, crop and flip; image files: JPEG of 160 to 320 pixels a "
        f"side brought to {FILE_SIDE}; tokens: windows of {LENGTH}. Batches are wanted on the "
        f"{request['accelerator']}.\n"
    )
    heights = {name: {"over the usual recipe": gain.median} for name, gain in gains.items() if gain}
    return [results.table(columns, facts=4), note], plot.stacks("Samples/s over the usual recipe", "x", heights)


def claims(results: Results) -> list[Threshold]:
    """Return the required speed-ups over the usual recipe; data=dataset must not be slower than a DataLoader."""
    limits = list[Threshold]()
    for how, kind, base, bar in (
        ("resident, uint8", "images in memory", PIL, 40.0),
        ("resident, uint8", "images in memory", TUNED, 40.0),
        ("resident", "images in memory", PIL, 15.0),
        ("resident", "images in memory", TUNED, 15.0),
        ("data=image_folder", "image files", JPEG, 10.0),
    ):
        bases = [name for name in results if name.startswith(f"{kind}: {base}, ")]
        gain = results.ratio(_name(kind, how, 0), _fastest(results, bases), FIGURE)
        limits.append(Threshold(f"{kind}, {how}: samples/s over {base}'s,", gain, at_least=bar))
    for name in results:
        if ": data=dataset, " in name:
            gain = results.ratio(name, name.replace("data=dataset", ITEMS), FIGURE)
            limits.append(Threshold(f"{name}: samples/s over {ITEMS}'s,", gain, at_least=1.0))
    return limits


def _rate(side: Side, seconds: float, device: torch.device) -> dict[str, Any]:
    """Return samples/s on `device` over at least `seconds`, after batches that workers have read ahead."""

    def take(count: int) -> None:
        for _ in range(count):
            for tensor in next(side.batches):
                tensor.to(device, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize()

    take(3 * side.workers + 2)  # each of torch's workers prefetches two batches, and holds one
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds or not count:
        take(side.whole)
        count += side.whole
    return {FIGURE: count * side.size / (time.perf_counter() - began)}


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _by_dataloader(data: Dataset[Any], size: int, workers: int, device: torch.device, collate: Any = None) -> Any:
    loader = DataLoader(
        data,
        size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
        pin_memory=device.type == "cuda",
        collate_fn=collate,
    )
    return _endless(loader)


def _open(*words: str) -> Any:
    """Return the data module of these overrides, set up."""
    data = make_data(resolve(compose(words)))
    data.prepare_data()
    data.setup()
    return data


def _quote(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _in_memory(folder: Path, samples: int, size: int, workers: list[int], device: torch.device) -> Iterator[Side]:
    sizes = (f"data.source.train_size={samples}", "data.source.val_size=10", "data.source.test_size=10")
    data = _open("data=synthetic", f"data.image_size={SIDE}", *IMAGES, *sizes, f"data.batch_size={size}")
    split = data.open()["train"]
    images, labels = split.read()
    kind, base = "images in memory", tuple(_name("images in memory", PIL, n) for n in workers)
    for n in workers:
        batches = _by_dataloader(baseline.InMemory(images, labels), size, n, device)
        yield Side(kind, PIL, n, batches, samples, size, base)
    for n in workers:
        batches = _by_dataloader(baseline.Tuned(images, labels), size, n, device, baseline.stack)
        yield Side(kind, TUNED, n, batches, samples, size, base)
    batch = data.build(split, device, batch_size=size, train=True)
    settings = {**data.settings(device, {"batch_size": size, "train": True}), "normalizer": None}
    pixels = type(batch)(torch.from_numpy(images), torch.from_numpy(labels), **settings)
    for how, loader in (("resident, uint8", pixels), ("resident", batch)):
        yield Side(kind, how, 0, _endless(loader), samples, size, base, whole=len(loader))


def _files(folder: Path, samples: int, size: int, workers: list[int], device: torch.device) -> Iterator[Side]:
    kind, photos = "image files", folder / "photos"
    baseline.write_files(photos, CLASSES, samples)
    base = tuple(_name(kind, JPEG, n) for n in workers)
    for n in workers:
        batches = _by_dataloader(baseline.Files(photos, FILE_SIDE), size, n, device)
        yield Side(kind, JPEG, n, batches, samples, size, base)
    share = max(0.01, len(CLASSES) / samples)  # at least one image of each class
    shares = (f"data.source.val_share={share}", f"data.source.test_share={share}", f"data.batch_size={size}")
    paths = (f"data.folder={_quote(photos)}", f"paths.data_dir={_quote(folder)}")
    data = _open("data=image_folder", *paths, *IMAGES, f"data.image_size={FILE_SIDE}", *shares)
    loader = data.build(data.open()["train"], device, batch_size=size, train=True)
    yield Side(kind, "data=image_folder", 0, _endless(loader), len(loader) * size, size, base, whole=len(loader))


def _datasets(folder: Path, samples: int, size: int, workers: list[int], device: torch.device) -> Iterator[Side]:
    for (name, of), n in product(DATASETS.items(), workers):
        kind, train = f"dataset, {name}", f"{{_target_: {baseline.__name__}.{of}, n: {samples}}}"
        read = (f"data.num_workers={n}", f"data.persistent_workers={n > 0}", f"data.batch_size={size}")
        facts = ("data.num_classes=10", "data.channels=3", "data.image_size=32")
        data = _open("data=dataset", f"data.train={train}", *facts, *read)
        base = (_name(kind, ITEMS, n),)
        yield Side(kind, ITEMS, n, _by_dataloader(data.datasets["train"], size, n, device), samples, size, base)
        yield Side(kind, "data=dataset", n, _endless(data.train_dataloader()), samples, size, base)


def _tokens(folder: Path, samples: int, size: int, workers: list[int], device: torch.device) -> Iterator[Side]:
    kind, file = "tokens", folder / "tokens.npy"
    sizes = (f"data.source.train_size={samples}", "data.source.val_size=2", "data.source.test_size=2")
    data = _open("data=synthetic_tokens", "model=gpt_nano", f"data.length={LENGTH}", f"data.batch_size={size}", *sizes)
    np.save(file, data.open()["train"].ids)
    base = tuple(_name(kind, MAPPED, n) for n in workers)
    for n in workers:
        batches = _by_dataloader(baseline.Windows(file, LENGTH), size, n, device)
        yield Side(kind, MAPPED, n, batches, samples, size, base)
    yield Side(kind, "data=tokens", 0, _endless(data.train_dataloader()), samples, size, base)
