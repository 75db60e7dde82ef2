"""Training on windows of tokens: equal losses on one process and on two, and the entropy as the limit."""

import math
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from support.runs import config
from support.tokens import Fixed
from torch import Tensor, nn

from lathe.data.synthetic_tokens import SyntheticTokens
from lathe.data.tokens import TokenDataModule
from lathe.runs.build import make_task
from lathe.runs.instantiate import instantiate
from lathe.strategies import DDP
from lathe.tasks import LanguageModellingTask
from lathe.trainer import Trainer

pytestmark = pytest.mark.law2


class Bigram(nn.Module):
    """The simplest net that can learn the chain: logits of the next token for each token."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, vocab_size)
        nn.init.zeros_(self.table.weight)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.table(x)
        return logits


def fit(world: int, source: Any, epochs: int, lr: float, **settings: Any) -> tuple[list[float], dict[str, float]]:
    """Return the loss of every step (of this rank's shard), and the final metrics."""
    steps: list[float] = []

    class Task(LanguageModellingTask):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            steps.append(loss.item())
            return loss

    data = TokenDataModule(source, source.vocab_size, batch_size=12, **settings)
    task = Task(Bigram(source.vocab_size), optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=lr))
    strategy: Any = DDP() if world > 1 else "auto"
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=strategy, max_epochs=epochs, use_distributed_sampler=False, **quiet
    )  # type: ignore[arg-type]
    trainer.fit(task, datamodule=data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(task, datamodule=data, verbose=False)
    return steps, metrics | {name: float(value) for name, value in trainer.callback_metrics.items()}


def on_rank(rank: int) -> tuple[list[float], dict[str, float]]:
    return fit(2, Fixed(), epochs=2, lr=0.1, length=4)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
def test_two_ranks_train_and_evaluate_as_one() -> None:
    steps, metrics = fit(1, Fixed(), epochs=2, lr=0.1, length=4)
    ranks = on_ranks(on_rank, timeout=180)  # mostly imports, on cores that may be busy
    assert steps == pytest.approx([(a + b) / 2 for a, b in zip(ranks[0][0], ranks[1][0], strict=True)], rel=1e-5)
    assert len(steps) == 2
    for _, found in ranks:
        assert found == pytest.approx(metrics, rel=1e-5)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*num_workers.*")
def test_a_table_of_pairs_reaches_the_entropy() -> None:
    source = SyntheticTokens(vocab_size=16, length=32, train_size=1200, test_size=400)
    metrics = fit(1, source, epochs=2, lr=0.1, length=32)[1]
    assert source.entropy - 0.05 < metrics["test/loss"] < source.entropy + 0.05
    assert metrics["test/perplexity"] == pytest.approx(math.exp(metrics["test/loss"]), rel=1e-5)
    assert abs(metrics["test/accuracy"] - source.best_accuracy) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["data.source.lag=2", "data.vocab_size=8"]], ids=["default", "lag"])
def test_gpt_nano_comes_near_the_entropy(overrides: list[str]) -> None:
    """Two epochs, some seconds. With a lag of 2 the previous token carries no information: without working attention
    the loss stays at ln V.
    """
    cfg = config(
        "data=synthetic_tokens", "model=gpt_nano", "optimizer=adamw", "optimizer.lr=0.003", "seed=0", *overrides
    )
    torch.manual_seed(0)
    data, task = instantiate(cfg["data"], "data"), make_task(cfg, train=False)
    data.setup()
    optimizer = torch.optim.AdamW(task.net.parameters(), lr=0.003)
    for _ in range(2):
        for batch in data.train_dataloader():
            optimizer.zero_grad()
            task.losses(task.net(batch[0]), batch)["cross_entropy"].backward()
            optimizer.step()
    with torch.no_grad():
        sums = sum(
            task.reduce(out := task.net(batch[0]), batch, task.losses(out, batch)["cross_entropy"])
            for batch in data.test_dataloader()
        )
    loss, correct, count = sums.tolist()  # type: ignore[union-attr]
    assert count == 512 * data.length
    sequences = data.source.load()["test"].ids.reshape(512, -1)
    floor = -data.source.log_probabilities(sequences).mean()  # of these sequences
    assert -0.01 < loss / count - floor < 0.05
    assert abs(correct / count - data.source.best_accuracy) < 0.02
