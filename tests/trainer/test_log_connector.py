"""A user's own `self.log`: rows at the optimizer's steps, the same in an interrupted run, and fit to be monitored."""

from pathlib import Path
from typing import Any

import pytest
from support.interruptions import Interruption, interruption, same, train_through
from support.runs import SMALL, new_run, rows

from lathe import trust
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture

OWN = (
    "task._target_=support.own_parts.Logging",
    "+callbacks.own._target_=support.own_parts.Note",
    "logger=tensorboard",
)


@pytest.fixture(autouse=True)
def _trusted() -> None:
    """What `trusted=[own_parts]` on the command line does."""
    trust.allow({"trusted": ["support.own_parts"]})


def run_of(cfg: dict[str, Any]) -> Path:
    return Path(cfg["paths"]["run_dir"])


def points(run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars of the TensorBoard files but the final result, which metrics.csv has not."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    names = [name for name in events.Tags()["scalars"] if not name.startswith("result/")]
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_value_is_in_the_row_of_its_optimizer_step(tmp_path: Path, accumulate: int) -> None:
    options = (
        "trainer.log_every_n_steps=2",
        "trainer.val_check_interval=0.5",
        "scheduler=step",
        "scheduler.milestones=[3]",
        f"trainer.accumulate_grad_batches={accumulate}",
        "callbacks.throughput=null",
    )
    cfg = new_run(tmp_path, *SMALL, *OWN, *options)
    train(cfg)
    lines = rows(run_of(cfg))
    steps = [int(line["step"]) for line in lines]
    assert steps == sorted(set(steps))
    batches = 1300 // 64
    total = 2 * -(-batches // accumulate)
    logged = [line for line in lines if line["own/step"]]
    assert [int(line["step"]) for line in logged] == list(range(2, total + 1, 2))
    for line in logged:
        step = int(line["step"])
        assert float(line["own/step"]) == float(line["own/note"]) == step
        assert float(line["lr-SGD/decay"]) == pytest.approx(0.1 if step <= 3 else 0.01)
        assert line["train/loss"]
        assert line["own/both_step"]
    validated = [int(line["step"]) for line in lines if line["val/loss"]]
    assert validated == [int(line["step"]) for line in lines if line["own/batches"]]
    assert len(validated) == 4
    ends = [line for line in lines if line["own/both_epoch"]]
    assert [int(line["step"]) for line in ends] == [total // 2, total]
    for line in ends:
        assert float(line["own/both_epoch"]) == pytest.approx(float(line["train/loss_epoch"]), rel=1e-5)
        assert float(line["own/seen"]) == pytest.approx(float(line["train/loss_epoch"]), rel=1e-5)
    assert [int(line["epoch"]) for line in lines] == [int(step > total // 2) for step in steps]
    assert lines[-1]["test/loss"]
    for name, found in points(run_of(cfg)).items():
        if name not in ("epoch", "own/each_step"):  # of each write, and of each batch of a validation
            assert [step for step, _ in found] == [int(line["step"]) for line in lines if line[name]], name


@pytest.mark.parametrize(
    ("hook", "step", "options"),
    [
        ("on_train_batch_start", 6, ("callbacks.checkpoint.every_n_train_steps=5", "trainer.val_check_interval=0.5")),
        ("on_validation_start", 10, ("callbacks.checkpoint.every_n_train_steps=4",)),
    ],
)
def test_an_interrupted_run_writes_the_same_rows(
    tmp_path: Path, interruption: Interruption, hook: str, step: int, options: tuple[str, ...]
) -> None:
    options = (*SMALL, *OWN, "data.batch_size=128", "callbacks.throughput=null", *options)  # ten steps an epoch
    whole = train_through(new_run(tmp_path / "whole", *options), [], interruption)
    cut = train_through(new_run(tmp_path / "cut", *options), [(hook, step)], interruption)
    assert interruption.hook == ""
    same(cut, whole)
    scalars = [{name: sorted(values) for name, values in points(run).items()} for run in (cut, whole)]
    assert scalars[0] == scalars[1]
