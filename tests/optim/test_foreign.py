"""Torch's schedulers and optimizers keep their curves, or are refused before training."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, column, config, new_run, rows

from lathe.errors import UserError, refuse
from lathe.runs.build import make_task
from lathe.training.train import train

TORCH = "torch.optim.lr_scheduler."


def with_scheduler(name: str, *keys: str) -> dict[str, Any]:
    """Compose a configuration with a scheduler as a user would enter it."""
    cfg = config("model=mlp", "model.net.width=4", "optimizer.lr=1.0")
    cfg["scheduler"] = {"_target_": name if "." in name else TORCH + name, "_partial_": True}
    for key in keys:
        word, value = key.split("=")
        cfg["scheduler"][word] = config(f"+scheduler.x={value}")["scheduler"]["x"]
    return cfg


def curve(cfg: dict[str, Any], steps: int, total: int) -> list[float]:
    """Return the learning rate of each of `steps` optimizer steps of a run of `total`."""
    from lathe.tasks.scheduler import build_scheduler, wants_length

    task = make_task(cfg)
    optimizer = task._make_optimizer(task.net)
    scheduler = build_scheduler(task._make_scheduler, optimizer, total if wants_length(task._make_scheduler) else None)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    file = io.BytesIO()
    torch.save(scheduler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True).keys() == scheduler.state_dict().keys()
    return rates


@pytest.mark.parametrize(
    ("name", "keys", "rates"),
    [
        ("StepLR", ("step_size=2",), [1, 1, 0.1, 0.1, 0.01]),
        ("ExponentialLR", ("gamma=0.5",), [1, 0.5, 0.25, 0.125, 0.0625]),
        ("MultiStepLR", ("milestones=[1,3]",), [1, 0.1, 0.1, 0.01, 0.01]),
        ("CosineAnnealingLR", ("T_max=4",), [1, 0.8535533906, 0.5, 0.1464466094, 0]),
        ("ConstantLR", ("factor=0.25", "total_iters=2"), [0.25, 0.25, 1, 1, 1]),
        ("PolynomialLR", ("total_iters=4",), [1, 0.75, 0.5, 0.25, 0]),
    ],
)
def test_torchs_schedulers_follow_their_own_curves(name: str, keys: tuple[str, ...], rates: list[float]) -> None:
    assert curve(with_scheduler(name, *keys), 5, 100) == pytest.approx(rates)


def test_a_scheduler_that_is_planned_gets_the_length_of_the_run() -> None:
    rates = curve(with_scheduler("OneCycleLR", "max_lr=2.0", "pct_start=0.5"), 9, 9)
    assert (max(rates), rates.index(max(rates))) == (pytest.approx(2.0, abs=0.1), 4)
    assert rates[-1] < 1e-4


def test_a_run_decays_per_optimizer_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = new_run(tmp_path, *SMALL, "trainer.max_epochs=1", "callbacks.lr_monitor.logging_interval=step")
    cfg["scheduler"] = with_scheduler("StepLR", "step_size=10")["scheduler"]
    train(cfg)
    assert column(Path(cfg["paths"]["run_dir"]), "lr-SGD/decay") == pytest.approx([0.1, 0.1, 0.01, 0.01])
    assert [row["step"] for row in rows(Path(cfg["paths"]["run_dir"])) if row["lr-SGD/decay"]] == [
        "5",
        "10",
        "15",
        "20",
    ]
    assert (
        "StepLR is stepped after every optimizer step: step_size=10 counts steps, not epochs "
        "(interval=epoch counts those)." in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("cfg", "words"),
    [
        (("CosineAnnealingLR",), r"scheduler\._target_=CosineAnnealingLR refused its defaults .*'T_max'"),
        (("StepLR", "step_siz=3"), "did you mean step_size"),
        (("OneCycleLR", "max_lr=1.0", "total_steps=5"), r"scheduler\.total_steps=5 is known from the run"),
        (("torch.optim.SGD",), "expected a scheduler"),
    ],
)
def test_a_scheduler_that_cant_work_is_refused_before_training(cfg: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_task(with_scheduler(*cfg))


def test_clipping_with_a_fused_step_under_float16_is_refused() -> None:
    from lathe.config.validate import check

    words = ("model=mlp", "precision=16-mixed", "optimizer.fused=true")
    with pytest.raises(
        UserError,
        match=r"^optimizer\.fused=true unscales .* trainer\.gradient_clip_val=0\.5: use optimizer\.fused=false",
    ):
        refuse(check(config(*words, "trainer.gradient_clip_val=0.5")))
    refuse(check(config(*words)))
    refuse(check(config(*words, "trainer.gradient_clip_val=0")))
