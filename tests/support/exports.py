"""Requests, small runs, and bytes that must not be in a file, for the tests of exports."""

import io
import sys
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lathe import export
from lathe.runs.export_model import open_export_model
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from support.runs import ROOT, SMALL, config, new_run

WHOLE = ["onnx", "onnx/manifest.json", "onnx/model.onnx", "onnx/parity.json"]  # the files of target=onnx in exports/
GPT = (
    *("data=synthetic_tokens", "model=gpt_nano", "model.net.depth=1", "model.net.width=32", "trainer.max_epochs=1"),
    *("data.source.train_size=128", "data.source.val_size=32", "data.source.test_size=32"),
)
CNN = ("model=resnet20", "model.net.depth=8", "model.net.width=8", "data.batch_size=64")


def made(log_dir: Path, *overrides: str) -> RunDir:
    """Train a run."""
    cfg = new_run(log_dir, *SMALL[3:6], "trainer.log_every_n_steps=1", "compression.receipt=none", *overrides)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def request(run: RunDir, *overrides: str, name: str = "export") -> dict[str, Any]:
    """Return the configuration of a command on a run, as from `launch_on_run`."""
    asked = config(f"run={run.path}", *overrides, name=name)
    cfg = run.config
    cfg["trainer"] |= asked["trainer"]
    cfg["paths"]["run_dir"] = str(run.path)
    return {**cfg, "strategy": asked["strategy"], "request": asked}


def left(run: RunDir) -> list[str]:
    """Return the paths in the run's exports."""
    exports = run.path / "exports"
    return sorted(str(path.relative_to(exports)) for path in exports.rglob("*")) if exports.exists() else []


def targets() -> list[str]:
    """Return the targets that are available here."""
    return [
        name for name, module in export.TARGETS.items() if find_spec(module) and export.get(name).available() is None
    ]


def contents(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, and recursively of an archive's members."""
    yield from _unpacked(path.read_bytes())


def _unpacked(data: bytes) -> Iterator[bytes]:
    yield data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield from _unpacked(archive.read(name))


def leaks(run: RunDir, target: str, scratch: Path) -> list[str]:
    """Return which training data, or paths of this machine, the files of an export contain."""
    wanted = dict(needles(open_export_model(run.path).data))
    places = (Path.home(), Path.cwd(), ROOT, run.path, sys.prefix, scratch)
    wanted |= {str(place): str(place).encode() for place in places if len(str(place)) > 5}
    texts = [text for path in (run.path / "exports" / target).iterdir() for text in contents(path)]
    return [what for what, needle in wanted.items() if any(needle in text for text in texts)]


def needles(data: Any, count: int = 8) -> Mapping[str, bytes]:
    """Return bytes of labels and images (uint8 and the net's float32), without rows that are too uniform."""
    found: dict[str, bytes] = {}
    x, _ = next(iter(data.eval_loader("train")))
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (data.mean, data.std))
    pixels = (255 * (x * std + mean)).round().to(torch.uint8)
    for name, images in (("uint8", pixels), ("float32", x)):
        for index in range(count):
            found[f"{name} image {index}"] = images[index].numpy().tobytes()
            for row, values in enumerate(images[index].flatten(0, 1)):
                if len(values.unique()) > 4:
                    found[f"{name} image {index} row {row}"] = values.numpy().tobytes()
        found[f"{name} batch"] = images[:4].numpy().tobytes()
    return found
