"""Horovod's averages equal one process. Without Horovod, these tests use torch's collectives."""

import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.commands import check, environment, run
from support.ranks import on_ranks
from support.runs import ROOT, SMALL, column, new_run, runs, weights
from torch import Tensor, nn

from lathe.contrib.horovod import Horovod
from lathe.errors import UserError

HERE = importlib.util.find_spec("horovod") is not None
HOROVODRUN = shutil.which("horovodrun", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
COMMON = (
    *SMALL,
    "trainer.gradient_clip_val=0.5",
    "trainer.accumulate_grad_batches=3",
    "trainer.log_every_n_steps=1",
    "data.batch_size=128",
    "trainer.max_epochs=1",
)


def stand_in(rank: int) -> ModuleType:
    """Build the used functions of horovod.torch from torch's collectives."""
    package, hvd = ModuleType("horovod"), ModuleType("horovod.torch")
    package.__spec__ = importlib.machinery.ModuleSpec("horovod", None, is_package=True)
    package.__path__ = []
    package.torch = hvd

    waiting: dict[str, tuple[Tensor, str]] = {}

    def start(tensor: Tensor, name: str, op: str) -> str:
        assert tensor.is_contiguous()  # as Horovod requires
        waiting[name] = (tensor, op)
        return name

    def synchronize(name: str) -> None:
        """Reduce tensors that all ranks wait for, in any order as Horovod does, until `name` is among them."""
        while name in waiting:
            names: list[Any] = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(names, set(waiting))
            for common in sorted(set.intersection(*names)):
                tensor, op = waiting.pop(common)
                torch.distributed.all_reduce(tensor)
                if op == "average":
                    tensor.div_(len(names))

    hvd.__dict__.update(
        Average="average",
        init=lambda: None,
        is_initialized=lambda: False,
        rank=lambda: rank,
        synchronize=synchronize,
        size=torch.distributed.get_world_size,
        allreduce_async_=start,
    )
    sys.modules.update({"horovod": package, "horovod.torch": hvd})
    os.environ["HOROVOD_RANK"] = str(rank)
    return hvd


def train_all(rank: int, cases: list[dict[str, Any]]) -> None:
    from lathe.training.train import train

    stand_in(rank)
    for cfg in cases:
        train(cfg)


def losses(cfg: dict[str, Any]) -> list[float]:
    return column(Path(cfg["paths"]["run_dir"]), "train/loss")


@pytest.mark.slow
def test_losses_are_those_of_one_process(tmp_path: Path) -> None:
    one, two = new_run(tmp_path, *COMMON), new_run(tmp_path, *COMMON, "strategy=horovod", "trainer.devices=2")
    on_ranks(train_all, [one], world=1)
    on_ranks(train_all, [two])
    assert len(losses(one)) >= 4
    assert losses(two) == pytest.approx(losses(one), rel=1e-5)
    theirs = weights(Path(one["paths"]["run_dir"]))
    for name, value in weights(Path(two["paths"]["run_dir"])).items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6)


class Branches(nn.Module):
    """Only the rank of its number uses `mine`, no rank `never`, only the first batch of a window `early`."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = nn.ParameterList([nn.Parameter(torch.ones(2)) for _ in range(2)])
        self.never, self.early = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        self.turned = nn.Parameter(torch.ones(2, 3).T)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


def gradients(rank: int) -> dict[str, Tensor | None]:
    stand_in(rank)
    strategy, net = Horovod(), Branches()
    strategy.model = net
    strategy.configure_ddp()

    def backward(loss: Tensor) -> None:
        strategy.pre_backward(loss)
        loss.backward()
        strategy.post_backward(loss)

    with strategy.block_backward_sync():
        backward(net.early.sum() * (1 + 2 * rank))
    early = net.early.grad
    assert early is not None
    assert early.tolist() == [1 + 2 * rank] * 2, "averaged only when the step is due"
    scale = torch.arange(6.0).view(3, 2) * (1 + rank)
    backward(4 * net.mine[rank].sum() + (net.turned * scale).sum())
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def test_parameters_that_not_every_rank_used() -> None:
    first, second = on_ranks(gradients)
    for found in (first, second):
        assert found["never"] is None
        assert found["frozen"] is None
        assert found["early"].tolist() == [2.0, 2.0]
        assert found["mine.0"].tolist() == found["mine.1"].tolist() == [2.0, 2.0]
        assert found["turned"].tolist() == (torch.arange(6.0).view(3, 2) * 1.5).tolist()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r"^strategy=horovod needs Horovod: build it with bash scripts/install_horovod\.sh\.$"
    ):
        Horovod()


@pytest.mark.slow
@pytest.mark.skipif(not HERE, reason="Horovod is not installed: scripts/install_horovod.sh")
def test_the_real_one_under_horovodrun(tmp_path: Path) -> None:
    """The losses of one process, in one run directory whose checkpoint one process evaluates."""
    assert HOROVODRUN is not None
    arguments = (*COMMON, f"paths.log_dir={tmp_path / 'two'}", "strategy=horovod", "trainer.devices=2")
    command = [HOROVODRUN, "-np", "2", "--gloo", sys.executable, str(ROOT / "train.py"), *arguments]
    env = environment(PATH=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    check(subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240))
    check(run(*COMMON, f"paths.log_dir={tmp_path / 'one'}", cwd=tmp_path))
    (two,), (one,) = runs(tmp_path / "two"), runs(tmp_path / "one")
    assert column(two, "train/loss") == pytest.approx(column(one, "train/loss"), rel=1e-5)
    result = json.loads((two / "result.json").read_text())
    assert result["devices"] == 2
    metrics = tmp_path / "figures.json"
    check(run(f"run={two}", f"output={metrics}", "trainer.accelerator=cpu", script="scripts/evaluate.py", cwd=tmp_path))
    assert json.loads(metrics.read_text())["test/loss"] == pytest.approx(result["test/loss"], rel=1e-6)
