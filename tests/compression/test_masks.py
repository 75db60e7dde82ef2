"""Masks: which weights, how many and when; lottery tickets."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lathe.compression.pruning.masks import (
    SparsitySchedule,
    add_gradients,
    apply_masks,
    copy_state,
    head_of,
    input_squares,
    magnitude_masks,
    make_masks,
    maskable,
    random_scores,
    rewind,
    sparsity_of,
    wanda,
)
from lathe.errors import UserError
from lathe.nets import GPT, CifarResNet, ViT


def zeros(masks: dict[str, Tensor]) -> int:
    return sum(int((~mask).sum()) for mask in masks.values())


def test_five_lines_on_any_module() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    masks = magnitude_masks(net, sparsity=0.8)
    apply_masks(net, masks)
    assert list(masks) == ["0.weight", "2.weight"]
    total = 8 * 3 * 9 + 8 * 8 * 9
    assert zeros(masks) == round(0.8 * total)
    assert sum(int((net[i].weight == 0).sum()) for i in (0, 2)) == round(0.8 * total)
    assert (net[4].weight != 0).all()
    assert sparsity_of(masks) == round(0.8 * total) / total


def test_scopes_by_hand() -> None:
    scores = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([[5.0, 6.0, 7.0, 0.5]])}
    everywhere = make_masks(scores, 0.5)
    assert everywhere["a"].tolist() == [[False, False], [False, True]]  # 4 is the best of its layer
    assert everywhere["b"].tolist() == [[True, True, True, False]]
    each = make_masks(scores, 0.5, scope="layer")
    assert each["a"].tolist() == [[False, False], [True, True]]
    assert each["b"].tolist() == [[False, True, True, False]]
    rows = {"a": torch.tensor([[4.0, 3.0, 2.0, 1.0], [10.0, 40.0, 30.0, 20.0]])}
    expected = [[True, True, False, False], [False, True, True, False]]
    assert make_masks(rows, 0.5, scope="output")["a"].tolist() == expected


def test_rows_by_their_norm() -> None:
    # L1 means 1 and 1.2; L2 means sqrt(2) and 1.2: the norms disagree.
    scores = {"a": torch.tensor([[2.0, 0.0], [1.2, 1.2], [3.0, 3.0]])}
    one = make_masks(scores, 1 / 3, granularity="structured", norm=1.0)["a"]
    two = make_masks(scores, 1 / 3, granularity="structured", norm=2.0)["a"]
    assert one.tolist() == [[False, False], [True, True], [True, True]]
    assert two.tolist() == [[True, True], [False, False], [True, True]]


def test_n_of_m_along_the_inputs() -> None:
    scores = {"a": torch.tensor([[1.0, 4.0, 3.0, 2.0, 8.0, 5.0, 6.0, 7.0]])}
    mask = make_masks(scores, 0.5, granularity="n_m", scope="layer")["a"]
    assert mask.tolist() == [[False, True, True, False, True, False, False, True]]
    conv = make_masks({"a": torch.rand(3, 8, 3, 3)}, 0.5, granularity="n_m")["a"]
    assert (conv.reshape(3, 2, 4, 3, 3).sum(2) == 2).all()
    one_of_four = make_masks({"a": torch.rand(6, 16)}, 0.75, granularity="n_m", n=1)["a"]
    assert (one_of_four.reshape(6, 4, 4).sum(2) == 1).all()


def test_blocks() -> None:
    weight = torch.zeros(4, 4)
    weight[:2, 2:] = 1
    weight[2:, :2] = 2
    mask = make_masks({"a": weight}, 0.5, granularity="block", block=(2, 2))["a"]
    assert torch.equal(mask, weight > 0)
    conv = make_masks({"a": torch.rand(8, 2, 3, 3)}, 0.5, granularity="block", block=(4, 9))["a"]
    tiles = conv.reshape(2, 4, 2, 9).sum((1, 3))
    assert sorted(tiles.flatten().tolist()) == [0, 0, 36, 36]


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("granularity", ["unstructured", "structured", "n_m", "block"])
def test_what_is_removed_stays_removed_and_the_number_is_exact(granularity: Any, scope: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    units = {"unstructured": 1, "structured": 8, "n_m": 1, "block": 4}[granularity]
    previous: dict[str, Tensor] = {}
    for target in (0.05, 0.2, 0.45):
        scores = {name: torch.rand(16, 8, generator=generator) for name in ("a", "b")}
        masks = make_masks(scores, target, granularity=granularity, scope=scope, previous=previous, block=(2, 2))
        for name in previous:
            assert not (masks[name] & ~previous[name]).any()
        assert zeros(masks) == (
            round(target * 256 / units) * units if scope == "global" else 2 * round(target * 128 / units) * units
        )
        previous = masks
    fewer = make_masks(scores, 0.1, granularity=granularity, scope=scope, previous=previous, block=(2, 2))
    assert zeros(fewer) == zeros(previous)


def test_no_layer_is_emptied() -> None:
    scores = {"a": torch.rand(4, 4) + 10, "b": torch.rand(2, 2)}
    masks = make_masks(scores, 0.9)
    assert masks["b"].sum() == 1
    assert zeros(masks) == 18
    rows = make_masks(scores, 0.99, granularity="structured", scope="layer")
    assert {name: int(mask.sum()) for name, mask in rows.items()} == {"a": 4, "b": 2}


def test_which_layers() -> None:
    resnet = CifarResNet(depth=8, width=4)
    names = list(maskable(resnet))
    assert names[0] == "conv.weight"
    assert "head.weight" not in names
    assert not [name for name in names if "bn" in name]
    assert list(maskable(resnet, ["blocks.*.conv1"])) == [f"blocks.{i}.conv1.weight" for i in range(3)]
    assert "conv.weight" not in maskable(resnet, exclude=["conv"])
    assert list(maskable(resnet, types=["linear"], head=True)) == ["head.weight"]
    assert "bn.weight" in maskable(resnet, types=["conv", "norm"])
    assert "head.bias" in maskable(resnet, types=["linear", "bias"], head=True)
    vit = ViT(width=8, depth=1, heads=2, patch_size=2, channels=1, image_size=4, num_classes=3)
    assert len(maskable(vit)) == 7
    assert head_of(vit) is vit.head


def test_tied_weights_are_chosen_once_and_only_where_asked() -> None:
    gpt = GPT(width=8, depth=1, heads=2, vocab_size=12, max_length=6)
    assert not [name for name in maskable(gpt) if "embed" in name or "head" in name]
    asked = maskable(gpt, types=["linear", "embedding"], head=True)
    assert [name for name in asked if "token" in name or "head" in name] == ["embed.token.weight"]


def test_masks_of_another_net_are_refused_before_anything_changes() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = net[0].weight.clone()
    with pytest.raises(UserError, match=r"no parameter 1\.weight of shape \[3, 2\]"):
        apply_masks(net, {"0.weight": torch.zeros(2, 2, dtype=torch.bool), "1.weight": torch.ones(3, 2)})
    assert torch.equal(net[0].weight, before)


def test_rewinding_restores_copies_of_weights_and_statistics_and_leaves_zeros() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))
    early, expected = copy_state(net), copy.deepcopy(net.state_dict())
    weight = net[0].weight
    net(torch.randn(8, 1, 8, 8))
    weight.data.add_(1)
    mask = torch.rand(4, 1, 3, 3) > 0.5
    rewind(net, early, {"0.weight": mask})
    expected["0.weight"] *= mask
    assert all(torch.equal(tensor, expected[name]) for name, tensor in net.state_dict().items())
    assert net[0].weight is weight  # the optimizer keeps valid references


def due(schedule: SparsitySchedule, steps: int = 60) -> list[int]:
    return [step for step in range(steps) if schedule.due(step)]


def test_cubic_is_zhu_and_gupta() -> None:
    schedule = SparsitySchedule(0.8, "cubic", 0.2, start=10, end=50, every_n_steps=10)
    assert due(schedule) == [10, 20, 30, 40, 50]
    # Their equation 1: s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3 with n dt = 40.
    assert [schedule.at(step) for step in (10, 20, 30, 40, 50)] == pytest.approx(
        [0.2, 0.8 - 0.6 * 0.75**3, 0.8 - 0.6 * 0.5**3, 0.8 - 0.6 * 0.25**3, 0.8]
    )
    assert schedule.at(9) == 0.0
    assert schedule.at(1000) == 0.8
    assert schedule.last == 50


def test_linear_and_exponential() -> None:
    linear = SparsitySchedule(0.9, "linear", 0.1, start=0, end=40)
    assert [linear.at(step) for step in (0, 10, 20, 40)] == pytest.approx([0.1, 0.3, 0.5, 0.9])
    exponential = SparsitySchedule(0.96, "exponential", start=0, end=2)
    assert [exponential.at(step) for step in (0, 1, 2)] == pytest.approx([0.0, 0.8, 0.96])


def test_stepped_jumps_from_start_to_end() -> None:
    schedule = SparsitySchedule(0.8, "stepped", start=10, end=40, jumps=4)
    assert due(schedule) == [10, 20, 30, 40]
    assert [schedule.at(step) for step in (9, 10, 19, 20, 30, 39, 40)] == pytest.approx(
        [0, 0.2, 0.2, 0.4, 0.6, 0.6, 0.8]
    )
    once = SparsitySchedule(0.8, "stepped", start=10, end=40, jumps=1)
    assert due(once) == [40]
    assert (once.at(39), once.at(40)) == (0.0, 0.8)


def test_random_depends_on_seed_step_and_index_alone() -> None:
    scores = random_scores((4, 4), 1, 3, 7)
    torch.manual_seed(99)
    assert torch.equal(random_scores((4, 4), 1, 3, 7), scores)
    assert not any(torch.equal(random_scores((4, 4), *key), scores) for key in ((2, 3, 7), (1, 4, 7), (1, 3, 8)))


def test_taylor_and_movement_add_up_products() -> None:
    weight, gradients = (
        torch.tensor([1.0, -2.0, 3.0]),
        (torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0.5, -1.0, torch.inf])),
    )
    taylor, movement = {"a": torch.zeros(3)}, {"a": torch.zeros(3)}
    for gradient in gradients:
        add_gradients(taylor, {"a": weight}, {"a": gradient}, "taylor")
        add_gradients(movement, {"a": weight}, {"a": gradient}, "movement")
    add_gradients(taylor, {"a": weight}, {"a": None}, "taylor")
    assert taylor["a"].tolist() == [1.5, 4.0, 3.0]
    assert movement["a"].tolist() == [-1.5, 0.0, 3.0]  # the first two move towards zero


def test_wanda_is_the_weight_times_the_norm_of_its_input() -> None:
    linear = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad(), input_squares(linear, ["0.weight"]) as squares:
        linear[0].weight.copy_(torch.tensor([[1.0, -1.0], [2.0, 3.0]]))
        linear(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        linear(torch.tensor([[[0.0, 1.0]]]))
    expected = torch.tensor([[5.0, 2**0.5], [10.0, 3 * 2**0.5]])
    torch.testing.assert_close(wanda(dict(linear.named_parameters()), squares)["0.weight"], expected)
    net = nn.Sequential(nn.Conv2d(4, 6, 3, groups=2))
    x = torch.rand(5, 4, 7, 7)
    with input_squares(net, ["0.weight"]) as squares, torch.no_grad():
        net(x)
    norms = x.square().sum((0, 2, 3)).sqrt()
    scores = wanda({"0.weight": torch.ones(6, 2, 3, 3)}, squares)["0.weight"]
    assert torch.allclose(scores[0, :, 0, 0], norms[:2])
    assert torch.allclose(scores[5, :, 2, 2], norms[2:])
    masks = make_masks({"0.weight": scores}, 0.5, scope="output")
    assert (masks["0.weight"].flatten(1).sum(1) == 9).all()
