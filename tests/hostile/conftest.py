"""A stranger's run directory, and what opening it says."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile_runs import CANARY, SECRET, copied, harmless

from lathe.errors import UserError
from lathe.runs.rundir import RunDir, open_run

Refusal = Callable[[RunDir], str]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return harmless(tmp_path_factory.mktemp("logs"))


@pytest.fixture
def foreign(good: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A stranger's copy of a run, in an empty folder that Python imports from, with a secret in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("LATHE_TEST_SECRET", SECRET)
    monkeypatch.delenv("LATHE_TRUSTED", raising=False)
    return copied(good, tmp_path)


@pytest.fixture
def refusal() -> Refusal:
    """The message of opening a run, after asserting that it is one line, ran nothing and shows no secret."""
    return _refusal


def _refusal(run: RunDir) -> str:
    before = set(sys.modules)
    with pytest.raises(UserError) as caught:
        open_run(run.path, "run")
    words = str(caught.value)
    assert words.startswith(f"run={run.path}: its config.yaml ")
    assert words.count("\n") == 0
    assert words.isprintable()
    assert SECRET not in words
    assert len(words) < 1500
    assert not Path(CANARY).exists()
    assert "planted_module" not in set(sys.modules) - before
    return words
