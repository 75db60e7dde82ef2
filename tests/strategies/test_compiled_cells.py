"""Compiled cells of the table of what works together: no graph is given up, and none is made twice."""

from pathlib import Path

import pytest
import torch
from support.commands import check, run
from torch import nn
from torch._dynamo.utils import counters

from lathe.callbacks import Graphs


@pytest.mark.slow
def test_one_process_and_ddp_keep_their_graphs(tmp_path: Path) -> None:
    """Captured and differentiated without kernels, which break no graph. fully_shard keeps its hooks out of graphs, as
    the table says.
    """
    words = ("part=plain", "compiles=[default]", "precisions=[32-true]", "inductor=[]", "models=[mlp,resnet,gpt]")
    found = check(run(*words, "strategies=[ddp]", "output=null", script="scripts/support.py", cwd=tmp_path))
    told = " ".join(found.stdout.split())
    assert "6 compiled cells; places where a graph was given up: none;" in told
    assert "after the first optimizer step: none." in told


def test_graphs_behind_the_first_step_are_counted() -> None:
    torch.compiler.reset()
    counters.clear()
    graphs, net = Graphs(), torch.compile(nn.Linear(3, 2), backend="eager", dynamic=False)
    for step, size in enumerate((4, 4, 5, 6), 1):
        net(torch.zeros(size, 3))
        graphs.on_train_batch_end(type("Trainer", (), {"global_step": step}), None, None, None, 0)
    assert Graphs.anew == 2
    torch.compiler.reset()
