"""A loaded run: its net, data and metrics, and the predictions of commands and the server."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.runs import SMALL, new_run, request, weights

import lathe
from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.serving.model import load as load_served
from lathe.training.train import train
from lathe.verbs.load import Run
from lathe.verbs.predict import predict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    cfg = new_run(tmp_path_factory.mktemp("logs"), *SMALL, "precision=bf16-mixed")
    train(cfg)
    return lathe.load(cfg["paths"]["run_dir"])


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (70, 1, 8, 8), dtype=np.uint8)


def test_a_run_has_its_parts(run: Run) -> None:
    assert not run.net.training
    for name, value in run.net.state_dict().items():
        assert torch.equal(value, weights(run.dir, "best")[name])
    assert lathe.load(run.dir, "last").net.state_dict().keys() == weights(run.dir).keys()
    assert run.task.net is run.net
    assert sum(len(y) for _, y, *_ in run.datamodule.test_dataloader()) >= 297
    assert run.config.model.net.width == 16
    assert run.result["epochs"] == 2
    assert repr(run).startswith(f"Run {run.dir}: MLP, complete after {run.result['steps']} steps, test/accuracy ")


def test_predictions_are_those_of_the_command_and_the_server(run: Run, pixels: np.ndarray, tmp_path: Path) -> None:
    """In the precision of training, as scripts/predict.py, and in the server's float32."""
    np.save(tmp_path / "x.npy", pixels)
    for index in (0, 1):
        Image.fromarray(pixels[index, 0]).save(tmp_path / f"{index}.png")
    words = (f"input={tmp_path / 'x.npy'}", f"output={tmp_path / 'y.csv'}", "trainer.enable_progress_bar=false")
    predict(request(RunDir(run.dir), "predict", *words, "trainer.accelerator=cpu"))
    with open(tmp_path / "y.csv", newline="") as file:
        told = list(csv.DictReader(file))
    before = torch.get_rng_state()
    found = run.predict(pixels)
    assert torch.equal(before, torch.get_rng_state())
    assert len(found) == len(told) == 70
    assert [int(row["prediction"]) for row in told] == found.prediction.tolist()
    assert [row["probability"] for row in told] == [f"{value:.6f}" for value in found.probability]
    assert found.classes is None or [row["class"] for row in told] == found.classes
    for again in (tmp_path / "x.npy", str(tmp_path / "x.npy"), [tmp_path / "x.npy"], torch.from_numpy(pixels)):
        assert np.array_equal(run.predict(again).logits, found.logits)
    files = run.predict([tmp_path / "0.png", tmp_path / "1.png"])
    assert np.allclose(files.logits, found.logits[:2], atol=1e-2)  # another batch, in bfloat16
    assert np.array_equal(run.predict(tmp_path / "0.png").prediction, found.prediction[:1])


def test_token_ids_are_answered_by_what_comes_next(tmp_path: Path) -> None:
    words = ("data=synthetic_tokens", "model=gpt_nano", "trainer.max_steps=2", "data.batch_size=8")
    cfg = new_run(tmp_path, *words, "trainer.accelerator=cpu", "callbacks.progress_bar=null")
    train(cfg)
    run = lathe.load(cfg["paths"]["run_dir"])
    ids = np.arange(12).reshape(3, 4)
    found = run.predict(ids)
    served = load_served(str(run.dir), "module", "best", torch.get_num_threads())
    assert np.allclose(served(ids)[:, -1], found.logits, atol=1e-5)
    for wrong in (ids[0], ids - 1, ids / 2):
        with pytest.raises(UserError, match="token ids"):
            run.predict(wrong)
