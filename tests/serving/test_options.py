"""The keys of configs/serve.yaml that depend on each other, on the machine or the environment."""

from collections.abc import Callable
from typing import Any

import pytest

from lathe.errors import UserError
from lathe.serving import options as module
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
    monkeypatch.setattr(module, "gpus", lambda: [f"cuda:{index}" for index in range(count)])
    found = options(workers=asked, trainer=GPU)
    assert (found.workers, list(found.devices)) == (len(wanted), wanted)


def test_on_the_cpu_there_is_one_worker_and_no_device(options: Callable[..., Any]) -> None:
    assert (options().workers, options().devices) == (1, ())
    assert (options(workers=4).workers, options(workers=4).devices) == (4, ())


def test_without_a_gpu_or_an_export_it_is_refused(options: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "gpus", list)
    with pytest.raises(UserError, match=r"^trainer.accelerator=gpu: no GPU is visible here"):
        options(trainer=GPU)
    with pytest.raises(UserError, match="name one export"):
        options(export=None)
