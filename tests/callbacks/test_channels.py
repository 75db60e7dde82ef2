"""Channels fade and are removed without changing outputs; interruptions and ranks have no effect."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback
from support.channel_fit import Data, fit, task
from support.net_state import assert_same, copy_of
from support.ranks import on_ranks
from support.tiny import save_after
from torch import nn

from lathe.callbacks.ema import EMA
from lathe.compression.channels import removal
from lathe.compression.channels.callback import PruneChannels
from lathe.compression.pruning.callback import Prune
from lathe.compression.structure import apply_structure, structure_of
from lathe.errors import UserError


class Watches(Callback):
    """Records the norm of a removed channel's weights after each step, and whether the method was ready."""

    def __init__(self, method: PruneChannels) -> None:
        self.method, self.sizes, self.ready = method, [], []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        group = "blocks.0.conv1"
        units = (self.method.chosen or {}).get(group, [])
        weight = pl_module.net.get_submodule(group).weight.detach()
        self.sizes.append(float(weight[units].abs().sum()) if units else None)
        self.ready.append(self.method.ready(trainer))


SOON: dict[str, Any] = {"share": 0.4, "start": 0.25, "end": 0.75, "min_channels": 1}
IMAGES = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(2))


def test_channels_fade_fall_silent_and_go_without_a_trace():
    method = PruneChannels(**SOON)
    watch = Watches(method)
    net = fit(method, watch).net.eval()
    assert [size is None for size in watch.sizes] == [True] * 2 + [False] * 10
    assert watch.sizes[2] > watch.sizes[5] > watch.sizes[7] > 0
    assert watch.sizes[8:] == [0.0] * 4
    assert watch.ready == [False] * 8 + [True] * 4
    expected, before = net(IMAGES), sum(p.numel() for p in net.parameters())
    assert method.finalise(net, Data())
    torch.testing.assert_close(net(IMAGES), expected, rtol=1e-5, atol=1e-5)
    assert method.report()["prune_channels/parameters_share"] == sum(p.numel() for p in net.parameters()) / before
    assert 0.3 < method.report()["prune_channels/macs_share"] <= 0.4
    fresh = task().net.eval()
    apply_structure(fresh, structure_of(net))
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(IMAGES), net(IMAGES))


def test_a_resumed_run_ends_bit_for_bit_the_same(tmp_path):
    options = {**SOON, "importance": "taylor", "regularise": "group_norm", "strength": 0.01}
    first, again = PruneChannels(**options), PruneChannels(**options)
    whole = fit(first, save_after(2, tmp_path / "a.ckpt"))
    resumed = fit(again, resume=tmp_path / "a.ckpt")
    assert again.chosen == first.chosen
    assert_same(copy_of(resumed.net), copy_of(whole.net))
    assert again.report() == first.report()


def test_one_shot_gives_the_optimizer_a_smaller_net():
    method = PruneChannels(mode="one_shot", share=0.4, min_channels=1)
    trained = fit(method)
    assert method.ready(trained)
    assert removal.describe(trained.net)
    assert 0.3 < method.report()["prune_channels/macs_share"] <= 0.4
    assert trained.net.conv.weight.shape[0] < 8
    optimized = {id(p) for group in trained.optimizers(use_pl_optimizer=False).param_groups for p in group["params"]}
    assert optimized == {id(p) for p in trained.net.parameters()}
    assert not method.finalise(trained.net, Data())


def test_a_resumed_one_shot_run_ends_the_same(tmp_path):
    first, again = (PruneChannels(mode="one_shot", share=0.4, importance="taylor") for _ in range(2))
    whole, module = fit(first, save_after(6, tmp_path / "a.ckpt")), task()
    apply_structure(module.net, structure_of(whole.net))  # as run.py does
    assert_same(copy_of(fit(again, module=module, resume=tmp_path / "a.ckpt").net), copy_of(whole.net))
    assert again.report() == first.report()


def test_a_net_that_has_lost_channels_before_can_lose_more_but_not_silently_none():
    module = fit(PruneChannels(mode="one_shot", share=0.6, min_channels=1))
    before = sum(p.numel() for p in module.net.parameters())
    with pytest.raises(UserError, match=r"mode=one_shot finds a net that has lost channels before: use mode=gradual"):
        fit(PruneChannels(mode="one_shot", share=0.6), module=copy.deepcopy(module))
    method = PruneChannels(share=0.6, min_channels=1)
    module = fit(method, module=module)
    assert method.finalise(module.net, Data())
    assert sum(p.numel() for p in module.net.parameters()) < before
    apply_structure(fresh := task().net, structure_of(module.net))
    fresh.load_state_dict(module.net.state_dict())


@pytest.mark.slow
def test_the_average_falls_silent_too():
    method, average = PruneChannels(**SOON), EMA(decay=0.9, warmup=False)
    net = fit(method, average).net.eval()
    expected = net(IMAGES)
    assert method.finalise(net, Data())
    torch.testing.assert_close(net(IMAGES), expected, rtol=1e-5, atol=1e-5)


def on_a_rank(rank: int, strategy: str, mode: str, path: str) -> list[Any]:
    """Return the units and full weights of a whole run and of one resumed after step 4."""
    from lathe.strategies import DDP
    from lathe.strategies.fsdp import FSDP

    options = {**SOON, "mode": mode, "importance": "taylor"}
    runs = []
    for resumes in (False, True):
        method, module, data = PruneChannels(**options), task(), Data(rank, 2)
        made: dict[str, Any] = {"devices": 2, "strategy": DDP() if strategy == "ddp" else FSDP(), "data": data}
        if resumes:
            apply_structure(module.net, torch.load(path, weights_only=True).get("structure", {}))
            fit(method, module=module, resume=path, **made)
        else:
            fit(method, save_after(4, Path(path)), module=module, **made)
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in module.net.named_parameters()}
        runs.append((method.chosen, {name: weight.detach().clone() for name, weight in weights.items()}))
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mode"), [("ddp", "one_shot"), ("fsdp", "one_shot"), ("fsdp", "gradual")])
def test_all_ranks_remove_the_same_and_resume(tmp_path, strategy, mode):
    first, second = on_ranks(on_a_rank, strategy, mode, str(tmp_path / "a.ckpt"))
    (units, weights), (units_resumed, resumed) = first
    assert units == units_resumed == second[0][0]
    for others in (resumed, second[0][1], second[1][1]):
        assert_same(others, weights)
    if mode == "gradual":
        assert not weights["blocks.0.conv1.weight"][units["blocks.0.conv1"]].any()
    else:
        assert weights["conv.weight"].shape[0] < 8


def test_masks_count_what_remains(tmp_path):
    masks: dict[str, Any] = {"sparsity": 0.6, "granularity": "structured", "scope": "layer"}
    removal, prune = PruneChannels(**SOON), Prune(**masks)
    net = fit(removal, prune, save_after(6, tmp_path / "a.ckpt")).net
    report = prune.report()
    assert removal.finalise(net, Data())
    masked = [p for name, p in net.named_parameters() if name in prune.masks]
    zeros, size = sum(int((p == 0).sum()) for p in masked), sum(p.numel() for p in masked)
    assert report["prune/sparsity"] == zeros / size
    assert report["prune/sparsity_net"] == zeros / sum(p.numel() for p in net.parameters())
    assert abs(zeros / size - 0.6) < 0.1
    again, masked = PruneChannels(**SOON), Prune(**masks)
    resumed = fit(again, masked, resume=tmp_path / "a.ckpt").net
    again.finalise(resumed, Data())
    assert_same(copy_of(resumed), copy_of(net))


def test_a_step_that_overflows_decides_nothing():
    method = PruneChannels(**SOON, importance="taylor")

    def overflow(trainer: Any, module: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            module.net.conv.weight.grad.fill_(torch.inf)

    def skip(trainer: Any, module: Any, optimizer: Any) -> None:  # as a gradient scaler does
        if trainer.global_step == 1:
            assert all(bool(change.isfinite().all()) for change in method._sensitivity.values())
            optimizer.zero_grad()

    before, after = (LambdaCallback(on_before_optimizer_step=hook) for hook in (overflow, skip))
    fit(before, method, after)
    assert method.chosen


def test_one_shot_estimates_batchnorm_statistics_again():
    seen = {}
    looks = LambdaCallback(on_fit_start=lambda trainer, module: seen.update(copy_of(module.net)))
    fit(PruneChannels(mode="one_shot", share=0.5), looks)
    inputs = torch.stack([x for x, _ in Data().batches])
    weight = seen["conv.weight"]
    means = torch.stack([nn.functional.conv2d(x, weight, padding=1).mean((0, 2, 3)) for x in inputs]).mean(0)
    torch.testing.assert_close(seen["bn.running_mean"], means, rtol=1e-4, atol=1e-5)
