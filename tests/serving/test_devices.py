"""Choice of a worker's device, with the CPU in place of a GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lathe.errors import UserError
from lathe.serving import devices, model

GPU = {"accelerator": "gpu", "devices": 1}


@pytest.mark.parametrize(
    ("count", "asked", "wanted"),
    [
        (1, "auto", ["cuda:0"]),
        (3, "auto", ["cuda:0", "cuda:1", "cuda:2"]),
        (3, 2, ["cuda:0", "cuda:1"]),
        (2, 5, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
    ],
)
def test_a_worker_for_each_gpu(
    options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, count: int, asked: Any, wanted: list[str]
) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: [f"cuda:{index}" for index in range(count)])
    found = options(workers=asked, trainer=GPU)
    assert (found.workers, list(found.devices)) == (len(wanted), wanted)


def test_on_the_cpu_there_is_one_worker_and_no_device(options: Callable[..., Any]) -> None:
    assert (options().workers, options().devices) == (1, ())
    assert (options(workers=4).workers, options(workers=4).devices) == (4, ())


def test_without_a_gpu_it_is_refused(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", list)
    with pytest.raises(
        UserError, match=r"^trainer.accelerator=gpu: no GPU of NVIDIA's is visible here: leave it cpu\.$"
    ):
        options(trainer=GPU)


@pytest.mark.parametrize("target", ["module", "onnx"])
def test_answers_of_a_device_are_those_without_one(served_run: Path, digits: np.ndarray, target: str) -> None:
    plain, placed = (model.load(str(served_run), target, "best", 1, device) for device in (None, "cpu"))
    for rows in (1, 32, 5):
        np.testing.assert_allclose(placed(digits[:rows]), plain(digits[:rows]), rtol=1e-5, atol=1e-5)
