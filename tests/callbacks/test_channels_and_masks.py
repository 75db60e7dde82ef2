"""Removal of channels beside masks, in stages, sharded, and under gradients that overflow."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.channel_fit import Data, Saves, fit, task
from support.net_state import assert_same, copy_of
from support.ranks import on_ranks

from lathe.callbacks.methods.channels import PruneChannels
from lathe.callbacks.methods.pruning import Prune
from lathe.callbacks.methods.pruning_patterns import PruneNM
from lathe.callbacks.methods.rigl import RigL
from lathe.compression.structure import apply_structure
from lathe.errors import UserError


def resumed_on_a_rank(rank: int, mode: str, path: str) -> Any:
    from lathe.strategies.fsdp import FSDP

    options: dict[str, Any] = {"mode": mode, "share": 0.4, "start": 0.25, "end": 0.75, "min_channels": 1}
    whole = fit(PruneChannels(**options), Saves(Path(path), 4), data=Data(rank, 2), devices=2, strategy=FSDP())
    apply_structure((module := task()).net, torch.load(path, weights_only=True).get("structure", {}))
    again = fit(PruneChannels(**options), module=module, data=Data(rank, 2), resume=path, devices=2, strategy=FSDP())
    return [
        {name: p.full_tensor().detach().clone() for name, p in run.net.named_parameters()} for run in (whole, again)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["gradual", "one_shot"])
def test_a_sharded_run_resumes(tmp_path, mode):
    for whole, again in on_ranks(resumed_on_a_rank, mode, str(tmp_path / "a.ckpt")):
        assert_same(again, whole)


@pytest.mark.parametrize("granularity", ["unstructured", "structured"])
def test_masks_count_what_remains(tmp_path, granularity):
    options: dict[str, Any] = {"share": 0.4, "start": 0.25, "end": 0.75, "min_channels": 1}
    masks: dict[str, Any] = {
        "sparsity": 0.6,
        "granularity": granularity,
        "scope": "layer" if granularity == "structured" else "global",
    }
    removal, prune = PruneChannels(**options), Prune(**masks)
    net = fit(removal, prune, Saves(tmp_path / "a.ckpt", 6)).net
    told = prune.report()
    assert removal.finalise(net, Data())
    left = {name: p for name, p in net.named_parameters() if name in prune.masks}
    zeros, size = sum(int((p == 0).sum()) for p in left.values()), sum(p.numel() for p in left.values())
    assert told["prune/sparsity"] == zeros / size
    assert told["prune/sparsity_net"] == zeros / sum(p.numel() for p in net.parameters())
    assert abs(zeros / size - 0.6) < (0.5 / size if granularity == "unstructured" else 0.1)
    again, masked = PruneChannels(**options), Prune(**masks)
    resumed = fit(again, masked, resume=tmp_path / "a.ckpt").net
    again.finalise(resumed, Data())
    assert_same(copy_of(resumed), copy_of(net))


@pytest.mark.parametrize("method", [PruneNM, RigL])
def test_masks_that_removal_would_break_up_are_refused(method):
    with pytest.raises(
        UserError, match=r"lays its masks on channels that go after training.*mode=one_shot, or two runs\.$"
    ):
        fit(PruneChannels(), method())


def test_a_step_that_overflows_decides_nothing():
    method = PruneChannels(share=0.4, min_channels=1, importance="taylor", start=0.25, end=0.75)

    class Overflows(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                pl_module.net.conv.weight.grad.fill_(torch.inf)

    class Skips(Callback):  # as a gradient scaler does
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            if trainer.global_step == 1:
                assert all(bool(change.isfinite().all()) for change in method._sensitivity.values())
                optimizer.zero_grad()

    fit(Overflows(), method, Skips())
    assert method.chosen
