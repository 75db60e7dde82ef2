"""GPU tests, skipped in one line without a GPU; see docs/gpu.md."""

import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import commands
from support.gpu import NO_GPU, Acceptance
from support.gpu_bodies import FEW, GPU_ONLY

HERE = Path(__file__).parent


@functools.cache
def gpu_is_here() -> bool:
    return torch.cuda.is_available()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.parent == HERE:
        item.add_marker(pytest.mark.gpu)
        if not item.config.getoption("gpu_stand_in"):
            # new warnings of CUDA libraries are printed and fail nothing
            item.add_marker(pytest.mark.filterwarnings("default"))


def why_not(item: pytest.Item) -> str | None:
    """Return why a test can't run here, or None."""
    if not item.config.getoption("gpu_stand_in"):
        return None if gpu_is_here() else NO_GPU
    body, _, case = f"{item.path.name}::{item.name}".removesuffix("]").partition("[")
    if body in GPU_ONLY:
        return f"no stand-in: {GPU_ONLY[body]}"
    return None if case in FEW.get(body, {case}) else f"no stand-in for this case of {body}: other tests have it"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip all tests from here, so that pytest counts those with the same reason in one line."""
    if item.path.parent == HERE and (sentence := why_not(item)):
        pytest.skip(sentence)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_GPU in str(report.longrepr)]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests of a GPU were skipped: {NO_GPU}")


@pytest.fixture(scope="session")
def gpu(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Acceptance]:
    found = Acceptance(tmp_path_factory.mktemp("gpu"), pytestconfig.getoption("gpu_stand_in"))
    commands.anew = found.real
    yield found
    commands.anew = False


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Free memory, so that a peak belongs to one body."""
    yield
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
