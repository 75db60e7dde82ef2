"""What tests of exports share: a request as the launch hands it to the verb, small runs, and what must not be inside a
file.
"""

import io
import zipfile
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from lathe import export
from lathe.runs.rundir import RunDir
from lathe.training.train import train
from support.runs import SMALL, config, new_run

WHOLE = ["onnx", "onnx/manifest.json", "onnx/model.onnx", "onnx/parity.json"]  # what target=onnx leaves in exports/
CNN = ("model=resnet20", "model.net.depth=8", "model.net.width=8", "data.batch_size=64")


def made(log_dir: Path, *overrides: str) -> RunDir:
    """A trained run."""
    cfg = new_run(log_dir, *SMALL[3:6], "trainer.log_every_n_steps=1", "compression.receipt=none", *overrides)
    train(cfg)
    return RunDir(cfg["paths"]["run_dir"])


def request(run: RunDir, *overrides: str) -> dict[str, Any]:
    """What `launch_on_run` hands to the job."""
    asked = config(f"run={run.path}", *overrides, name="export")
    cfg = run.config
    cfg["trainer"] |= asked["trainer"]
    cfg["paths"]["run_dir"] = str(run.path)
    return {**cfg, "strategy": asked["strategy"], "request": asked}


def left(run: RunDir) -> list[str]:
    """What lies in the run's exports."""
    exports = run.path / "exports"
    return sorted(str(path.relative_to(exports)) for path in exports.rglob("*")) if exports.exists() else []


def targets() -> list[str]:
    """Those that can be used here."""
    return [
        name for name, module in export.TARGETS.items() if find_spec(module) and export.get(name).available() is None
    ]


def contents(path: Path) -> Iterator[bytes]:
    """The bytes of a file and, where it is an archive, of its members and theirs."""
    yield from _unpacked(path.read_bytes())


def _unpacked(data: bytes) -> Iterator[bytes]:
    yield data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for name in archive.namelist():
                yield name.encode()
                yield from _unpacked(archive.read(name))


def needles(data: Any, count: int = 8) -> Mapping[str, bytes]:
    """Bytes of training images, whole and by rows, as uint8 and as the float32 that the net sees, and of labels;
    without rows that are too plain to be found by anything but chance."""
    found: dict[str, bytes] = {}
    x, _ = next(iter(data.eval_loader("train")))
    pixels = (
        (x * torch.tensor(data.std).view(-1, 1, 1) + torch.tensor(data.mean).view(-1, 1, 1))
        .mul(255)
        .round()
        .to(torch.uint8)
    )
    for name, images in (("uint8", pixels), ("float32", x)):
        for index in range(count):
            found[f"{name} image {index}"] = images[index].numpy().tobytes()
            for row, values in enumerate(images[index].flatten(0, 1)):
                if len(values.unique()) > 4:
                    found[f"{name} image {index} row {row}"] = values.numpy().tobytes()
        found[f"{name} batch"] = images[:4].numpy().tobytes()
    return found
