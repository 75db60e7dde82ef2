"""Settings and hooks for all tests."""

import gc
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Two torch threads on two busy cores mostly wait for each other. Set before torch is imported; subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
# Tests must not use the network.
os.environ["WANDB_MODE"] = "offline"
os.environ["WANDB_SILENT"] = "true"
# Tests read messages, around which this would put a traceback.
os.environ.pop("HYDRA_FULL_ERROR", None)
# The key that marks exports as made here is in the user's folder, which tests must not touch.
os.environ["XDG_STATE_HOME"] = os.path.join(tempfile.gettempdir(), f"lathe-tests-{os.getuid()}")
# Compiled code is cached for all tests, whose runs have separate data folders.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(os.environ["XDG_STATE_HOME"], "compiled"))
# Trust the CPU's flags: Inductor would compile and load a test program for each vector width in each cache folder.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

# Keep Python's bytecode, also if it is disabled: each process that tests start would compile every file again, and so
# would the next pass.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "the acceptance on GPUs: -m gpu")
    group.addoption(
        "--gpu-stand-in", choices=["cpu"], help="run what can on this device, to prove the tests themselves"
    )
    group.addoption("--gpu-results", help="write what a GPU gave to this file, such as docs/gpu_results.json")


def pytest_configure(config: pytest.Config) -> None:
    """Register fixtures in the processes that run tests: a controller need not import their dependencies."""
    if config.getoption("gpu_results") and not hasattr(config, "workerinput"):  # workers send theirs to the controller
        if config.getoption("gpu_stand_in"):
            raise pytest.UsageError("--gpu-results is of a real GPU: leave --gpu-stand-in out.")
        from support.gpu import Record

        config.pluginmanager.register(Record(Path(config.getoption("gpu_results"))))
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        from support import fixtures

        config.pluginmanager.register(fixtures)
    else:
        from support import workers

        workers.fork()
        workers.rewrite_ahead(config, Path(__file__).parent)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection while tests are collected: objects created there stay alive."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker more than cores, up to three, for the default suite.

    A fifth of its time is waiting. Two for the slow tests, whose timeouts three would exceed. None if files or tests
    are named, as workers take longer to start, and for tests that share a GPU.
    """
    marks = config.getoption("markexpr")
    alone = marks == "gpu"
    named = config.invocation_params.args and any(
        Path(word.partition("::")[0]).exists() for word in config.invocation_params.args
    )
    cores = os.cpu_count() or 1
    return 0 if named or alone else min(3, cores + 1) if marks.startswith("not slow") else min(2, cores)


# The slowest files start first, of the default suite and of the slow one: all workers end at about the same time.
LONGEST = (
    *("laws/test_law3_interruption.py", "config/test_choices.py", "tasks/test_lightning_module.py"),
    *("launch/sweep/test_grid.py", "strategies/test_fsdp.py", "strategies/test_tensor.py", "modules/test_modules.py"),
    *("callbacks/test_distill.py", "laws/test_law7_mistakes.py", "laws/test_steps_per_call.py"),
    *("test_gpu_acceptance.py", "test_faults.py", "test_readme.py", "laws/test_law2_strategies.py", "test_losses.py"),
    *("modules/test_table.py", "verbs/export/test_matrix.py", "strategies/test_pipeline.py", "test_user_clone.py"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m law3` select the tests of law 3: those in tests/laws by file name, others by mark."""
    place = {Path(__file__).parent / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if found := re.match(r"test_(law[1-7])_", item.path.name):
            item.add_marker(found[1])
