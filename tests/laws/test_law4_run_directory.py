"""Law 4: a run directory is enough, and a checkpoint is plain."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import check, run
from support.runs import QUIET, config, new_run

import lathe.training.train
from lathe.data import Digits
from lathe.data.digits import DIGITS
from lathe.nets import CifarResNet

# Sizes, data, loss and training that differ from all defaults.
OVERRIDES = (
    *("model=resnet20", "model.net.width=6", "model.net.depth=8", "model.net.shortcut=zero_pad"),
    *("data.image_size=12", "data.source.split_seed=3", "data.mean=[0.2]", "optimizer=adamw"),
    *("precision=bf16-mixed", "callbacks=[default,ema]", "trainer.max_epochs=2", *QUIET),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, moved away from the paths in its configuration."""
    folder = tmp_path_factory.mktemp("trained")
    cfg = new_run(folder / "logs", *OVERRIDES)
    lathe.training.train.train(cfg)
    moved = folder / "elsewhere"
    shutil.move(cfg["paths"]["run_dir"], moved)
    return moved


def evaluated(run_dir: Path, output: Path, *words: str) -> dict[str, float]:
    """Return what the command writes."""
    words = (f"run={run_dir}", *words, f"output={output}")
    check(run(*words, script="scripts/evaluate.py", cwd=output.parent))
    return dict(json.loads(output.read_text()))


def test_evaluate_gives_the_figures_of_training(trained: Path, tmp_path: Path) -> None:
    for split in ("test", "val"):
        metrics = evaluated(trained, tmp_path / f"{split}.json", f"split={split}")
        result = json.loads((trained / "result.json").read_text())
        assert metrics.keys() == {f"{split}/accuracy", f"{split}/loss"}
        for name, value in metrics.items():
            assert value == pytest.approx(result[name], abs=1e-7)


@pytest.mark.slow
def test_evaluate_on_two_processes_counts_the_same_samples(trained: Path, tmp_path: Path) -> None:
    words = ("strategy=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "batch_size=50")
    two = evaluated(trained, tmp_path / "two.json", *words, "precision=32-true")
    one = evaluated(trained, tmp_path / "one.json", "precision=32-true")
    assert two["test/accuracy"] == pytest.approx(one["test/accuracy"], abs=1e-7)
    assert two["test/loss"] == pytest.approx(one["test/loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["best", "last"])
def test_a_plain_net_opens_a_checkpoint(trained: Path, name: str) -> None:
    state = torch.load(trained / "checkpoints" / f"{name}.ckpt", weights_only=True)
    net = CifarResNet(depth=8, width=6, shortcut="zero_pad", in_channels=1, num_classes=10)
    assert state["state_dict"].keys() == net.state_dict().keys()
    net.load_state_dict(state["state_dict"])  # strict
    images, labels = (torch.from_numpy(array) for array in Digits(image_size=12, split_seed=3).load().test.read())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = net.eval()((images / 255 - 0.2) / config(*OVERRIDES)["data"]["std"][0])
    accuracy = (outputs.argmax(1) == labels).float().mean().item()
    if name == "best":
        assert accuracy == pytest.approx(json.loads((trained / "result.json").read_text())["test/accuracy"], abs=1e-6)


SLOW = ("compile=default", "precision=64-true")


@pytest.mark.parametrize(
    "override", [*(pytest.param(each, marks=pytest.mark.slow) for each in SLOW), "precision=bf16-true", "strategy=ddp"]
)
def test_names_are_plain_under_every_choice(tmp_path: Path, override: str) -> None:
    words = (
        *("model=resnet20", "model.net.width=4", "model.net.depth=8", "trainer.max_epochs=1", "test=false", *QUIET),
        *("trainer.limit_train_batches=3", "trainer.log_every_n_steps=1"),
    )
    check(run(*words, override, cwd=tmp_path))
    state = torch.load(next(tmp_path.glob("logs/train/*/checkpoints/last.ckpt")), weights_only=True)
    net = CifarResNet(depth=8, width=4, in_channels=1, num_classes=10)
    assert list(state["state_dict"]) == list(net.state_dict())
    net.load_state_dict(state["state_dict"])


def test_predict_agrees_with_evaluate(trained: Path, tmp_path: Path) -> None:
    images, labels = Digits(image_size=12, split_seed=3).load().test.read()
    np.save(tmp_path / "images.npy", images)
    words = (f"run={trained}", "input=images.npy", "output=predictions.csv", "trainer.enable_progress_bar=false")
    check(run(*words, script="scripts/predict.py", cwd=tmp_path))
    with open(tmp_path / "predictions.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(labels)
    accuracy = np.mean([int(line["prediction"]) == label for line, label in zip(lines, labels, strict=True)])
    assert accuracy == pytest.approx(json.loads((trained / "result.json").read_text())["test/accuracy"], abs=1e-7)


def test_raw_pixels_are_enough(trained: Path, tmp_path: Path) -> None:
    """Predictions take images of any size; the run scales and normalises them."""
    np.save(tmp_path / "raw.npy", (np.load(DIGITS)["images"][:50] * 255 / 16).round().astype(np.uint8))
    words = (f"run={trained}", "input=raw.npy", "output=out.csv", "resize=true")
    check(run(*words, script="scripts/predict.py", cwd=tmp_path))
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) == 51


def test_weights_start_another_run(trained: Path, tmp_path: Path) -> None:
    words = [word for word in OVERRIDES if not word.startswith(("callbacks", "precision", "trainer.max_epochs"))]
    # A rate too small to change a float32, so that the weights stay equal.
    words += ["trainer.max_epochs=1", "optimizer.lr=1e-30", "optimizer.weight_decay=0"]
    cfg = new_run(tmp_path, *words, f"ckpt_path={trained}")
    result = lathe.training.train.train(cfg)
    assert result["best_step"] > 0
    before = torch.load(trained / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    after = torch.load(Path(cfg["paths"]["run_dir"]) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert all(
        torch.equal(before[name], after[name]) for name in before if "running" not in name and "num_batches" not in name
    )
