"""A net with unusual operations, such as in-place writes to its input, gets its plain twin's figures."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from support.quiet import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lathe.compression.channels.removal import prune_channels
from lathe.compression.distillation.callback import Teachers, frozen
from lathe.compression.distillation.losses import Capture
from lathe.compression.modes import evaluated, reestimate_batchnorm
from lathe.compression.pruning.callback import Prune
from lathe.compression.quantization.ptq import quantize_static


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class Net(nn.Module):
    """`habits` change the operations, not the outputs."""

    def __init__(self, width: int, habits: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.mid: Any
        self.habits, inplace = habits, "activation" in habits
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width)
        blocks: Any = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace), nn.Conv2d(width, width, 3, padding=1, bias=False)) for _ in range(2)
        )
        self.blocks = blocks
        self.mid, self.head = nn.Conv2d(width, width, 1), nn.Linear(width, 4)
        if "tied" in habits:
            blocks[1][1].weight = blocks[0][1].weight

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2).sub_(0.5) if "input" in self.habits else x * 2 - 0.5
        x = self.norm(self.stem(x))
        for block in self.blocks:
            x = block(x)
        x = self.mid(x)
        scale = torch.linspace(0.5, 1, x.shape[-1], device=x.device)
        if "view" in self.habits:
            x.view_as(x).mul_(scale)
        else:
            x = x * scale
        return self.head(x.relu().mean((2, 3)))


def twins(seed: int, *habits: str) -> tuple[Any, Any, list[Any]]:
    """Return a plain net, its twin with these habits, and batches."""
    torch.manual_seed(seed)
    plain, other = Net(8, tuple({"tied"} & set(habits))), Net(8, habits)
    other.load_state_dict(plain.state_dict())
    if "tied" in habits:  # the plain one has equal weights in two parameters
        plain.blocks[1][1].weight = nn.Parameter(plain.blocks[0][1].weight.detach().clone())
    if "parametrized" in habits:
        nn.utils.parametrize.register_parametrization(other.mid, "weight", Double())
        with torch.no_grad():
            other.mid.parametrizations.weight.original.div_(2)
    return plain, other, [(torch.randn(8, 3, 6, 6), torch.randint(0, 4, (8,))) for _ in range(4)]


class Fit(LightningModule):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(net: nn.Module, batches: list[Any], callback: Any) -> None:
    trainer = quiet_trainer(callback, max_epochs=1)
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer.fit(Fit(net), loader)


def teacher(net: Net, batches: list[Any]) -> Any:
    """Return a teacher's outputs, and captured outputs of a student's layers; the net is both."""
    teachers = Teachers("ema", None, 0.9, 0)
    teachers.nets = [frozen(deepcopy(net))]
    capture = Capture(net, ["stem", "blocks.0"], False)
    answers = [teachers.answers(batches[0][0]) for _ in range(2)]
    with evaluated(net):
        net(batches[0][0])
    return [*answers, *(capture.take(name).detach() for name in ("stem", "blocks.0"))]


def static(net: Net, batches: list[Any]) -> Any:
    inputs = [x for x, _ in batches]
    quantize_static(net, inputs, observer="percentile", bias_correction=True)
    return [net.eval()(batches[0][0].clone())]


def removed(net: Net, batches: list[Any]) -> Any:
    kept = prune_channels(net, batches[0][0], share=0.6, round_to=1, min_channels=1)
    return [torch.tensor(list(kept.values())), net.eval()(batches[0][0].clone())]


def wanda(net: Net, batches: list[Any]) -> Any:
    prune = Prune(0.5, criterion="wanda", schedule="one_shot", start=0.5)
    fit(net, batches, prune)
    return [mask.float() for mask in prune.masks.values()]


PATHS = (teacher, static, removed, wanda)


def check(path: Callable[[Net, list[Any]], Any], plain: Net, other: Net, batches: list[Any]) -> None:
    copies = [[(x.clone(), y) for x, y in batches] for _ in range(2)]
    expected, found = path(plain, copies[0]), path(other, copies[1])
    assert len(expected) == len(found) > 0
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5)
    for (x, _), (y, _) in zip(copies[1], batches, strict=True):
        assert path is wanda or torch.equal(x, y), "the batches are changed"


@pytest.mark.parametrize(
    ("path", "habits"),
    [
        *((path, ("input", "activation", "view")) for path in PATHS),
        (static, ("tied",)),
    ],
)
def test_habits_change_no_figure(path: Any, habits: tuple[str, ...]) -> None:
    check(path, *twins(0, *habits))


def test_channels_of_tied_layers_go_together() -> None:
    _, net, batches = twins(3, "tied")
    removed(net, batches)
    assert net.blocks[0][1].weight is net.blocks[1][1].weight
    assert net.blocks[0][1].weight.shape[0] == net.stem.out_channels < 8


@pytest.mark.parametrize("habit", ["parametrized", "older"])
def test_channels_of_computed_weights_stay(habit: str) -> None:
    _, net, batches = twins(1, "parametrized")
    if habit == "older":
        nn.utils.parametrize.remove_parametrizations(net.mid, "weight")
        nn.utils.spectral_norm(net.mid)
    before = net.stem.out_channels
    prune_channels(net, batches[0][0], share=0.6, round_to=1, min_channels=1)
    assert net.stem.out_channels < before == net.mid.out_channels


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.ReLU())


def test_statistics_are_the_plain_average_over_the_batches():
    torch.manual_seed(0)
    model, batches = net(), [torch.randn(8, 1, 4, 4) + i for i in range(3)]
    model[1].running_mean.fill_(100)
    assert reestimate_batchnorm(model, batches) == 3
    outputs = [model[0](batch).detach() for batch in batches]
    mean = torch.stack([out.mean((0, 2, 3)) for out in outputs]).mean(0)
    variance = torch.stack([out.var((0, 2, 3), unbiased=True) for out in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, variance)
