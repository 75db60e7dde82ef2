"""What users attach to a run: parts of the wrong kind are one sentence before training, with the key, what was expected
and what came.
"""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from support.own_parts import Logging
from support.runs import SMALL, config, new_run, rows

from lathe import trust
from lathe.errors import UserError
from lathe.runs.build import make_data, make_task
from lathe.training.callbacks_and_loggers import make_callbacks, make_loggers
from lathe.training.train import train
from lathe.training.trainer_setup import make_trainer


@pytest.fixture(autouse=True)
def _trusted() -> None:
    """What `trusted=[own_parts]` on the command line does."""
    trust.allow({"trusted": ["support.own_parts"]})


WRONG = {
    "data": {
        "torch.utils.data.TensorDataset": (
            "data._target_=torch.utils.data.TensorDataset: expected a lightning LightningDataModule, got the "
            "class TensorDataset."
        ),
        "torch.utils.data.DataLoader": "got the class DataLoader.",
        "lathe.data.Digits": "got the class Digits.",
        "builtins.dict": "got the class dict.",
        "math.hypot": "expected a lightning LightningDataModule, got a float.",
    },
    "task": {
        "torch.nn.Linear": (
            "task._target_=torch.nn.Linear is a net: expected a task such as lathe.tasks.ClassificationTask"
        ),
        "lightning.pytorch.demos.boring_classes.BoringModel": (
            "BoringModel is a plain LightningModule, which brings its net: model=lightning"
        ),
        "builtins.dict": "task._target_=builtins.dict: expected a lathe Task, got the class dict.",
        "lathe.callbacks.EMA": "task._target_=lathe.callbacks.EMA: expected a lathe Task, got the class EMA.",
        "math.hypot": "task can't be built: ",
    },
    "callbacks.x": {
        "torch.nn.Identity": (
            "callbacks.x._target_=torch.nn.Identity: expected a lightning Callback, got the class Identity."
        ),
        "builtins.dict": "callbacks.x._target_=builtins.dict: expected a lightning Callback, got the class dict.",
        "lightning.pytorch.loggers.CSVLogger": "got the class CSVLogger.",
        "math.hypot": "callbacks.x._target_=math.hypot: expected a lightning Callback, got a float.",
        "lightning.pytorch.callbacks.LearningRateFinder": (
            "callbacks.x: LearningRateFinder trains for a while with settings of its own, inside the run: leave it "
            "out, and have python scripts/lr_find.py, with"
        ),
        "lightning.pytorch.callbacks.BatchSizeFinder": (
            "callbacks.x: BatchSizeFinder trains for a while with settings of its own, inside the run: leave it "
            "out, and have python scripts/batch_find.py, with"
        ),
        "lightning.pytorch.callbacks.GradientAccumulationScheduler": "callbacks.x can't be built: ",
        "lathe.callbacks.Checkpoint": (
            "callbacks.checkpoint and callbacks.x are both Checkpoint: leave one of them out."
        ),
        "lathe.callbacks.Throughput": (
            "callbacks.throughput and callbacks.x are both Throughput: leave one of them out."
        ),
    },
    "logger.x": {
        "torch.nn.Identity": (
            "logger.x._target_=torch.nn.Identity: expected a lightning Logger, got the class Identity."
        ),
        "lathe.callbacks.EMA": "got the class EMA.",
        "builtins.print": "logger.x._target_=builtins.print: expected a lightning Logger, got a NoneType.",
    },
    "strategy": {
        "torch.nn.Identity": (
            "strategy._target_=torch.nn.Identity: expected a lightning Strategy, got the class Identity."
        ),
        "builtins.dict": "got the class dict.",
    },
    "optimizer": {
        "torch.optim.lr_scheduler.StepLR": "StepLR: expected the class of an optimizer",
        "torch.optim.LBFGS": "optimizer._target_=LBFGS computes the loss several times in a step",
    },
}


def build(cfg: dict[str, Any], folder: Path, group: str) -> None:
    """Makes all parts in the order of a run."""
    if group == "data":
        make_data(cfg)
    task = make_task(cfg)
    make_loggers(cfg, folder, 0)
    make_callbacks(cfg, task)
    make_trainer(cfg, folder, [])


@pytest.mark.parametrize(
    ("key", "target", "sentence"), [(key, *item) for key, table in WRONG.items() for item in table.items()]
)
def test_a_part_of_another_kind_is_one_sentence(tmp_path: Path, key: str, target: str, sentence: str) -> None:
    cfg = config("model=mlp", "model.net.width=4")
    group, _, name = key.partition(".")
    if name:
        cfg[group][name] = {"_target_": target}
    else:
        cfg[group] = {"_target_": target}
    with pytest.raises(UserError) as caught:
        build(cfg, tmp_path, group)
    assert sentence in str(caught.value)
    assert key in str(caught.value) or name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_average_that_no_checkpoint_would_hold_is_refused(tmp_path: Path) -> None:
    cfg = config("model=mlp")
    cfg["callbacks"]["x"] = {"_target_": "lightning.pytorch.callbacks.StochasticWeightAveraging", "swa_lrs": 0.1}
    with pytest.raises(UserError, match=r"^callbacks\.x: StochasticWeightAveraging .* callbacks=\[default,ema\]\.$"):
        build(cfg, tmp_path, "callbacks")


def test_lightnings_pruning_is_told_to_be_another_run_when_it_goes_on() -> None:
    cfg = config("model=mlp")
    node = {"_target_": "lightning.pytorch.callbacks.ModelPruning", "pruning_fn": "l1_unstructured", "amount": 0.5}
    cfg["callbacks"]["x"] = node
    with pytest.warns(UserWarning, match=r"^callbacks\.x: ModelPruning keeps no masks .*: compression=prune goes on"):
        make_callbacks(cfg, make_task(cfg))


def test_two_progress_bars_are_told() -> None:
    cfg = config("model=mlp", "trainer.enable_progress_bar=true")
    cfg["callbacks"]["x"] = {"_target_": "lightning.pytorch.callbacks.RichProgressBar"}
    told = r"^callbacks\.progress_bar and callbacks\.x are both progress bars, .* add callbacks\.progress_bar=null\.$"
    with pytest.raises(UserError, match=told):
        make_callbacks(cfg, make_task(cfg))
    cfg["callbacks"]["progress_bar"] = None
    assert "RichProgressBar" in [type(callback).__name__ for callback in make_callbacks(cfg, make_task(cfg))]


def test_a_net_that_is_a_function_is_told() -> None:
    cfg = config("model=mlp")
    cfg["model"]["net"] = {"_target_": "math.hypot"}
    with pytest.raises(UserError, match=r"^model\.net\._target_=math\.hypot: expected a torch Module, got a float\."):
        make_task(cfg)


@pytest.mark.parametrize("node", [3, "ema", ["a"], {"decay": 0.9}])
def test_a_node_without_a_target_is_told(node: Any) -> None:
    cfg = config("model=mlp")
    cfg["callbacks"]["x"] = node
    with pytest.raises(
        UserError, match=r"^callbacks\.x=.*: expected a node whose _target_ names a lightning Callback\."
    ):
        make_callbacks(cfg, make_task(cfg))


# monitors

OWN = "task._target_=support.own_parts.Logging"
STOP = "callbacks=[default,early_stopping]"


def callbacks(*words: str) -> list[Any]:
    cfg = config("model=mlp", "model.net.width=4", *words)
    return make_callbacks(cfg, make_task(cfg))


def test_the_direction_of_a_name_that_is_not_the_tasks_is_asked_for() -> None:
    with pytest.raises(
        UserError, match=r"^callbacks\.checkpoint\.mode=auto knows the task's own metrics, and not own/worse: set"
    ):
        callbacks(OWN, "callbacks.checkpoint.monitor=own/worse")


def test_names_that_a_task_declares_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Logging, "logged", ("own/worse",))
    made = callbacks(OWN, "callbacks.checkpoint.monitor=own/worse")
    assert next(it.mode for it in made if hasattr(it, "every_n_epochs")) == "max"


@pytest.mark.parametrize("mode", ["max", "min"])
def test_any_logged_name_chooses_the_best_epoch(tmp_path: Path, mode: str) -> None:
    """`own/worse` is 0 in the first epoch and -1 in the second."""
    cfg = new_run(tmp_path, *SMALL, OWN, "callbacks.checkpoint.monitor=own/worse", f"callbacks.checkpoint.mode={mode}")
    result = train(cfg)
    assert (result["best_step"], result["objective"]) == ((20, 0.0) if mode == "max" else (40, -1.0))
    assert result["own/worse"] == result["objective"]


def test_a_callback_without_its_metric_is_one_sentence() -> None:
    cfg = config("model=mlp", STOP, "~callbacks.early_stopping.monitor")
    with pytest.raises(UserError, match=r"^callbacks\.early_stopping can't be built: .*'monitor'$"):
        make_callbacks(cfg, make_task(cfg))


def test_early_stopping_follows_what_chooses_the_best_epoch(tmp_path: Path) -> None:
    def watched(*words: str) -> tuple[Any, Any]:
        cfg = config("model=mlp", STOP, *words)
        (found,) = [one for one in make_callbacks(cfg, make_task(cfg)) if isinstance(one, EarlyStopping)]
        return found.monitor, found.mode

    assert watched() == ("val/accuracy", "max")
    assert watched("callbacks.checkpoint.monitor=val/loss") == ("val/loss", "min")
    assert watched("callbacks.checkpoint.monitor=own/x", "callbacks.checkpoint.mode=min") == ("own/x", "min")
    assert watched("callbacks.checkpoint.monitor=val/loss", "callbacks.early_stopping.mode=max") == ("val/loss", "max")
    assert watched("callbacks.checkpoint.monitor=null") == ("val/accuracy", "max")
    named = "callbacks.early_stopping.monitor=val/accuracy"
    assert watched("callbacks.checkpoint.monitor=val/loss", named) == ("val/accuracy", "max")


def test_any_logged_name_stops_early(tmp_path: Path) -> None:
    cfg = new_run(
        tmp_path,
        *SMALL,
        OWN,
        STOP,
        "trainer.max_epochs=9",
        "callbacks.early_stopping.monitor=own/worse",
        "callbacks.early_stopping.mode=max",
        "callbacks.early_stopping.patience=2",
    )
    assert train(cfg)["epochs"] == 3


def test_early_stopping_watches_training_after_the_epoch(tmp_path: Path) -> None:
    cfg = new_run(
        tmp_path,
        *SMALL,
        STOP,
        "trainer.max_epochs=9",
        "callbacks.early_stopping.monitor=train/loss",
        "callbacks.early_stopping.check_on_train_epoch_end=true",
        "callbacks.early_stopping.min_delta=100",
        "callbacks.early_stopping.patience=2",
    )
    assert train(cfg)["epochs"] == 3


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("checkpoint", "an epoch and its validation have not"),
        ("followed", "nothing has"),
        ("early_stopping", "nothing has"),
        ("twice", "nothing has"),
    ],
)
def test_a_name_that_nothing_logs_is_told_after_the_first_validation(tmp_path: Path, part: str, said: str) -> None:
    key = "checkpoint" if part == "followed" else part
    cfg = new_run(
        tmp_path,
        *SMALL,
        OWN,
        *(() if part == "checkpoint" else (STOP,)),
        *(() if part == "twice" else (f"callbacks.{key}.monitor=own/wors", f"callbacks.{key}.mode=max")),
    )
    if part == "twice":
        cfg["callbacks"]["twice"] = {**cfg["callbacks"]["early_stopping"], "monitor": "own/wors", "mode": "max"}
    with pytest.raises(
        UserError, match=rf"^callbacks\.{key}\.monitor=own/wors: {said} reported it.*; did you mean own/worse\?$"
    ):
        train(cfg)
    assert int(rows(Path(cfg["paths"]["run_dir"]))[-1]["step"]) <= 20


def test_a_callback_that_asks_the_task_for_what_it_has_not_is_told(tmp_path: Path) -> None:
    cfg = new_run(tmp_path, *SMALL)
    cfg["callbacks"]["x"] = {"_target_": "lightning.pytorch.callbacks.BackboneFinetuning"}
    with pytest.raises(
        UserError, match=r"^Lightning refuses this run: 'ClassificationTask' object has no attribute 'backbone'"
    ):
        train(cfg)
