"""Metrics without a Trainer equal those of the Trainer."""

import json
from pathlib import Path

import pytest
from support.runs import SMALL, new_run

from lathe.errors import UserError
from lathe.runs.inference import check_input_spec, open_data, open_run_net, score
from lathe.training.train import train

QUIET = ("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
SHORT = ("trainer.max_epochs=1", "trainer.limit_train_batches=3", "trainer.log_every_n_steps=1")
GPT = ("model=gpt_nano", "data=synthetic_tokens", "model.net.depth=1", "model.net.width=32", "optimizer=adamw")


@pytest.mark.parametrize("overrides", [SMALL, (*GPT, *QUIET, *SHORT)], ids=["digits", "tokens"])
def test_score_equals_the_test(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    cfg = new_run(tmp_path, *overrides)
    train(cfg)
    directory = Path(cfg["paths"]["run_dir"])
    task, own = open_run_net(directory)
    data = open_data(own)
    found = score(task, task.net, data.eval_loader("test"))
    tested = json.loads((directory / "result.json").read_text())
    assert {f"test/{name}": value for name, value in found.items()} == pytest.approx(
        {name: value for name, value in tested.items() if name.startswith("test/")}, rel=1e-5
    )
    arrays = score(task, lambda x: task.net(x).numpy(), data.eval_loader("test"))
    assert arrays == found


def test_only_classes_of_images_and_tokens_are_served() -> None:
    images = {"channels": 1, "image_size": 8, "mean": [0.5], "std": [0.5], "num_classes": None}
    for data, kind, words in (
        (images, "ClassificationTask", r"^run=x: its data declare no num_classes, "),
        ({}, "LightningTask", r"^run=x: it has trained a LightningModule as it is, "),
        ({}, "RegressionTask", r"^run=x: its task predicts values, .*: use scripts/evaluate\.py, or the net"),
    ):
        cfg = {"data": data, "task": {"_target_": f"lathe.tasks.{kind}"}}
        with pytest.raises(UserError, match=words):
            check_input_spec(cfg, "x")
        if kind != "LightningTask":
            check_input_spec({**cfg, "data": {**images, "num_classes": 2}}, "x")
