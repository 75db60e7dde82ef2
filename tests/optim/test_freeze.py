"""Frozen parameters and their statistics never change, for any optimizer and after an interruption."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from support.interruptions import interruption
from support.runs import SMALL, config, new_run, weights

from lathe.config.validate import check_compression
from lathe.errors import UserError
from lathe.nets import MLP, CifarResNet
from lathe.optim.build import freeze
from lathe.runs.build import make_task
from lathe.training.train import train

__all__ = ["interruption"]  # a fixture
RESNET = [word for word in SMALL if "model" not in word] + ["model=resnet20", "model.net.depth=8", "model.net.width=4"]
RESNET.append("trainer.limit_train_batches=10")
FROZEN = "freeze=[conv.*,bn.*,blocks.0.*]"


def trained(tmp_path: Path, *words: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights before and after a run."""
    cfg = new_run(tmp_path, *RESNET, *words)
    train(cfg)
    seed_everything(cfg["seed"], verbose=False)
    return make_task(cfg).net.state_dict(), weights(Path(cfg["paths"]["run_dir"]))


def test_frozen_parameters_and_statistics_do_not_move_and_the_others_do(tmp_path: Path) -> None:
    """With a validation within each epoch, which leaves frozen norms alone."""
    words = ("optimizer=radam", "callbacks=[default,ema]", "trainer.val_check_interval=0.3", "trainer.max_epochs=2")
    start, end = trained(tmp_path, FROZEN, *words)
    assert start.keys() == end.keys()
    moved = {name for name in start if not torch.equal(start[name], end[name])}
    still = {name for name in start if name.startswith(("conv.", "bn.", "blocks.0."))}
    assert moved == start.keys() - still


def test_the_numbers_and_what_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    net = CifarResNet(depth=8, width=4)
    assert freeze(net, ["head.*"]) == (170, sum(value.numel() for value in net.parameters()))
    assert [name for name, value in net.named_parameters() if not value.requires_grad] == ["head.weight", "head.bias"]
    mlp = MLP(channels=1, image_size=8, num_classes=10, width=4, depth=2)
    with pytest.raises(UserError, match=r"^freeze: the pattern 'encoder\.\*' matches no parameter of MLP; "):
        freeze(mlp, ["encoder.*"])
    with pytest.raises(UserError, match=r"^freeze=\['\*'\] leaves no parameter of MLP to train: free some\.$"):
        freeze(mlp, ["*"])
    make_task(config("model=mlp", "freeze=[head.*]"))
    assert "freeze: 2,570 of 150,794 parameters stay as they are." in capsys.readouterr().out


@pytest.mark.parametrize("method", ["prune", "prune_channels", "rigl"])
def test_methods_that_would_cut_frozen_parameters_are_refused(method: str) -> None:
    with pytest.raises(UserError, match=rf"^freeze=\['conv\.\*'\] keeps what compression={method} would cut"):
        check_compression(config(f"compression={method}", "freeze=[conv.*]"))
    check_compression(config("compression=qat", "freeze=[conv.*]"))
