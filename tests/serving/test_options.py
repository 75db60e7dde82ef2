"""The keys of configs/serve.yaml that depend on each other, and which export is served."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.errors import UserError
from lathe.runs.checkpoints import KEY as HASH
from lathe.runs.checkpoints import checkpoint_hash
from lathe.serving.model import describe, load
from lathe.serving.options import KEY

GPU = {"accelerator": "gpu", "devices": 1}


def test_cores_are_shared_between_workers(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [options(workers=n).threads for n in (1, 3, 16)] == [8, 2, 1]
    assert options(workers=3, threads=7).threads == 7


def test_the_key_of_the_command_comes_before_the_environments(
    options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options().api_key is None
    monkeypatch.setenv(KEY, "from-outside")
    assert options().api_key == "from-outside"
    monkeypatch.setenv(KEY, "")  # of a service whose key was left empty, which must not open it to all
    with pytest.raises(UserError, match=f"{KEY} is empty"):
        options()
    monkeypatch.setenv(KEY, "from-outside")
    assert options(api_key=123).api_key == "123"
    assert "from-outside" not in repr(options())


def test_a_worker_for_each_gpu(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for count, workers, devices in (
        (1, "auto", ["cuda:0"]),
        (3, "auto", ["cuda:0", "cuda:1", "cuda:2"]),
        (3, 2, ["cuda:0", "cuda:1"]),
        (2, 5, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
    ):
        monkeypatch.setattr("torch.cuda.device_count", lambda count=count: count)
        found = options(workers=workers, trainer=GPU)
        assert (found.workers, list(found.devices)) == (len(devices), devices)
    assert (options().workers, options().devices) == (1, ())
    assert (options(workers=4).workers, options(workers=4).devices) == (4, ())


def test_without_a_gpu_or_an_export_it_is_refused(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UserError, match=r"^trainer.accelerator=gpu: no GPU is visible here"):
        options(trainer=GPU)
    with pytest.raises(UserError, match="name one export"):
        options(export=None)


def test_an_export_of_other_weights_or_none_is_refused(served_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(served_run, run)
    path = run / "exports/onnx/manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, HASH: checkpoint_hash(run / "checkpoints/best.ckpt")}))
    assert describe(str(run), "onnx", "best")["target"] == "onnx"
    with (run / "checkpoints/best.ckpt").open("ab") as file:
        file.write(b"of a later epoch")
    with pytest.raises(UserError, match=r"^target=onnx: exports/onnx is of an earlier best\.ckpt: export"):
        describe(str(run), "onnx", "best")
    with pytest.raises(UserError, match=r"^checkpoint=last: target=onnx was exported from best\.ckpt"):
        describe(str(served_run), "onnx", "last")
    for target in ("onnx_int8", "../checkpoints"):
        with pytest.raises(UserError, match=r"make it with python scripts/export\.py"):
            describe(str(served_run), target, "best")


def test_the_module_answers_as_its_export_with_and_without_a_device(served_run: Path, digits: np.ndarray) -> None:
    assert describe(str(served_run), "module", "best")["target"] == "module"
    for target in ("module", "onnx"):
        for device in (None, "cpu"):
            net = load(str(served_run), target, "best", 1, device)
            for rows in (1, 32, 5):
                wanted = load(str(served_run), "onnx", "best", 1)(digits[:rows])
                np.testing.assert_allclose(net(digits[:rows]), wanted, rtol=1e-4, atol=1e-4)
