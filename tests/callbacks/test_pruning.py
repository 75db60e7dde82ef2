"""Sparsity follows its schedule exactly, for every criterion."""

from itertools import combinations
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from support.prune_fit import WEIGHTS, Task, Watch, fit
from torch import Tensor, nn

from lathe.compression.pruning import make_masks
from lathe.compression.pruning.callback import Prune, PruneStructured
from lathe.compression.pruning.masks import SparsitySchedule
from lathe.errors import UserError


@pytest.mark.parametrize("kind", ["cubic", "stepped", "one_shot"])
def test_zeros_follow_the_schedule(kind: Any) -> None:
    prune = Prune(0.7, schedule=kind, start=0.25, end=0.75, every_n_steps=3, initial_sparsity=0.1)
    watch = Watch(prune)
    fit(prune, watch)
    schedule = SparsitySchedule(0.7, kind, 0.1, start=6, end=18, every_n_steps=3)
    expected, now = {}, 0
    for step in range(1, 25):
        now = round(schedule.at(step) * WEIGHTS) if schedule.due(step) else now
        expected[step] = now
    assert watch.zeros == expected
    assert watch.zeros[24] == round(0.7 * WEIGHTS)
    assert watch.ready == list(range(schedule.last, 25))
    assert prune.report()["prune/sparsity"] == pytest.approx(0.7)


def test_magnitude_takes_the_smallest_of_the_net() -> None:
    prune = Prune(0.5, schedule="one_shot", start=0.5)
    watch, dense = Watch(prune), Watch(prune)
    fit(prune, watch)
    fit(dense)
    scores = {name: dense.seen[12][name].abs() for name in ("0.weight", "3.weight")}
    masks = make_masks(scores, 0.5)
    assert all(torch.equal(masks[name], prune.masks[name]) for name in masks)
    assert all(torch.equal(dense.seen[12][name] * masks[name], watch.seen[12][name]) for name in masks)


def test_criteria_choose_differently() -> None:
    masks = []
    for criterion in ("magnitude", "random", "taylor", "movement", "wanda"):
        prune = Prune(0.6, criterion=criterion, start=0.1, end=0.5, schedule="linear", every_n_steps=4)
        fit(prune)
        masks.append(torch.cat([mask.flatten() for mask in prune.masks.values()]))
        assert int((~masks[-1]).sum()) == round(0.6 * WEIGHTS)
    assert not any(torch.equal(*pair) for pair in combinations(masks, 2))


def test_taylor_counts_each_step_since_the_last_update(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []

    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        weight = module.net[0].weight
        seen.append((weight * weight.grad).abs().detach().clone())

    prune = Prune(0.5, criterion="taylor", start=0.25, end=0.75, every_n_steps=6, schedule="linear")
    scores: dict[int, dict[str, Tensor]] = {}
    scores_of = prune.scores

    def copied(net: nn.Module, step: int) -> dict[str, Tensor]:
        scores[step] = {name: score.clone() for name, score in scores_of(net, step).items()}
        return scores[step]

    monkeypatch.setattr(prune, "scores", copied)
    fit(prune, LambdaCallback(on_before_optimizer_step=look))
    torch.testing.assert_close(scores[12]["0.weight"], torch.stack(seen[6:12]).sum(0))
    torch.testing.assert_close(scores[18]["0.weight"], torch.stack(seen[12:18]).sum(0))


def test_wanda_leaves_the_net_and_the_random_numbers_as_they_were() -> None:
    def run(criterion: str) -> Watch:
        prune = Prune(0.5, criterion=criterion, schedule="one_shot", start=0.5)
        watch = Watch(prune)
        torch.manual_seed(3)
        norm = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.Dropout(0.5), nn.Linear(10, 8), nn.Linear(8, 3))
        fit(prune, watch, task=Task(norm))
        return watch

    one, other = run("wanda"), run("magnitude")
    assert all(torch.equal(one.seen[11][name], other.seen[11][name]) for name in one.seen[11])
    assert not torch.equal(one.seen[12]["3.weight"] == 0, other.seen[12]["3.weight"] == 0)


def test_channels_by_the_scale_of_their_batchnorm() -> None:
    net = nn.Sequential(nn.Linear(4, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))
    with torch.no_grad():
        net[1].weight.copy_(torch.arange(1.0, 11.0))
    prune = PruneStructured(0.3, criterion="batchnorm", schedule="one_shot", start=0.0)
    fit(prune, task=Task(net))
    assert prune.masks["0.weight"].any(1).tolist() == [False] * 3 + [True] * 7
    with pytest.raises(UserError, match=r"no BatchNorm of 8 channels follows 3\.weight"):
        fit(PruneStructured(0.3, criterion="batchnorm", exclude=["0"]))
