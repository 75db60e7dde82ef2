"""What exact data modules share: a run that is continued mid-epoch, ranks that share a replica, overfitting and
limits.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lathe.data.synthetic_tokens import SyntheticTokens
from lathe.data.tokens import TokenDataModule
from lathe.tasks import LanguageModellingTask

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def module(**settings: Any) -> TokenDataModule:
    source = SyntheticTokens(vocab_size=8, length=6, train_size=48, val_size=8, test_size=8)
    return TokenDataModule(source, **{"vocab_size": 8, "length": 6, "batch_size": 8, "seed": 3, **settings})


def task() -> LanguageModellingTask:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
    return LanguageModellingTask(net, optimizer=lambda net: torch.optim.Adam(net.parameters(), lr=0.1))


class Save(Callback):
    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def batches(it: TokenDataModule, **trainer: Any) -> list[Tensor]:
    """x of the training batches, under a trainer that is as given."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=trainer.pop("sampler", None))
    it.trainer = SimpleNamespace(strategy=strategy, world_size=1, global_rank=0, limit_train_batches=1.0, **trainer)  # type: ignore[assignment]
    return [x for x, _ in it.train_dataloader()]


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
@pytest.mark.parametrize("step", [2, 6, 9])  # mid-epoch, at an epoch's end, in the second epoch; an epoch has 6 steps
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path, step: int) -> None:
    weights = []
    for callbacks, path in (([Save(tmp_path / "a.ckpt", step)], None), ([], tmp_path / "a.ckpt")):
        it = task()
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=2, callbacks=callbacks, **QUIET)  # type: ignore[arg-type]
        trainer.fit(it, datamodule=module(), ckpt_path=path, weights_only=True)
        assert trainer.global_step == 12
        weights.append(it.net.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_ranks_of_one_replica_get_the_same_batches() -> None:
    """Four ranks, two replicas: what the strategy's sampler settings say decides, not the number of processes."""
    whole = batches(module())
    halves = [batches(module(), sampler={"num_replicas": 2, "rank": rank}) for rank in (0, 1)]
    assert torch.equal(torch.cat([torch.cat(pair) for pair in zip(*halves, strict=True)]), torch.cat(whole))


def test_overfitting_repeats_the_same_samples_in_stored_order() -> None:
    it = module()
    first = batches(it, overfit_batches=2)
    assert torch.equal(torch.cat(first), torch.cat([x for x, _ in it.train_dataloader()]))
    stored = torch.from_numpy(it.source.load()["train"].ids.reshape(-1, 7)[:, :6].astype("int64"))
    assert torch.equal(torch.cat(first), stored)


def test_a_new_fit_starts_again_at_epoch_0() -> None:
    it = module()
    first, second = batches(it), [x for x, _ in it.train_dataloader()]
    assert not torch.equal(torch.cat(first), torch.cat(second))
    it.setup("fit")
    assert torch.equal(torch.cat(first), torch.cat([x for x, _ in it.train_dataloader()]))
