"""Distillation in runs: the student's losses, refusals, and a kill or a second process, which change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import seed_everything
from support.distillation import MLP, QUIET, RESNET, TEACHER, distilled, result, run_of, slow
from support.interruptions import Interruption, interruption, same, train_through
from support.ranks import on_ranks
from support.runs import column, new_run, weights

import lathe.training.train
from lathe.compression.distillation import kd
from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.runs.inference import open_run_net
from lathe.runs.instantiate import instantiate
from lathe.training import trainer_setup

__all__ = ["interruption"]  # a fixture


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    GlobalHydra.instance().clear()
    return run_of(tmp_path_factory.mktemp("teacher"), *TEACHER)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    GlobalHydra.instance().clear()
    better = ("model.net.width=8", "model.net.depth=14", "trainer.max_epochs=4", "trainer.limit_train_batches=16")
    return run_of(tmp_path_factory.mktemp("resnet"), *RESNET, *better, "optimizer.lr=0.05")


def test_the_loss_is_the_share_of_the_labels_and_of_the_teacher(tmp_path: Path, teacher: Path) -> None:
    cfg = new_run(tmp_path, *QUIET, *MLP, *distilled(teacher, "alpha=0.7", "temperature=3.0"))
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    seed_everything(cfg["seed"], verbose=False)
    datamodule, task = instantiate(cfg["data"], "data"), make_task(cfg)
    datamodule.setup("fit")
    x, y = next(iter(datamodule.train_dataloader()))
    logits = task.net(x)
    soft = kd(logits, open_run_net(teacher)[0].net(x), 3.0)
    hard = torch.nn.functional.cross_entropy(logits, y)
    assert column(run, "train/hard_loss")[0] == pytest.approx(0.3 * hard.item(), rel=1e-5)
    assert column(run, "train/soft_loss")[0] == pytest.approx(0.7 * soft.item(), rel=1e-5)
    for hard_part, soft_part, loss in zip(
        *(column(run, f"train/{name}_loss".replace("/_", "/")) for name in ("hard", "soft", "")), strict=True
    ):
        assert hard_part + soft_part == pytest.approx(loss, rel=1e-5)
    assert set(weights(run)) == set(task.net.state_dict()), "the teacher is in no checkpoint"
    assert result(run)["distill/teacher_accuracy"] == pytest.approx(result(teacher)["val/accuracy"])
    assert column(run, "distill/teacher_accuracy") == [pytest.approx(result(teacher)["val/accuracy"])]


def test_a_teacher_of_other_classes_is_refused(tmp_path: Path, teacher: Path) -> None:
    small = ("data=synthetic", "data.num_classes=4", "data.image_size=8", "data.source.train_size=200")
    other = run_of(tmp_path / "other", *MLP, *small, "trainer.max_epochs=1")
    with pytest.raises(UserError, match=r"gives outputs of shape \[4\] and the student \[10\]"):
        run_of(tmp_path, *MLP, *distilled(other))


@pytest.mark.parametrize("method", ["fitnets", slow("dkd+dist"), slow("crd"), slow("kd+attention+rkd")])
def test_every_method_pulls_the_student_to_its_teacher(tmp_path: Path, resnet: Path, method: str) -> None:
    method_options = distilled(resnet, f"method={method}", "crd_queue=0")
    run = run_of(tmp_path, *RESNET, "trainer.max_epochs=3", "optimizer.lr=0.02", *method_options)
    soft = column(run, "train/soft_loss")
    assert len(soft) == 24
    assert sum(soft[-3:]) < 0.9 * sum(soft[:3])


def test_several_teachers_share_the_term(tmp_path: Path, teacher: Path, resnet: Path) -> None:
    teachers = distilled(f"[{teacher},{resnet}]", "teacher_weights=[3,1]", "alpha=0.5")
    cfg = new_run(tmp_path, *QUIET, *MLP, "trainer.max_epochs=1", "trainer.limit_train_batches=3", *teachers)
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    seed_everything(cfg["seed"], verbose=False)
    datamodule, task = instantiate(cfg["data"], "data"), make_task(cfg)
    datamodule.setup("fit")
    x, _ = next(iter(datamodule.train_dataloader()))
    terms = [kd(task.net(x), open_run_net(path)[0].net(x), 4.0).item() for path in (teacher, resnet)]
    assert column(run, "train/soft_loss")[0] == pytest.approx(0.5 * (0.75 * terms[0] + 0.25 * terms[1]), rel=1e-4)
    assert {"distill/teacher1_accuracy", "distill/teacher2_accuracy"} <= set(result(run))


def test_a_cache_answers_what_came_before(tmp_path: Path, teacher: Path) -> None:
    plain = run_of(tmp_path / "plain", *MLP, *distilled(teacher))
    cached = run_of(tmp_path / "cached", *MLP, *distilled(teacher, "cache=4"))
    assert column(cached, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-5)
    augmented = (*MLP, "trainer.max_epochs=3", "data.augment.mixup=0.5")
    with pytest.warns(UserWarning, match=r"cache answered no batch: none of 2600 inputs came twice"):
        mixed = run_of(tmp_path / "augmented", *augmented, *distilled(teacher, "method=dkd", "cache=4"))
    assert all(0 < value < 100 for value in column(mixed, "train/soft_loss"))


def test_language_models_are_taught_token_by_token(tmp_path: Path) -> None:
    options = (
        *("data=synthetic_tokens", "data.length=16", "data.batch_size=32", "data.source.train_size=256"),
        *("data.source.val_size=64", "data.source.test_size=64"),
        *("model=gpt_nano", "model.net.width=16", "model.net.depth=1", "optimizer=adamw", "optimizer.lr=0.01"),
    )
    big = run_of(tmp_path / "big", *options, "model.net.width=32", "trainer.max_epochs=3")
    run = run_of(tmp_path, *options, "trainer.max_epochs=3", *distilled(big))
    soft = column(run, "train/soft_loss")
    assert soft[-1] < 0.7 * soft[0]
    assert result(run)["distill/teacher_loss"] == pytest.approx(result(big)["val/loss"], rel=1e-5)


def test_outside_its_window_the_task_is_left_alone(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = new_run(tmp_path, *QUIET, *MLP, *distilled(teacher, "method=kd+rkd"))
    make_methods = trainer_setup.make_methods

    def second_half(cfg: dict[str, Any]) -> Any:
        methods = make_methods(cfg)
        for method in methods:
            method.window = (0.5, 0.75)
        return methods

    monkeypatch.setattr(trainer_setup, "make_methods", second_half)
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    plain = run_of(tmp_path / "plain", *MLP)
    assert column(run, "train/loss")[:13] == column(plain, "train/loss")[:13]
    assert column(run, "train/loss")[13] != column(plain, "train/loss")[13]
    assert len(column(run, "train/soft_loss")) == 20 - 13


@pytest.mark.slow
def test_features_come_out_of_a_compiled_net(tmp_path: Path, resnet: Path) -> None:
    features = distilled(resnet, "method=attention+fitnets+rkd", "weight=1")
    settings = (*RESNET, "trainer.limit_train_batches=3", *features)
    eager = run_of(tmp_path / "eager", *settings)
    compiled = run_of(tmp_path / "compiled", *settings, "compile=default", "compile.backend=aot_eager")
    assert column(compiled, "train/soft_loss") == pytest.approx(column(eager, "train/soft_loss"), rel=1e-4)


def state_of(run: Path) -> Any:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["callbacks"]["Distill"]


@pytest.mark.law3
def test_a_death_changes_nothing(tmp_path: Path, teacher: Path, interruption: Interruption) -> None:
    """The connectors and the queue of crd are restored too."""
    options = (*MLP, "callbacks.checkpoint.every_n_train_steps=3", "model.net.dropout=0.1", "trainer.max_epochs=1")
    method = distilled(teacher, "weight=0.1", "method=kd+crd", "crd_queue=150")

    def trained(name: str, deaths: list[tuple[str, int]]) -> Path:
        return train_through(new_run(tmp_path / name, *QUIET, *options, *method), deaths, interruption)

    alone, again = trained("alone", []), trained("dies", [("on_train_batch_start", 8)])
    assert interruption.hook == "", "the death has to happen, or the test shows nothing"
    same(alone, again)
    torch.testing.assert_close(state_of(again), state_of(alone), rtol=0, atol=0)


@pytest.mark.law3
def test_the_ema_teacher_is_the_average_of_the_student(tmp_path: Path) -> None:
    """A decay of 0 copies the weights after each step."""
    settings = ("trainer.max_epochs=1", "trainer.limit_train_batches=2", *distilled("ema", "ema_decay=0.0"))
    run = run_of(tmp_path, *MLP, *settings)
    average = state_of(run)["average"]
    assert average["updates"] == 2
    assert all(torch.equal(value, weights(run)[name]) for name, value in average["average"].items())


def _train(rank: int, cfg: dict[str, Any]) -> dict[str, Any]:
    lathe.training.train.train(cfg)
    return {}


@pytest.mark.law3
def test_two_processes_have_the_losses_of_one(tmp_path: Path, teacher: Path) -> None:
    options = (
        *(*MLP, "trainer.max_epochs=1", "trainer.limit_train_batches=8", "optimizer.lr=0.02"),
        "trainer.accumulate_grad_batches=2",
        *distilled(teacher, "method=kd+fitnets", "weight=0.5"),
    )
    cfg = new_run(tmp_path / "two", *QUIET, *options, "strategy=ddp", "trainer.devices=2")
    on_ranks(_train, cfg)
    two = Path(cfg["paths"]["run_dir"])
    one = run_of(tmp_path / "one", *options)
    for name in ("train/loss", "train/hard_loss", "train/soft_loss"):
        assert column(two, name) == pytest.approx(column(one, name), rel=1e-4), name
    assert len(state_of(two)["sums"]) == 2
    expected, connectors = (state_of(run)["comparisons"][0]["connectors"] for run in (one, two))
    torch.testing.assert_close(connectors, expected)
