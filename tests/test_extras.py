"""A missing extra of `pip install -e .` is reported before training, and installing it helps."""

import configparser
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import ROOT, SMALL, runs

from lathe.errors import uninstalled

Cli = Callable[..., tuple[int, str]]
ONNX = ("onnx", "onnxscript", "onnxruntime")


def block(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)


def test_the_sentence_names_what_is_missing_and_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uninstalled("export", *ONNX) is None
    block(monkeypatch, "onnx", "onnxruntime")
    assert uninstalled("export", *ONNX) == "onnx and onnxruntime can't be imported: pip install -e '.[export]'."


def test_every_extra_that_a_sentence_names_is_there() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    extras = dict(parser["options.extras_require"])
    named = set()
    for pattern in ("src/**/*.py", "docs/*.md", "README.md", "configs/**/*.yaml"):
        for path in ROOT.glob(pattern):
            lists = re.findall(r"pip install -e '?\.\[([\w,]+)\]|uninstalled\(\"(\w+)\"", path.read_text())
            named |= {(name, path.name) for pair in lists for name in ",".join(pair).strip(",").split(",")}
    assert len({name for name, _ in named}) > 7
    assert [pair for pair in named if pair[0] not in extras] == []
    assert {"onnx", "onnxscript", "onnxruntime"} <= {re.split(r"[<>=]", line)[0] for line in extras["export"].split()}
    assert extras["compress"].startswith("torch-pruning")


def test_training_with_channels_removed_is_refused_at_once(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block(monkeypatch, "torch_pruning")
    # cifar10 is not downloaded: the message comes before the data are needed
    code, errors = cli(
        "compression=prune_channels", "data=cifar10", "data.source.download=false", "model=resnet20", *SMALL[3:]
    )
    assert (code, errors) == (
        1,
        "Error: removing channels: torch_pruning can't be imported: pip install -e '.[compress]'.\n",
    )
    assert runs(tmp_path / "logs") == []
