"""Law 4 over versions: a run directory whose config.yaml names parts as earlier versions did is used as any other."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.runs import SMALL, new_run, runs, weights

import lathe.verbs.train
from lathe.config.schema.names import RENAMED

Cli = Callable[..., tuple[int, str]]
WORDS = (
    *SMALL,
    "model.net.depth=2",
    "callbacks=[default,ema]",
    "compression=prune",
    "compression.receipt=none",
    "optimizer=muon",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, with the names of now."""
    cfg = new_run(tmp_path_factory.mktemp("trained") / "logs", *WORDS)
    lathe.verbs.train.train(cfg)
    return Path(cfg["paths"]["run_dir"])


@pytest.fixture
def older(trained: Path, tmp_path: Path) -> Path:
    """A copy of it as it would have been saved before rooms had faces, each part under the name of its file."""
    copy = tmp_path / "logs" / "train" / trained.name
    shutil.copytree(trained, copy)
    text = (copy / "config.yaml").read_text()
    for old, new in RENAMED.items():
        text = text.replace(f": {new}\n", f": {old}\n")
    assert ": lathe.callbacks.pruning.Prune\n" in text
    assert ": lathe.optim.muon.Muon\n" in text
    (copy / "config.yaml").write_text(text)
    return copy


def test_it_is_evaluated(older: Path, cli: Cli) -> None:
    assert cli(f"run={older}", "output=figures.json", script="scripts/evaluate.py") == (0, "")
    metrics, result = json.loads(Path("figures.json").read_text()), json.loads((older / "result.json").read_text())
    assert metrics == {name: pytest.approx(result[name], abs=1e-7) for name in ("test/accuracy", "test/loss")}


@pytest.mark.slow
def test_it_is_continued_as_one_with_the_names_of_now(older: Path, trained: Path, tmp_path: Path, cli: Cli) -> None:
    now = tmp_path / "now"
    shutil.copytree(trained, now)
    for path in (older, now):
        code, errors = cli(f"resume={path}", "trainer.max_epochs=3")
        assert (code, "older name" in errors) == (0, False)
    a, b = weights(older), weights(now)
    assert json.loads((older / "result.json").read_text())["epochs"] == 3
    assert all(torch.equal(a[name], b[name]) for name in b)
    assert not any(f": {old}\n" in (older / "config.yaml").read_text() for old in RENAMED)


def test_it_is_the_same_experiment(older: Path, tmp_path: Path, cli: Cli) -> None:
    (older / "result.json").unlink()
    words = [*WORDS, f"paths.log_dir={tmp_path / 'logs'}"]
    assert cli(*words, "resume=auto")[0] == 0
    assert runs(tmp_path / "logs") == [older]
    assert (older / "result.json").exists()


@pytest.mark.slow
def test_it_is_exported(older: Path, cli: Cli) -> None:
    code, errors = cli(f"run={older}", "target=onnx", script="scripts/export.py")
    assert code == 0, errors
    metrics = json.loads((older / "exports" / "onnx" / "parity.json").read_text())["figures"]
    result = json.loads((older / "result.json").read_text())
    assert metrics["file"]["accuracy"] == pytest.approx(result["test/accuracy"], abs=1e-7)
