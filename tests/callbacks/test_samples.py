"""The prediction report: its numbers are those of the run's best weights, on one process and on two."""

import base64
import io
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.pictures import pictures
from support.ranks import on_ranks
from support.runs import SMALL, new_run
from torch.nn import functional as F

import lathe
from lathe.training.train import train

PAGE = ("callbacks=[default,samples]", "callbacks.samples.worst=7", "callbacks.samples.random=5")


def run(folder: Path, *overrides: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """Return a run's directory, its result and the numbers of its page."""
    cfg = new_run(folder, *SMALL, *PAGE, *overrides)
    result = train(cfg)
    path = Path(cfg["paths"]["run_dir"])
    split = cfg["callbacks"]["samples"]["split"]
    return path, result, json.loads((path / "samples" / f"{split}.json").read_text())


def two(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    """Run on a rank."""
    return train(cfg)


@pytest.mark.parametrize("split", ["val", "test"])
def test_the_page_is_of_the_best_weights(tmp_path: Path, split: str) -> None:
    path, result, page = run(tmp_path, f"callbacks.samples.split={split}")
    loaded = lathe.load(path)
    batches = list(getattr(loaded.datamodule, f"{split}_dataloader")())
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    x, y = x[y >= 0], y[y >= 0]
    with torch.no_grad():
        logits = loaded.net(x)
    losses, (probability, predicted) = F.cross_entropy(logits, y, reduction="none"), logits.softmax(1).max(1)
    assert page["samples"] == len(y) == {"val": 200, "test": 297}[split]
    assert page["accuracy"] == pytest.approx(result[f"{split}/accuracy"], abs=1e-6)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion.index_put_((y, predicted), torch.ones_like(y), accumulate=True)
    assert page["confusion"] == confusion.tolist()
    worst = losses.topk(7)
    assert [row["number"] for row in page["worst"]] == worst.indices.tolist()
    assert [row["loss"] for row in page["worst"]] == pytest.approx(worst.values.tolist(), rel=1e-4)
    for row in (*page["worst"], *page["random"]):
        i = row["number"]
        assert (row["label"], row["predicted"]) == (int(y[i]), int(predicted[i]))
        assert row["probability"] == pytest.approx(float(probability[i]), rel=1e-4)
    assert len({row["number"] for row in page["random"]}) == 5
    bins = (probability * 15).long()
    each = [(bins == b).nonzero().flatten() for b in range(15)]
    right = (predicted == y).float()
    gap = sum(len(i) / len(y) * abs(right[i].mean() - probability[i].mean()) for i in each if len(i))
    assert page["calibration_error"] == pytest.approx(float(gap), abs=1e-5)
    shown = re.findall(r'base64,([^"]+)"', (path / "samples" / f"{split}.html").read_text())
    assert len(shown) == 12
    first = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown[0]))))
    assert first.shape == (96, 96)
    pixels = x[worst.indices[0], 0] * 0.376 + 0.305
    assert (first[::12, ::12] == (pixels * 255).round().numpy()).all()


@pytest.mark.slow
def test_two_processes_write_the_page_of_one(tmp_path: Path) -> None:
    alone_dir, _, alone = run(tmp_path / "one")
    cfg = new_run(tmp_path / "two", *SMALL, *PAGE, "strategy=ddp", "trainer.devices=2")
    on_ranks(two, cfg, timeout=200)
    page = json.loads((Path(cfg["paths"]["run_dir"]) / "samples" / "val.json").read_text())
    assert page["confusion"] == alone["confusion"]
    assert page["calibration_error"] == pytest.approx(alone["calibration_error"], abs=1e-5)
    assert [row["loss"] for row in page["worst"]] == pytest.approx([row["loss"] for row in alone["worst"]], rel=1e-3)
    assert [row["label"] for row in page["worst"]] == [row["label"] for row in alone["worst"]]
    assert {row["number"] for row in page["worst"]} == {None}
    told = "Samples have no numbers and no names of files here: several processes have shared them out"
    pages = [Path(folder) / "samples" / "val.html" for folder in (alone_dir, cfg["paths"]["run_dir"])]
    assert [told in page.read_text() for page in pages] == [False, True]


def test_pictures_of_a_folder_are_called_by_their_files(tmp_path: Path) -> None:
    """Each loss is that of the net on the file named in the page; names are escaped."""
    folder = pictures(tmp_path / "photos", {"<b>cat": 12, "dog": 12})
    (folder / "dog" / "000.png").rename(folder / "dog" / "<i> & .png")
    words = [
        "data=image_folder",
        f"data.folder={folder}",
        "data.image_size=8",
        "data.batch_size=4",
        "data.folds=3",
        "data.fold=1",
    ]
    words += ["data.source.val_share=0.3", "trainer.max_epochs=1", "optimizer.lr=0.001", "trainer.log_every_n_steps=1"]
    path, _, page = run(tmp_path, *words, f"paths.data_dir={tmp_path / 'data'}", "callbacks.samples.worst=24")
    loaded = lathe.load(path)
    for row in page["worst"] + page["random"]:
        assert row["file"].startswith("<b>cat/" if row["label"] == 0 else "dog/")
        found = loaded.predict(folder / row["file"], resize=True)
        assert -np.log(found.probabilities[0, row["label"]]) == pytest.approx(row["loss"], rel=1e-3)
    assert len({round(row["loss"], 6) for row in page["worst"]}) == page["samples"]
    assert len({row["file"] for row in page["worst"]}) == len(page["worst"]) == page["samples"]
    html = (path / "samples" / "val.html").read_text()
    shown = set(re.findall(r"<figcaption><b>(.*?)</b>", html))
    assert shown == {escape(row["file"]) for row in page["worst"] + page["random"]}
    assert "<i>" not in html


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
@pytest.mark.slow
def test_loggers_get_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # MLflow keeps files of a database below the working directory
    store = f"sqlite:///{tmp_path}/mlflow.db"
    path, _, _ = run(tmp_path / "logs", "logger=[mlflow,wandb]", f"logger.mlflow.tracking_uri={store}")
    client = MlflowClient(store)
    (found,) = client.search_runs([client.get_experiment_by_name("lathe").experiment_id])
    kept = Path(found.info.artifact_uri.removeprefix("file://")) / "samples" / "val.html"
    assert kept.read_bytes() == (path / "samples" / "val.html").read_bytes()
    assert [file.read_bytes() for file in (path / "wandb").rglob("*.html")] == [kept.read_bytes()]


def test_the_page_of_a_quantized_run_is_of_its_final_weights(tmp_path: Path) -> None:
    _, result, page = run(tmp_path, "compression=ptq_dynamic", "compression.receipt=none")
    assert page["accuracy"] == pytest.approx(result["val/accuracy"], abs=1e-6)
