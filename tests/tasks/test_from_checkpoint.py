"""Tasks from checkpoints through `load_from_checkpoint`, in a plain process without a Trainer."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from support.runs import SMALL, new_run, weights
from torch import Tensor

from lathe.errors import UserError
from lathe.nets import MLP
from lathe.runs.inference import open_run_net
from lathe.tasks import ClassificationTask, Task
from lathe.training.train import train


@pytest.fixture(scope="module")
def best(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best checkpoint of a run whose net is narrower than its configuration says."""
    words = (*SMALL, "trainer.max_epochs=1", "compression=prune_channels", "compression.receipt=none")
    cfg = new_run(tmp_path_factory.mktemp("logs"), *words)
    train(cfg)
    return Path(cfg["paths"]["run_dir"]) / "checkpoints" / "best.ckpt"


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_the_run_says_what_the_net_is(best: Path, x: Tensor) -> None:
    task = Task.load_from_checkpoint(best, map_location="cpu")
    assert type(task) is ClassificationTask
    assert not task.training
    saved = weights(best.parents[1], "best")
    assert all(torch.equal(value, saved[name]) for name, value in task.net.state_dict().items())
    with torch.no_grad():
        logits, loss = task(x), task.losses(task(x), (x, torch.tensor([0, 1, 2])))
        assert torch.equal(logits, open_run_net(best.parents[1])[0](x))
        assert torch.equal(task.predict_step((x, None), 0), logits)
    assert loss["cross_entropy"].isfinite()


def test_a_given_net_is_filled(best: Path, x: Tensor, tmp_path: Path) -> None:
    """With the structure of the checkpoint; the file may be in any folder."""
    alone = shutil.copy(best, tmp_path / "alone.ckpt")
    net = MLP(channels=1, image_size=8, num_classes=10, width=16, depth=1)
    task = ClassificationTask.load_from_checkpoint(alone, net=net, label_smoothing=0.1)
    assert task.net is net
    assert task.label_smoothing == 0.1
    task.eval()
    with torch.no_grad():
        assert torch.equal(task(x), open_run_net(best.parents[1])[0](x))
    head = copy.deepcopy(net)
    del head.head
    found = ClassificationTask.load_from_checkpoint(str(alone), net=head, strict=False)
    assert found.net.state_dict().keys() < net.state_dict().keys()


def test_what_can_not_be_loaded_is_refused(best: Path, tmp_path: Path) -> None:
    (tmp_path / "torn.ckpt").write_bytes(Path(best).read_bytes()[:500])
    net = MLP(channels=1, image_size=8, num_classes=7, width=16, depth=1)
    for path, options, said in (
        (tmp_path / "none.ckpt", {}, "no such file"),
        (tmp_path / "torn.ckpt", {"net": net}, "cut off or of another kind"),
        (best, {"net": net}, "of another net"),
    ):
        with pytest.raises(UserError, match=said):
            ClassificationTask.load_from_checkpoint(path, **options)


def test_a_run_that_names_foreign_code_is_refused(best: Path, tmp_path: Path) -> None:
    run = shutil.copytree(best.parents[1], tmp_path / "run")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("lathe.nets.MLP", "os.system"))
    with pytest.raises(UserError, match=r"names `os.system`"):
        ClassificationTask.load_from_checkpoint(run / "checkpoints" / "best.ckpt")
