"""The archive for TorchServe; tests/test_torchserve_script.py runs TorchServe itself."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.torchserve_archives import PIXELS, archived, pictures, shipped
from torch import Tensor, nn

from lathe.contrib.torchserve import sources
from lathe.errors import UserError
from lathe.export import get

pytest.importorskip("model_archiver")
Make = Callable[[], nn.Module]


def test_an_archive_holds_what_serves(tmp_path: Path) -> None:
    example = torch.rand(2, 1, 8, 8)
    net = shipped()
    options = {"workers": 2, "batch_size": 7, "max_batch_delay": 9, "response_timeout": 11}
    target = get("torchserve", payload="onnx", **options)
    target.facts = PIXELS
    target.export(net.net, example, tmp_path / "m.mar")
    assert os.listdir(tmp_path) == ["m.mar"]
    with zipfile.ZipFile(tmp_path / "m.mar") as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert set(files) == {"MAR-INF/MANIFEST.json", "facts.json", "model-config.yaml", "model.onnx", *sources()}
    manifest = json.loads(files["MAR-INF/MANIFEST.json"])["model"]
    assert (manifest["handler"], manifest["configFile"]) == ("lathe_contrib_torchserve_handler.py", "model-config.yaml")
    assert files["model-config.yaml"].decode().splitlines() == [
        "minWorkers: 2",
        "maxWorkers: 2",
        "batchSize: 7",
        "maxBatchDelay: 9",
        "responseTimeout: 11",
        "deviceType: cpu",
    ]


@pytest.mark.slow
def test_parity_in_a_process_without_lathe(folder: Path, tmp_path: Path) -> None:
    pixels = pictures(5)[:, None]
    np.save(tmp_path / "x.npy", pixels)
    code = (
        "import sys; sys.modules['lathe'] = None; sys.path.insert(0, sys.argv[1]); import numpy as np;import "
        "lathe_contrib_torchserve_handler as h; np.save('y.npy', h.Model(sys.argv[1], 1).logits(np.load('x.npy')))"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=tmp_path, check=True, timeout=120)
    with torch.no_grad():
        want = shipped()(torch.from_numpy(pixels)).numpy()
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want, atol=1e-5)
    forward = get("torchserve").load(folder.with_suffix(".mar"), 1)
    np.testing.assert_allclose(forward(pixels[:1]), want[:1], atol=1e-5)


def test_integers_stay_integers(
    make_mlp: Make, images: Tensor, tmp_path: Path, quantized: Callable[..., nn.Module]
) -> None:
    net = quantized(make_mlp(), images)
    folder = archived(tmp_path / "m.mar", net, images[:2])
    facts = json.loads((folder / "facts.json").read_text())
    assert facts["payload"] == {"kind": "onnx", "file": "model.onnx"}
    assert (folder / "model.onnx").read_bytes().count(b"QuantizeLinear") >= 3
    with torch.no_grad():
        want = net(images).numpy()
    got = get("torchserve").load(tmp_path / "m.mar", 1)(images.numpy())
    assert (got.argmax(1) == want.argmax(1)).mean() >= 0.95
    assert np.abs(got - want).max() < 0.1 * np.abs(want).max()
    with pytest.raises(UserError, match="payload=torchscript holds floats alone, and this net is quantized"):
        get("torchserve", payload="torchscript").export(net, images[:2], tmp_path / "other.mar")


def changed(path: Path, name: str, content: bytes) -> Path:
    """Return a copy of an archive with another file of that name."""
    other = path.with_name("other.mar")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as sink:
        for entry in source.namelist():
            if entry != name:
                sink.writestr(entry, source.read(entry))
        sink.writestr(name, content)
    return other


def test_archives_that_are_not_lathe_s_are_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, load = tmp_path / "m.mar", get("torchserve").load
    path.write_bytes(b"torn")
    with pytest.raises(UserError, match="can't be read as an archive"):
        load(path)
    shutil.copy(folder.with_suffix(".mar"), path)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    other = changed(path, "lathe_contrib_torchserve_handler.py", b"raise SystemExit('this ran')\n")
    assert load(other)(pictures(1)[:, None]).shape == (1, 4)  # its handler is not run
    with pytest.raises(UserError, match="can't be read as an archive"):
        load(changed(path, "facts.json", b'{"payload": {"kind": "torch_export", "file": "../../model.pt2"}}'))
    with pytest.raises(UserError, match=r"the torch_export payload, made with torch .*, can't be loaded"):
        load(changed(path, "model.pt2", b"torn"))
    assert not os.listdir(temporary)
    forward = load(path)
    assert forward(pictures(1)[:, None]).shape == (1, 4)
    assert len(os.listdir(temporary)) == 1
    del forward
    assert not os.listdir(temporary)
