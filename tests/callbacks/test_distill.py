"""Distillation in runs: what the student is trained on, and what is refused."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from lightning.pytorch import seed_everything
from support.distillation import MLP, QUIET, RESNET, TEACHER, distilled, result, run_of, slow
from support.runs import column, new_run, weights

import lathe.training.train
from lathe.callbacks.methods.distill import Distill
from lathe.compression.distillation import kd
from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.runs.inference import open_net
from lathe.runs.instantiate import instantiate
from lathe.training import callbacks_and_loggers


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    GlobalHydra.instance().clear()
    return run_of(tmp_path_factory.mktemp("teacher"), *TEACHER)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    GlobalHydra.instance().clear()
    better = (
        "model.net.width=8",
        "model.net.depth=14",
        "trainer.max_epochs=4",
        "trainer.limit_train_batches=16",
        "optimizer.lr=0.05",
    )
    return run_of(tmp_path_factory.mktemp("resnet"), *RESNET, *better)


def test_the_loss_is_the_share_of_the_labels_and_of_the_teacher(tmp_path: Path, teacher: Path) -> None:
    cfg = new_run(tmp_path, *QUIET, *MLP, *distilled(teacher, "alpha=0.7", "temperature=3.0"))
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    seed_everything(cfg["seed"], verbose=False)
    datamodule, task = instantiate(cfg["data"], "data"), make_task(cfg)
    datamodule.setup("fit")
    x, y = next(iter(datamodule.train_dataloader()))
    logits = task.net(x)
    soft = kd(logits, open_net(teacher)(x), 3.0)
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


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("method=hinton",), "compression.distill.method=hinton: "),
        (("method=kd+kd",), "compression.distill.method=kd+kd: name one method or several different ones"),
        (
            ("cache=4", "method=rkd"),
            "compression.distill.cache=4 keeps logits alone, and rkd needs layers: set cache=0.",
        ),
        (("cache=4", "teacher=ema"), "compression.distill.cache=4 keeps answers of a teacher that stays as it is"),
        (("teacher=null",), "compression.distill.teacher=None names no teacher"),
        (("teacher=[a,ema]",), "compression.distill.teacher=['a', 'ema']: ema teaches alone"),
        (("teacher=3",), "compression.distill.teacher=3 is no teacher"),
        (("teacher={weights: a}",), "compression.distill.teacher has the keys weights: a net needs net"),
        (("teacher_weights=[1,2]",), "compression.distill.teacher_weights=[1, 2]: give 1 numbers above 0"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: tuple[str, ...], sentence: str) -> None:
    cfg = new_run(tmp_path, *QUIET, *MLP, *distilled("a", *settings))
    with pytest.raises(UserError) as caught:
        callbacks_and_loggers.make_methods(cfg)
    assert str(caught.value).startswith(sentence)


def test_teachers_that_do_not_fit(tmp_path: Path, teacher: Path) -> None:
    other = run_of(
        tmp_path / "other",
        *MLP,
        "data=synthetic",
        "data.num_classes=4",
        "data.image_size=8",
        "trainer.max_epochs=1",
        "data.source.train_size=200",
    )
    with pytest.raises(
        UserError, match=r"gives outputs of shape \[4\] and the student \[10\]: take a teacher that was trained"
    ):
        run_of(tmp_path, *MLP, *distilled(other))
    with pytest.raises(UserError, match="no-such-run"):
        run_of(tmp_path, *MLP, *distilled("no-such-run"))
    wide = run_of(tmp_path / "wide", *MLP, "data=synthetic", "trainer.max_epochs=1", "data.source.train_size=200")
    with pytest.raises(UserError, match="can't take this data's inputs of shape"):
        run_of(tmp_path, *MLP, *distilled(wide))


def test_layers_that_can_not_be_compared(tmp_path: Path, resnet: Path) -> None:
    def refused(*settings: str) -> str:
        with pytest.raises(UserError) as caught:
            run_of(tmp_path, *RESNET, *distilled(resnet, *settings))
        return str(caught.value)

    said = refused("method=fitnets", "student_layers=block.*")
    assert said.startswith(
        "compression.distill.student_layers=block.* matches no layer: choose among conv [4, 8, 8], bn [4, 8, 8]"
    )
    said = refused("method=fitnets", "student_layers=blocks.0", "teacher_layers=blocks.5")
    assert said.startswith(
        "compression.distill.student_layers=blocks.0 gives [4, 8, 8], which fitnets can't compare with [32, 2, 2] of "
        "the teacher's blocks.5: choose among the student's blocks.2.conv1 [16, 2, 2]"
    )
    said = refused("method=attention", "student_layers=blocks.0", "teacher_layers=blocks.*.conv1")
    assert "attention compares as many of one as of the other" in said
    said = refused("method=attention", "student_layers=head", "teacher_layers=head")
    assert said.endswith("no layer of the student can; name other teacher_layers.")


METHODS = ["dkd", "fitnets", "crd", *map(slow, ("dist", "attention", "rkd", "kd+attention"))]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_pulls_the_student_to_its_teacher(tmp_path: Path, resnet: Path, method: str) -> None:
    run = run_of(
        tmp_path,
        *RESNET,
        "trainer.max_epochs=3",
        "optimizer.lr=0.02",
        *distilled(resnet, f"method={method}", "crd_queue=0"),
    )
    soft = column(run, "train/soft_loss")
    assert len(soft) == 24
    assert sum(soft[-3:]) < 0.9 * sum(soft[:3])


def test_several_teachers_share_the_term(tmp_path: Path, teacher: Path, resnet: Path) -> None:
    cfg = new_run(
        tmp_path,
        *QUIET,
        *MLP,
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=3",
        *distilled(f"[{teacher},{resnet}]", "teacher_weights=[3,1]", "alpha=0.5"),
    )
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    seed_everything(cfg["seed"], verbose=False)
    datamodule, task = instantiate(cfg["data"], "data"), make_task(cfg)
    datamodule.setup("fit")
    x, _ = next(iter(datamodule.train_dataloader()))
    terms = [kd(task.net(x), open_net(path)(x), 4.0).item() for path in (teacher, resnet)]
    assert column(run, "train/soft_loss")[0] == pytest.approx(0.5 * (0.75 * terms[0] + 0.25 * terms[1]), rel=1e-4)
    assert {"distill/teacher1_accuracy", "distill/teacher2_accuracy"} <= set(result(run))


def test_a_net_with_weights_is_a_teacher(tmp_path: Path, teacher: Path) -> None:
    net = "{_target_: lathe.nets.MLP, width: 32, depth: 2, channels: 1, image_size: 8, num_classes: 10}"
    file = teacher / "checkpoints" / "best.ckpt"
    given = run_of(tmp_path / "a", *MLP, *distilled(f"{{net: {net}, weights: {file}}}"))
    named = run_of(tmp_path / "b", *MLP, *distilled(teacher))
    assert column(given, "train/loss") == column(named, "train/loss")
    narrow = net.replace("32", "16")
    with pytest.raises(
        UserError, match=r"weights=.*does not fit compression.distill.teacher.net \(size mismatch for stem"
    ):
        run_of(tmp_path / "c", *MLP, *distilled(f"{{net: {narrow}, weights: {file}}}"))
    with pytest.raises(UserError, match=r"weights=nothing: there is no such file"):
        run_of(tmp_path / "d", *MLP, *distilled(f"{{net: {net}, weights: nothing}}"))


def test_a_teacher_that_is_no_better_is_told(tmp_path: Path) -> None:
    poor = run_of(tmp_path / "poor", *MLP, "trainer.max_epochs=1", "optimizer.lr=1e-6")
    with pytest.warns(UserWarning, match=r"is no better than its student: val/accuracy is 0\.\d+ of the teacher"):
        run_of(tmp_path, *MLP, "trainer.max_epochs=4", *distilled(poor, "alpha=0.1"))


def test_a_cache_answers_what_came_before(tmp_path: Path, teacher: Path) -> None:
    plain = run_of(tmp_path / "plain", *MLP, *distilled(teacher))
    cached = run_of(tmp_path / "cached", *MLP, *distilled(teacher, "cache=4"))
    assert column(cached, "train/loss") == pytest.approx(column(plain, "train/loss"), rel=1e-5)
    with pytest.warns(UserWarning, match=r"cache: none of 2600 inputs came twice"):
        run_of(
            tmp_path / "augmented",
            *MLP,
            "trainer.max_epochs=3",
            "data.augment.mixup=0.5",
            *distilled(teacher, "cache=4"),
        )


PLAIN = ("data.augment.cutout=0",)  # inputs that come again


def test_a_cache_that_is_too_small_is_told(tmp_path: Path, teacher: Path) -> None:
    # Most of the 1300 inputs' 10 logits of 4 bytes: many rows are known, and no batch as a whole.
    with pytest.warns(UserWarning, match=r"ran for every batch, since the cache holds 1048 inputs' answers") as told:
        run_of(tmp_path, *MLP, *PLAIN, "trainer.max_epochs=4", *distilled(teacher, "cache=0.04"))
    assert sum("compression.distill.cache" in str(warning.message) for warning in told) == 1


def test_a_continued_run_fills_its_cache_before_it_is_judged(tmp_path: Path, teacher: Path) -> None:
    words = (*QUIET, *MLP, *PLAIN, "trainer.max_epochs=6", "trainer.max_steps=45", *distilled(teacher, "cache=4"))
    cfg = new_run(tmp_path, *words)  # 13 steps an epoch: it ends within the fourth
    assert lathe.training.train.train(cfg)["steps"] == 45
    cfg["trainer"]["max_steps"] = -1
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert lathe.training.train.train(cfg)["steps"] > 45
    assert not [warning for warning in told if "compression.distill.cache" in str(warning.message)]


@pytest.mark.parametrize("method", ["dkd", *map(slow, ("kd", "dist", "crd"))])
def test_mixed_images_are_shown_to_the_teacher_as_they_are(tmp_path: Path, teacher: Path, method: str) -> None:
    run = run_of(tmp_path, *MLP, "data.augment.mixup=0.5", *distilled(teacher, f"method={method}"))
    assert all(0 < value < 100 for value in column(run, "train/soft_loss"))


def test_language_models_are_taught_token_by_token(tmp_path: Path) -> None:
    words = (
        "data=synthetic_tokens",
        "model=gpt_nano",
        "model.net.width=16",
        "model.net.depth=2",
        "data.length=16",
        "optimizer=adamw",
        "optimizer.lr=0.01",
        "data.source.train_size=256",
        "data.source.val_size=64",
        "data.source.test_size=64",
        "data.batch_size=32",
    )
    big = run_of(tmp_path / "big", *words, "model.net.width=32", "trainer.max_epochs=3")
    run = run_of(tmp_path, *words, "trainer.max_epochs=3", *distilled(big))
    soft = column(run, "train/soft_loss")
    assert soft[-1] < 0.7 * soft[0]
    assert result(run)["distill/teacher_loss"] == pytest.approx(result(big)["val/loss"], rel=1e-5)


def test_outside_its_window_the_task_is_left_alone(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = new_run(tmp_path, *QUIET, *MLP, *distilled(teacher, "method=kd+rkd"))
    make_methods = callbacks_and_loggers.make_methods

    def second_half(cfg: dict[str, Any]) -> Any:
        made = make_methods(cfg)
        for method in made:
            method.window = (0.5, 0.75)
        return made

    monkeypatch.setattr(callbacks_and_loggers, "make_methods", second_half)
    lathe.training.train.train(cfg)
    run = Path(cfg["paths"]["run_dir"])
    plain = run_of(tmp_path / "plain", *MLP)
    assert column(run, "train/loss")[:13] == column(plain, "train/loss")[:13]
    assert column(run, "train/loss")[13] != column(plain, "train/loss")[13]
    assert len(column(run, "train/soft_loss")) == 20 - 13


@pytest.mark.slow
def test_features_come_out_of_a_compiled_net(tmp_path: Path, resnet: Path) -> None:
    settings = (
        *RESNET,
        "trainer.max_epochs=1",
        "trainer.limit_train_batches=3",
        *distilled(resnet, "method=attention+fitnets+rkd", "weight=1"),
    )
    eager = run_of(tmp_path / "eager", *settings)
    compiled = run_of(tmp_path / "compiled", *settings, "compile=default", "compile.backend=aot_eager")
    assert column(compiled, "train/soft_loss") == pytest.approx(column(eager, "train/soft_loss"), rel=1e-4)


def test_outside_of_a_run_it_says_what_it_lacks() -> None:
    with pytest.raises(UserError, match=r"outside of train\.py set the callback's open_run"):
        Distill("some/run").teachers.open(torch.nn.Linear(1, 1), None)
