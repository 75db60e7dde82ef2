"""Checkpoints from a URL are verified by hash before they are read; a checkpoint as `run`."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import SMALL, config, new_run, runs

from lathe.config.validate import check
from lathe.errors import UserError
from lathe.runs.build import make_task
from lathe.training.weight_loading import initialise

Cli = Callable[..., tuple[int, str]]


def packed(seed: int) -> tuple[dict[str, torch.Tensor], bytes]:
    """Weights of a net as SMALL has it, and a file that holds them."""
    torch.manual_seed(seed)
    net = make_task(config(*SMALL), train=False).net.state_dict()
    file = io.BytesIO()
    torch.save(net, file)
    return dict(net), file.getvalue()


def test_an_address_gives_its_weights_and_is_asked_once(tmp_path: Path, serve: Any) -> None:
    net, content = packed(5)
    server = serve(content)
    words = (f"ckpt_path={server.url}some/w.pth", f"ckpt_sha256={hashlib.sha256(content).hexdigest().upper()}")
    for _ in range(2):
        words = (*words, f"paths.data_dir={tmp_path}/data")
        assert check(config(*SMALL, *words)) == []
        cfg = new_run(tmp_path / "logs", *SMALL, *words)
        task = make_task(cfg, train=False)
        initialise(cfg, task)
        assert all(torch.equal(value, net[name]) for name, value in task.net.state_dict().items())
    assert server.asked == [None]


@pytest.mark.parametrize("there", ["at an address", "in a file"])
def test_another_file_is_refused_before_it_is_read(tmp_path: Path, serve: Any, there: str) -> None:
    _, content = packed(5)
    (tmp_path / "w.pth").write_bytes(content)
    path = serve(content).url if there == "at an address" else tmp_path / "w.pth"
    cfg = new_run(tmp_path / "logs", *SMALL, f"ckpt_path={path}", f"ckpt_sha256={'0' * 64}")
    cfg["paths"]["data_dir"] = str(tmp_path / "data")
    with pytest.raises(UserError, match="hash"):
        initialise(cfg, make_task(cfg, train=False))
    assert list((tmp_path / "data").rglob("*w*.pth")) == []


def test_an_address_without_a_hash_is_refused() -> None:
    (told,) = check(config(*SMALL, "ckpt_path=https://example.org/w.pth"))
    assert told.startswith("ckpt_path=https://example.org/w.pth is downloaded: set ckpt_sha256")


def test_a_checkpoint_is_taken_for_its_run(tmp_path: Path, cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli(*SMALL, "callbacks.checkpoint.save_top_k=2", f"paths.log_dir={tmp_path}/logs") == (0, "")
    (run,) = runs(tmp_path / "logs")
    kept = next((run / "checkpoints").glob("epoch=*.ckpt"))
    for path in (run / "checkpoints" / "last.ckpt", kept):
        assert cli(f"run='{path}'", "split=val", script="scripts/evaluate.py") == (0, "")
    code, errors = cli(f"run={run}/checkpoints/last.ckpt", "checkpoint=best", script="scripts/evaluate.py")
    assert code == 1
    assert "is another checkpoint than checkpoint=best. Leave one out." in errors
