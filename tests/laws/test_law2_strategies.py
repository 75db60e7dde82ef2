"""Laws 2 and 4 for every strategy that shards a net: losses as in one process, which reads the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.runs import column, config

from lathe.launch.elastic import run_job
from lathe.runs import rundir
from lathe.verbs.evaluate import evaluate

NETS = {
    "mlp": ("model=mlp", "model.net.width=32", "model.net.depth=5"),
    "resnet": ("model=resnet20", "model.net.width=4", "model.net.depth=14", "data.augment.cutout=2"),
    "vit": ("model=vit_tiny", "model.net.width=32", "model.net.heads=4", "model.net.depth=4"),
    "gpt": ("model=gpt_nano", "data=synthetic_tokens", "model.net.width=32", "model.net.depth=4"),
}
TRAIN = (
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
    "optimizer.lr=0.05",
    "trainer.max_epochs=null",
    "trainer.max_steps=6",
    "trainer.check_val_every_n_epoch=null",
    "trainer.val_check_interval=12",
    "trainer.limit_val_batches=2",
    "trainer.limit_test_batches=2",
    "trainer.log_every_n_steps=1",
    "data.batch_size=32",
    "trainer.gradient_clip_val=0.5",
    "trainer.accumulate_grad_batches=2",
)
TWO = {
    "ddp": list(NETS),
    "fsdp": list(NETS),
    "deepspeed_1": ["mlp", "gpt"],
    "deepspeed_2": list(NETS),
    "deepspeed_3": list(NETS),
    "tensor": ["mlp", "vit", "gpt"],
    "pipeline": list(NETS),
    "3d": list(NETS),
}
FOUR = {
    "3d": [("strategy.data=2", "strategy.stages=2"), ("strategy.tensor=2", "strategy.stages=2", "strategy.data=1")],
    "tensor": [("strategy.data=2", "strategy.tensor=2")],
    "fsdp": [("strategy.replicas=2",)],
}


def _train(folder: Path, processes: int, nets: list[str], *overrides: str) -> dict[str, Path]:
    """Train all nets in one launch; return the run directories by net."""
    cases, directories = [], {}
    for number, net in enumerate(nets):
        cfg = config(*NETS[net], *TRAIN, *overrides, f"trainer.devices={processes}", f"paths.log_dir={folder}")
        directories[net] = rundir.create(folder, cfg, []).path
        cases.append({**cfg, "case": number})
    notes = folder / "notes.jsonl"
    run_job(
        "lathe.verbs.support:run_cases",
        {**cases[0], "cases": cases, "notes": str(notes)},
        processes,
        cases[0]["launch"],
    )
    lines = [json.loads(line) for line in notes.read_text().splitlines()]
    assert [line["refused"] for line in lines if "refused" in line] == [None] * len(nets)
    return directories


def _evaluate_alone(directory: Path) -> dict[str, float]:
    cfg: dict[str, Any] = rundir.open_run(directory, "run").config
    cfg["trainer"]["devices"], cfg["strategy"] = 1, {"_target_": "lathe.strategies.auto"}
    cfg["request"] = {"run": str(directory), "split": "test", "checkpoint": "best", "batch_size": None, "output": None}
    return evaluate(cfg)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return _train(tmp_path_factory.mktemp("alone"), 1, list(NETS))


def _compare(alone: dict[str, Path], spread: dict[str, Path]) -> None:
    for net, directory in spread.items():
        one, several = column(alone[net], "train/loss"), column(directory, "train/loss")
        assert len(one) == 6, net
        assert several == pytest.approx(one, rel=1e-5), net
        result = json.loads((directory / "result.json").read_text())
        for name, value in _evaluate_alone(directory).items():
            assert value == pytest.approx(result[name], rel=1e-5), (net, name)
        reference = json.loads((alone[net] / "result.json").read_text())
        assert result["test/loss"] == pytest.approx(reference["test/loss"], rel=1e-4), net
        assert result["parameters"] == reference["parameters"], net


@pytest.mark.slow
@pytest.mark.parametrize("strategy", TWO)
def test_two_processes_have_the_losses_of_one(tmp_path: Path, alone: dict[str, Path], strategy: str) -> None:
    _compare(alone, _train(tmp_path, 2, TWO[strategy], f"strategy={strategy}"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sizes"), [(strategy, sizes) for strategy, all_sizes in FOUR.items() for sizes in all_sizes]
)
def test_four_processes_have_the_losses_of_one(
    tmp_path: Path, alone: dict[str, Path], strategy: str, sizes: tuple[str, ...]
) -> None:
    _compare(alone, _train(tmp_path, 4, ["gpt"], f"strategy={strategy}", *sizes))
