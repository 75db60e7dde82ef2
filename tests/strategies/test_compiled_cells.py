"""Compiled cells of the table of what works together: no graph is given up, and none is made twice."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.commands import check, run
from torch import nn

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
    assert "after the first optimizer step: none; cells without any graph: none." in told


def test_graphs_after_the_first_step_are_counted() -> None:
    """Also in the first of the batches that are added up for the second step."""
    torch.compiler.reset()
    graphs: Any = Graphs()
    net = torch.compile(nn.Linear(3, 2), backend="eager", dynamic=False)
    for sizes, made, anew in (((4, 4, 5, 6), 3, 2), ((7, 7, 7, 7), 1, 0), ((4, 5, 7, 7), 0, 0)):
        graphs.on_train_start(None, None)
        for batch, size in enumerate(sizes, 1):
            net(torch.zeros(size, 3))
            graphs.on_train_batch_end(SimpleNamespace(global_step=batch // 2), None, None, None, 0)
        assert (Graphs.made, Graphs.anew) == (made, anew)
    torch.compiler.reset()
