"""Token losses compared with values by hand; metrics count tokens; logits are not copied needlessly."""

import math
from typing import Any

import pytest
import torch
from support.quiet import quiet_trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lathe.tasks import LanguageModellingTask
from lathe.tasks import language_modelling as module

VOCAB, TIME = 11, 5


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB))


def batch(n: int, ignored: float = 0.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCAB, (n, TIME), generator=generator)
    y = torch.randint(VOCAB, (n, TIME), generator=generator)
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < ignored, -100)


def test_the_loss_is_torchs_own_over_counted_targets() -> None:
    task, (x, y) = LanguageModellingTask(net()), batch(4, ignored=0.4)
    expected = F.cross_entropy(task.net(x).flatten(0, 1), y.flatten())
    assert task.training_loss(task.net(x), (x, y)).item() == pytest.approx(expected.item(), rel=1e-6)
    loss, correct, count = task._sums["train"].tolist()
    assert count == (y != -100).sum()
    assert loss / count == pytest.approx(expected.item(), rel=1e-6)
    assert correct == (task.net(x).argmax(-1) == y).sum()


def test_replicas_with_different_numbers_of_targets_average_to_the_global_mean() -> None:
    """With `count`, replicas' mean loss and gradients are the whole batch's. Plain means are not."""
    task, (x, y) = LanguageModellingTask(net()), batch(6, ignored=0.5)
    y[:3, 1:] = -100  # the first replica has far fewer targets
    task.training_loss(task.net(x), (x, y)).backward()
    whole = [p.grad.clone() for p in task.parameters() if p.grad is not None]
    sums = task._sums.pop("train")

    task.zero_grad()
    count = (y != -100).sum() / 2
    losses = [task.training_loss(task.net(a), (a, b, count)) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    (sum(losses) / 2).backward()  # type: ignore[union-attr]
    for expected, parameter in zip(whole, task.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(task._sums["train"], sums, rtol=1e-6, atol=0)
    plain = [task.training_loss(task.net(a), (a, b)).item() for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    assert abs(sum(plain) / 2 - (sum(losses) / 2).item()) > 1e-3  # type: ignore[union-attr]


def evaluate(task: LanguageModellingTask, data: list[Any]) -> dict[str, float]:
    trainer = quiet_trainer()
    trainer.validate(task, DataLoader(data, batch_size=None), verbose=False)  # type: ignore[arg-type]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_figures_are_means_over_tokens() -> None:
    task = LanguageModellingTask(net())
    data = [batch(1, seed=1), batch(6, ignored=0.8, seed=2), batch(3, ignored=0.3, seed=3)]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    with torch.no_grad():
        logits = task.net(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    found = evaluate(task, data)
    assert found["val/loss"] == pytest.approx(loss, rel=1e-6)
    assert found["val/perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["val/accuracy"] == pytest.approx(
        (logits.argmax(-1) == y).sum().item() / (y != -100).sum().item(), rel=1e-6
    )
    assert set(found) == {name for name in task.metric_names if name.startswith("val/")}


def test_evaluation_makes_log_probabilities_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a large vocabulary, those of a whole batch take more memory than the net."""
    logits, y, sizes, log_softmax = torch.randn(8, 32, 101), torch.randint(101, (8, 32)), [], F.log_softmax
    monkeypatch.setattr(F, "log_softmax", lambda x, **options: (sizes.append(len(x)), log_softmax(x, **options))[1])
    monkeypatch.setattr(module, "CHUNK", 1000)
    with torch.no_grad():
        parts = module.summed_cross_entropy(logits, y)
    assert sizes == [9] * 28 + [4]
    assert parts.item() == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item(), rel=1e-6
    )


def test_half_precision_logits_give_a_float32_loss() -> None:
    task, (x, y) = LanguageModellingTask(net()), batch(4)
    logits = task.net(x).bfloat16()
    loss = task.training_loss(logits, (x, y))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(logits.float().flatten(0, 1), y.flatten()).item(), rel=1e-6)
    assert task.training_loss(task.net(x).double(), (x, y)).dtype == torch.float64
