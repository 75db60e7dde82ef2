"""data=dataset with a task of inputs and targets: samples of another form are refused."""

import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import new_run
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from lathe.errors import UserError
from lathe.runs.rundir import RunDir
from lathe.tasks import RegressionTask
from lathe.training.train import train
from lathe.verbs.evaluate import evaluate

QUICK = (
    "task=regression",
    "trainer.accelerator=cpu",
    "trainer.max_epochs=1",
    "data.batch_size=8",
    "trainer.log_every_n_steps=2",
)
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "optimizer=adamw")


class Rows:
    """`n` samples of a given form."""

    def __init__(self, form: str = "pair", n: int = 40) -> None:
        self.form, self.n = form, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> Any:
        x = torch.arange(4.0) + row % self.n
        return {"pair": (x, x), "alone": x, "three": (x, x, 1.0), "dict": {"x": x, "y": x, "id": row}}[self.form]


class Flowing(IterableDataset[Any]):
    def __init__(self, form: str) -> None:
        self.rows = Rows(form)

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[row] for row in range(40))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state: it always restarts."""


class Together(RegressionTask):
    """A user's task for inputs only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_loss(self.net(batch), (batch, batch))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluate_outputs("val", self.net(batch), (batch, batch))

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.evaluate_outputs("test", self.net(batch), (batch, batch))

    def count_units(self, batch: Tensor) -> int:
        return len(batch)


class Net(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)


def run(folder: Path, form: str, *words: str, name: str = "Rows") -> dict[str, Any]:
    cfg = new_run(folder, "data=dataset", "data.train={_target_: x}", *QUICK, *QUIET, *words)
    cfg["data"]["train"] = {"_target_": f"{__name__}.{name}", "form": form}
    if name == "Flowing":
        cfg["data"] |= {"samples": 40, **{split: {"_target_": f"{__name__}.Rows"} for split in ("val", "test")}}
    cfg["model"] = {"init": None, "net": {"_target_": f"{__name__}.Net"}}
    return cfg


@pytest.mark.parametrize("name", ["Rows", "Flowing"])
@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("alone", "expected inputs and their targets"),
        ("dict", "samples have the keys x, y, id: name two in data.input"),
    ],
)
def test_samples_that_are_no_inputs_and_targets_are_refused(tmp_path: Path, form: str, words: str, name: str) -> None:
    with pytest.raises(UserError, match=rf"data\.train: .*{words}"):
        train(run(tmp_path, form, name=name))


def test_parts_of_a_sample_that_the_task_does_not_use_warn_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"^data\.train: samples have 3 parts") as seen:
        train(run(tmp_path, "three"))
    assert len([one for one in seen if "3 parts" in str(one.message)]) <= 3  # one per split


def test_named_parts_and_own_tasks_take_other_samples(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(run(tmp_path / "named", "dict", "data.input=x", "data.target=y"))
        own = run(tmp_path / "own", "alone")
        own["task"] = {**own["task"], "_target_": f"{__name__}.Together"}
        assert train(own)["steps"] == 4


def test_data_that_have_changed_since_the_run_warn_or_are_refused(tmp_path: Path) -> None:
    cfg = run(tmp_path, "pair")
    result = train(cfg)
    done = RunDir(cfg["paths"]["run_dir"])
    assert torch.load(done.best, weights_only=True)["DatasetDataModule"] == {
        "sizes": {"train": 32, "val": 4, "test": 4},
        "seed": 42,
    }
    asked = {**cfg, "request": {"run": str(done.path), "checkpoint": "best", "split": "test", "output": None}}
    same = evaluate(asked)
    assert same["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)
    asked["data"] = {**cfg["data"], "train": {**cfg["data"]["train"], "n": 41}}
    told = r"^The data are not those that this checkpoint was trained with: train 32 -> 33\. Where splits are cut"
    with pytest.warns(UserWarning, match=told):
        evaluate(asked)
    assert evaluate({**asked, "data": cfg["data"]}) == same
    cfg["data"]["train"]["n"], cfg["trainer"]["max_epochs"] = 60, 2
    with pytest.raises(UserError, match=r"ckpt: the data are not those that it was written with, train 32 -> 48"):
        train(cfg)
    other = ("seed=2", f"ckpt_path={done.last}", "ckpt_mode=trainer", "trainer.max_epochs=2")
    begun = run(tmp_path / "from", "pair", *other)
    begun["data"]["train"]["n"] = 41
    assert train(begun)["steps"] == 8  # another run may begin with other data and another seed


def test_a_checkpoint_of_a_run_with_another_seed_warns_or_is_refused(tmp_path: Path) -> None:
    first, second = (run(tmp_path / str(seed), "pair", f"seed={seed}") for seed in (1, 2))
    for cfg in (first, second):
        train(cfg)
    folders = [RunDir(cfg["paths"]["run_dir"]) for cfg in (first, second)]
    for name in ("best", "last"):
        shutil.copy(folders[0].path / "checkpoints" / f"{name}.ckpt", folders[1].path / "checkpoints" / f"{name}.ckpt")
    asked = {"run": str(folders[1].path), "checkpoint": "best", "split": "test", "output": None}
    with pytest.warns(UserWarning, match=r"^The data are not those .*: data\.seed 1 -> 2\."):
        evaluate({**second, "request": asked})
    second["trainer"]["max_epochs"] = 2
    with pytest.raises(UserError, match=r"last\.ckpt: the data are not those .*, data\.seed 1 -> 2"):
        train(second)
