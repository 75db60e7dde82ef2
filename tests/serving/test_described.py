"""Manifests and receipts of a foreign run: complete, or refused before anything is loaded."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.runs.export_staleness import KEY, checkpoint_hash
from lathe.serving.described import described
from lathe.serving.model import describe, example, receipt
from lathe.serving.page import page

WORDS = {
    "run": "r",
    "checkpoint": "best",
    "target": "onnx",
    "classes": None,
    "preprocess": None,
    "output": {"shape": ["batch", "time", 50]},
    "input": {"dtype": "int64", "shape": ["batch", "time"], "vocab_size": 50, "longest": 8},
}
STRANGE: list[Any] = [None, 5, 0, -1, 10**12, 1.5, "x", [], {}, ["x"], [1], ["a\nb"] * 10]


def test_a_manifest_has_what_is_made_of_it(served_run: Path) -> None:
    """Any other value is refused, or the page and the example can be built from it."""
    whole = describe(str(served_run), "onnx", "best")
    refused = 0
    for given in (whole, WORDS):
        assert described(given)
        places = [(name,) for name in ("run", "checkpoint", "classes")]
        places += [
            (group, name)
            for group in ("input", "output")
            for name in given[group]
            if name in ("shape", "vocab_size", "longest")
        ]
        places += [("preprocess", name) for name in ("mean", "std", "size") if given["preprocess"]]
        for place in places:
            for value in STRANGE:
                facts: Any = copy.deepcopy(given)
                node = facts if len(place) == 1 else facts[place[0]]
                if place[-1] in ("shape", "mean", "std", "size") and not isinstance(value, list):
                    node[place[-1]][-1] = value
                else:
                    node[place[-1]] = value
                if described(facts):
                    assert page(facts)
                    assert example(facts).size < 2**31
                else:
                    refused += 1
    assert refused > 100
    assert not described({**whole, "input": {**whole["input"], "shape": ["batch", 1, 2**20, 2**20]}})


def test_a_manifest_that_describes_no_net_is_refused(served_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    path = run / "exports/onnx/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "classes": manifest["classes"][:-1]}))
    with pytest.raises(UserError, match=r"manifest\.json does not describe a net that can be served"):
        describe(str(run), "onnx", "best")


def test_an_export_of_earlier_weights_is_refused(served_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    path = run / "exports/onnx/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, KEY: checkpoint_hash(run / "checkpoints/best.ckpt")}))
    assert describe(str(run), "onnx", "best")["target"] == "onnx"
    with (run / "checkpoints/best.ckpt").open("ab") as file:
        file.write(b"of a later epoch")
    with pytest.raises(UserError, match=r"^target=onnx: exports/onnx is of an earlier best\.ckpt: export"):
        describe(str(run), "onnx", "best")


def test_a_checkpoint_that_the_export_is_not_of_is_refused(served_run: Path) -> None:
    with pytest.raises(UserError, match=r"^checkpoint=last: target=onnx was exported from best\.ckpt"):
        describe(str(served_run), "onnx", "last")


def test_receipts(tmp_path: Path, options: Callable[..., Any]) -> None:
    assert receipt(tmp_path) is None
    path = tmp_path / "receipt.json"
    path.write_text('{"a": 1}')
    assert receipt(tmp_path) == {"a": 1}
    for content in (b"{", b"[" * 100_000, b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"receipt\.json can't be read as a receipt"):
            receipt(tmp_path)
    path.unlink()
    (tmp_path / "secret.json").write_text('{"token": 1}')
    path.symlink_to(tmp_path / "secret.json")  # /info would show it
    assert receipt(tmp_path) is None
