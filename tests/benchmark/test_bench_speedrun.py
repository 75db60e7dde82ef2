"""The Fashion-MNIST speedrun: training of both sides on the same images, and the verdicts."""

import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fashion import write
from support.runs import ROOT, config

from lathe.data import Augment
from lathe.data.augment import draw
from lathe.data.published import FILES
from lathe.runs.build import make_data

SMALL = (
    "model.net.width=4",
    "data.batch_size=10",
    "data.source.val_size=10",
    "optimizer.lr=0.02",  # scaled to the small batch
    "trainer.log_every_n_steps=4",
    "callbacks.hard_samples.share=0.98",
    "callbacks.image_sizes.scales=[0.5]",
)


@pytest.fixture(scope="module")
def bench() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "bench_speedrun.py"), run_name="bench_speedrun")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The four files with few images of five classes, which pass for the published ones."""
    home = tmp_path_factory.mktemp("files")
    files, _ = write(home, highest=4, bars=True)
    with pytest.MonkeyPatch.context() as patch:
        for split, pair in files.items():
            patch.setitem(FILES, split, pair)
        yield home


def request(folder: Path, **changes: Any) -> Namespace:
    usual = {"usual_epochs": 8, "batch_size": 10, "lr": 0.05, "crop": 1, "workers": 0}
    return Namespace(**{"folder": str(folder), "threads": 0, "epochs": 12, "override": list(SMALL), **usual, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("side", ["lathe", "usual"])
def test_a_side_learns_from_files_of_the_real_format(bench: dict[str, Any], folder: Path, side: str) -> None:
    found = bench["trained"](side, 1, request(folder))
    assert found["accuracy"] > 0.5  # chance is 0.2
    assert found["seconds"] > found["compile_s"] >= 0.0
    assert found["cpu_s"] > 0.0


def test_the_sides_train_on_the_same_images(bench: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    """With the same augmentation a side's batch is the other's; each side has its own order of samples."""
    cfg = config(*bench["words"](3, request(folder), str(tmp_path)))
    data = make_data(cfg)
    data.prepare_data()
    data.setup("fit")
    samples = bench["usual_batches"](data, cfg, request(folder)).dataset
    n = len(samples)
    moves = draw(Augment(crop=1, flip="alternating"), 3, 0, n, 28, 28)
    usual = [
        (pixels(samples.at(i, int(moves.top[i]) - 1, int(moves.left[i]) - 1, bool(moves.flip[i]))), samples.labels[i])
        for i in range(n)
    ]
    lathe = [(pixels(x.numpy()), int(y)) for xs, ys in data.train_dataloader() for x, y in zip(xs, ys, strict=True)]
    assert n == 50
    assert sorted(lathe) == sorted(usual)


def pixels(image: Any) -> bytes:
    """Return the pixels before normalisation."""
    return np.round((image * 0.353 + 0.286) * 255).astype(np.uint8).tobytes()
