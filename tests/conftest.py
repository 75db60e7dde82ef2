"""What all tests share."""

import gc
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Two torch threads on two busy cores wait for each other more than they compute. Set before torch is imported;
# subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# A test must not reach for a network.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# The key that marks exports as made here lies in the user's folder, which is none of a test's business.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"lathe-tests-{os.getuid()}")

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from support import composing, elastic, timm_here
from support.commands import in_process

torch.set_num_threads(1)
composing.once()
elastic.quick()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two of the whole suite; none where files or tests are named, whose start would take longer than they do."""
    named = config.invocation_params.args and any(
        Path(word.partition("::")[0]).exists() for word in config.invocation_params.args
    )
    return 0 if named else min(2, os.cpu_count() or 1)


# The files that take longest begin, so that both workers end at about the same time.
LONGEST = (
    "laws/test_law3_interruption.py",
    "config/test_choices.py",
    "launch/test_agent.py",
    "laws/test_law7_mistakes.py",
    "receipt/test_receipt.py",
    "test_repository.py",
    "strategies/test_deepspeed_runs.py",
    "callbacks/test_distill.py",
    "verbs/export/test_ship.py",
    "benchmark/test_inference.py",
    "export/test_executorch.py",
    "laws/test_law1_same_config.py",
    "data/test_foreign.py",
    "strategies/test_tensor.py",
    "verbs/test_run_ends.py",
    "laws/test_law3_lines.py",
    "test_readme.py",
    "test_faults.py",
    "laws/test_law2_strategies.py",
    "verbs/export/test_matrix.py",
    "test_torchserve_script.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`-m law3` selects the tests of law 3: those of tests/laws by the name of their file, others by their mark."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if found := re.match(r"test_(law[1-7])_", item.path.name):
            item.add_marker(found[1])


@pytest.fixture(scope="module", autouse=True)
def _settled() -> None:
    """What a file of tests finds, modules above all, is no garbage: a collection, of which a measurement makes several,
    need not walk through it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _clean_state():
    """Each test starts without a composed configuration and leaves torch's global settings as they were."""
    GlobalHydra.instance().clear()
    os.environ.pop("LATHE_TRUSTED", None)  # what an earlier command in this process trusted
    if (events := sys.modules.get("tensorboard.summary.writer.event_file_writer")) is not None:
        # It numbers the files of a process, and of files begun in the same second ".10" is read before ".9".
        events._global_uid = events.AtomicCounter(0)
    matmul, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = convolutions
    GlobalHydra.instance().clear()


@pytest.fixture
def cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Runs a script's main in this process as if its arguments had been typed in an empty folder: (exit code, standard
    error).
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setenv("LATHE_FULL_ERROR", "0")

    def call(*arguments: str, script: str = "train.py") -> tuple[int, str]:
        capfd.readouterr()
        return in_process(script, *arguments), capfd.readouterr().err

    return call


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package timm; skips where it is not installed."""
    return timm_here.use(monkeypatch)
